// libopapi: matrix products, accumulated in double.
#include <cstdint>
#include <vector>

#include "acl_codes.h"
#include "nn_view.h"

using namespace cann_sim;

namespace {

// out = beta * bias + alpha * (a @ b) over broadcast leading axes.
struct Product {
  int a = -1;
  int b = -1;
  int bias = -1;
  int out = -1;
  double alpha = 1;
  double beta = 1;
};

// A view with at least two axes: a vector becomes a row or a column.
View matrix(View view, bool row) {
  if (view.info.rank() > 1) return view;
  auto& d = view.info.dims;
  auto& s = view.info.strides;
  d.insert(row ? d.begin() : d.end(), 1);
  s.insert(row ? s.begin() : s.end(), 0);
  return view;
}

void multiply(const Call& call, const Product& p) {
  View a = open_view(call, p.a, Access::kRead, "self");
  View b = open_view(call, p.b, Access::kRead, "mat2");
  View out = open_view(call, p.out, Access::kWrite, "out");
  if (!a.ok || !b.ok || !out.ok || out.info.numel() == 0) return;
  a = matrix(a, true);
  b = matrix(b, false);
  int64_t rows = a.info.dims[a.info.rank() - 2];
  int64_t inner = a.info.dims.back();
  int64_t columns = b.info.dims.back();
  // Leading axes of the product.
  size_t rank = std::max(a.info.dims.size(), b.info.dims.size());
  std::vector<int64_t> lead(rank - 2, 1);
  for (const View* v : {&a, &b}) {
    size_t skip = rank - v->info.dims.size();
    for (size_t i = 0; i + 2 < v->info.dims.size(); ++i) {
      if (v->info.dims[i] != 1) lead[skip + i] = v->info.dims[i];
    }
  }
  auto widened = [&](const View& v) {
    std::vector<int64_t> dims = lead;
    dims.insert(dims.end(), v.info.dims.end() - 2, v.info.dims.end());
    View wide;
    expand(v, dims, &wide);
    return inner ? read_reals(wide) : std::vector<double>();
  };
  std::vector<double> x = widened(a);
  std::vector<double> y = widened(b);
  int64_t batches = product(lead);
  std::vector<double> z(batches * rows * columns, 0.0);
  for (int64_t n = 0; n < batches; ++n) {
    for (int64_t i = 0; i < rows; ++i) {
      double* row = &z[(n * rows + i) * columns];
      for (int64_t k = 0; k < inner; ++k) {
        double factor = x[(n * rows + i) * inner + k];
        const double* line = &y[(n * inner + k) * columns];
        for (int64_t j = 0; j < columns; ++j) row[j] += factor * line[j];
      }
    }
  }
  if (p.bias >= 0) {
    View bias = open_view(call, p.bias, Access::kRead, "bias");
    View wide;
    if (!bias.ok || !expand(bias, out.info.dims, &wide)) return;
    std::vector<double> c = read_reals(wide);
    for (size_t i = 0; i < z.size(); ++i) {
      z[i] = p.beta * c[i] + p.alpha * z[i];
    }
  }
  write_reals(out, z);
}

int plan_product(Plan* plan, Product p) {
  if (p.a < 0 || p.b < 0 || p.out < 0) {
    return plan->refuse(kAclnnNullptr, "null tensor");
  }
  const TensorInfo& a = plan->info(p.a);
  const TensorInfo& b = plan->info(p.b);
  int64_t inner = b.rank() == 1 ? b.dims[0] : b.dims[b.rank() - 2];
  if (a.dims.back() != inner) {
    return plan->refuse(kAclnnInvalid, "inner sizes differ");
  }
  return plan->accept([p](const Call& call) { multiply(call, p); });
}

}  // namespace

#define MATMUL(op)                                                          \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                                 \
      const aclTensor* self, const aclTensor* mat2, aclTensor* out, int8_t, \
      uint64_t* workspace_bytes, aclOpExecutor** executor) {                \
    ACLNN_PHASE1(op);                                                       \
    Product p;                                                              \
    p.a = plan.tensor("self", self);                                        \
    p.b = plan.tensor("mat2", mat2);                                        \
    p.out = plan.tensor("out", out);                                        \
    return plan_product(&plan, p);                                          \
  }                                                                         \
  ACLNN_PHASE2(op)

MATMUL(aclnnMatmul)
MATMUL(aclnnMm)
MATMUL(aclnnBatchMatMul)

// (self, a, b, beta, alpha, out, cube math type)
#define ADD_MATMUL(op)                                                       \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                                  \
      const aclTensor* self, const aclTensor* a, const aclTensor* b,         \
      const aclScalar* beta, const aclScalar* alpha, aclTensor* out, int8_t, \
      uint64_t* workspace_bytes, aclOpExecutor** executor) {                 \
    ACLNN_PHASE1(op);                                                        \
    Product p;                                                               \
    p.bias = plan.tensor("self", self);                                      \
    p.a = plan.tensor("mat1", a);                                            \
    p.b = plan.tensor("mat2", b);                                            \
    plan.scalar("beta", beta);                                               \
    plan.scalar("alpha", alpha);                                             \
    p.out = plan.tensor("out", out);                                         \
    if (!beta || !alpha) return plan.refuse(kAclnnNullptr, "null scalar");   \
    p.beta = beta->info.real;                                                \
    p.alpha = alpha->info.real;                                              \
    return plan_product(&plan, p);                                           \
  }                                                                          \
  ACLNN_PHASE2(op)

ADD_MATMUL(aclnnAddmm)
ADD_MATMUL(aclnnBaddbmm)
