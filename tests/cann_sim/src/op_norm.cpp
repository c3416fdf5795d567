// libopapi: normalisations and other fused formulas over the last axis.
#include <cmath>
#include <cstdint>
#include <vector>

#include "acl_codes.h"
#include "op_elementwise.h"

using namespace cann_sim;

namespace {

// Tensor numbers of a normalisation; -1 for what is absent.
struct Norm {
  int x = -1;
  int weight = -1;
  int bias = -1;
  int out = -1;
  int mean = -1;
  int rstd = -1;
  int64_t width = 1;  // elements that are normalised together
  double epsilon = 0;
  bool centred = true;  // layer norm; else root mean square
};

std::vector<double> reals(const Call& call, int index, const char* name) {
  if (index < 0) return {};
  View v = open_view(call, index, Access::kRead, name);
  return v.ok && v.base ? read_reals(v) : std::vector<double>();
}

void write(const Call& call, int index, const std::vector<double>& values) {
  if (index < 0) return;
  View v = open_view(call, index, Access::kWrite, "out");
  if (v.ok && v.info.numel() == static_cast<int64_t>(values.size())) {
    write_reals(v, values);
  }
}

void normalise(const Call& call, const Norm& p) {
  std::vector<double> x = reals(call, p.x, "x");
  std::vector<double> weight = reals(call, p.weight, "weight");
  std::vector<double> bias = reals(call, p.bias, "bias");
  std::vector<double> means;
  std::vector<double> rstds;
  for (size_t begin = 0; begin < x.size(); begin += p.width) {
    double mean = 0;
    if (p.centred) {
      for (int64_t i = 0; i < p.width; ++i) mean += x[begin + i];
      mean /= static_cast<double>(p.width);
    }
    double square = 0;
    for (int64_t i = 0; i < p.width; ++i) {
      double d = x[begin + i] - mean;
      square += d * d;
    }
    double rstd =
        1.0 / std::sqrt(square / static_cast<double>(p.width) + p.epsilon);
    for (int64_t i = 0; i < p.width; ++i) {
      double& v = x[begin + i];
      v = (v - mean) * rstd;
      if (!weight.empty()) v *= weight[i];
      if (!bias.empty()) v += bias[i];
    }
    means.push_back(mean);
    rstds.push_back(rstd);
  }
  write(call, p.out, x);
  write(call, p.mean, means);
  write(call, p.rstd, rstds);
}

}  // namespace

CANN_SIM_EXPORT int aclnnLayerNormGetWorkspaceSize(
    const aclTensor* x, const aclIntArray* shape, const aclTensor* weight,
    const aclTensor* bias, double epsilon, aclTensor* out, aclTensor* mean,
    aclTensor* rstd, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnLayerNorm);
  Norm p;
  p.x = plan.tensor("x", x);
  plan.ints("shape", shape);
  p.weight = plan.tensor("weight", weight);
  p.bias = plan.tensor("bias", bias);
  plan.number("epsilon", epsilon);
  p.out = plan.tensor("out", out);
  p.mean = plan.tensor("mean", mean);
  p.rstd = plan.tensor("rstd", rstd);
  if (p.x < 0 || p.out < 0 || !shape) return plan.refuse(kAclnnNullptr, "null");
  p.width = product(shape->values);
  p.epsilon = epsilon;
  return plan.accept([p](const Call& call) { normalise(call, p); });
}
ACLNN_PHASE2(aclnnLayerNorm)

CANN_SIM_EXPORT int aclnnRmsNormGetWorkspaceSize(
    const aclTensor* x, const aclTensor* gamma, double epsilon, aclTensor* out,
    aclTensor* rstd, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnRmsNorm);
  Norm p;
  p.x = plan.tensor("x", x);
  p.weight = plan.tensor("gamma", gamma);
  plan.number("epsilon", epsilon);
  p.out = plan.tensor("out", out);
  p.rstd = plan.tensor("rstd", rstd);
  if (p.x < 0 || p.weight < 0 || p.out < 0) {
    return plan.refuse(kAclnnNullptr, "null tensor");
  }
  p.width = plan.info(p.weight).numel();
  p.epsilon = epsilon;
  p.centred = false;
  return plan.accept([p](const Call& call) { normalise(call, p); });
}
ACLNN_PHASE2(aclnnRmsNorm)

// silu(first half) * second half along an axis.
CANN_SIM_EXPORT int aclnnSwiGluGetWorkspaceSize(const aclTensor* x, int64_t dim,
                                                aclTensor* out,
                                                uint64_t* workspace_bytes,
                                                aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnSwiGlu);
  int from = plan.tensor("x", x);
  plan.number("dim", static_cast<double>(dim));
  int to = plan.tensor("out", out);
  if (from < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null tensor");
  return plan.accept([=](const Call& call) {
    View a = open_view(call, from, Access::kRead, "x");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!a.ok || !y.ok || y.info.numel() == 0) return;
    int64_t axis = dim < 0 ? dim + a.info.rank() : dim;
    a.info.dims[axis] /= 2;
    View b = a;
    b.base += a.info.dims[axis] * a.info.strides[axis] * a.info.itemsize();
    std::vector<double> gate = read_reals(a);
    std::vector<double> up = read_reals(b);
    for (size_t i = 0; i < gate.size(); ++i) {
      gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
    }
    write_reals(y, gate);
  });
}
ACLNN_PHASE2(aclnnSwiGlu)

namespace {

// self + value * (a op b)
template <typename Function>
int plan_addc(Plan* plan, const aclTensor* self, const aclTensor* a,
              const aclTensor* b, const aclScalar* value, aclTensor* out,
              Function function) {
  int s = plan->tensor("self", self);
  int x = plan->tensor("tensor1", a);
  int y = plan->tensor("tensor2", b);
  plan->scalar("value", value);
  int to = out == self ? s : plan->tensor("out", out);
  if (s < 0 || x < 0 || y < 0 || to < 0 || !value) {
    return plan->refuse(kAclnnNullptr, "null argument");
  }
  double factor = value->info.real;
  return plan->accept(map_kernel(
      {tensor_operand(s), tensor_operand(x), tensor_operand(y)}, to, true,
      [=](const auto& v, size_t i) {
        return v[0][i] + factor * function(static_cast<double>(v[1][i]),
                                           static_cast<double>(v[2][i]));
      }));
}

constexpr auto kTimes = [](double a, double b) { return a * b; };
constexpr auto kOver = [](double a, double b) { return a / b; };

}  // namespace

#define ADDC(name, function)                                             \
  CANN_SIM_EXPORT int aclnn##name##GetWorkspaceSize(                     \
      const aclTensor* self, const aclTensor* a, const aclTensor* b,     \
      const aclScalar* value, aclTensor* out, uint64_t* workspace_bytes, \
      aclOpExecutor** executor) {                                        \
    ACLNN_PHASE1(aclnn##name);                                           \
    return plan_addc(&plan, self, a, b, value, out, function);           \
  }                                                                      \
  ACLNN_PHASE2(aclnn##name)                                              \
  CANN_SIM_EXPORT int aclnnInplace##name##GetWorkspaceSize(              \
      aclTensor* self, const aclTensor* a, const aclTensor* b,           \
      const aclScalar* value, uint64_t* workspace_bytes,                 \
      aclOpExecutor** executor) {                                        \
    ACLNN_PHASE1(aclnnInplace##name);                                    \
    return plan_addc(&plan, self, a, b, value, self, function);          \
  }                                                                      \
  ACLNN_PHASE2(aclnnInplace##name)

ADDC(Addcmul, kTimes)
ADDC(Addcdiv, kOver)
