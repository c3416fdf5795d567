// libopapi: reductions and scans along axes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "acl_codes.h"
#include "nn_view.h"

using namespace cann_sim;

namespace {

// A view cut into lines along axes: for every position of the other axes, the
// elements of `axes` in row-major order.
template <typename T>
std::vector<std::vector<T>> lines_of(const View& view,
                                     const std::vector<int64_t>& axes) {
  const TensorInfo& t = view.info;
  std::vector<int64_t> order;
  int64_t line = 1;
  for (int64_t i = 0; i < t.rank(); ++i) {
    bool inside = std::find(axes.begin(), axes.end(), i) != axes.end();
    if (!inside) order.push_back(i);
  }
  for (int64_t axis : axes) {
    order.push_back(axis);
    line *= t.dims[axis];
  }
  View moved = view;
  for (int64_t i = 0; i < t.rank(); ++i) {
    moved.info.dims[i] = t.dims[order[i]];
    moved.info.strides[i] = t.strides[order[i]];
  }
  std::vector<T> flat;
  if (t.numel()) flat = read_values<T>(moved);
  int64_t count = line ? static_cast<int64_t>(flat.size()) / line : 0;
  std::vector<std::vector<T>> lines(count);
  for (int64_t i = 0; i < count; ++i) {
    lines[i].assign(flat.begin() + i * line, flat.begin() + (i + 1) * line);
  }
  return lines;
}

std::vector<int64_t> normalized(std::vector<int64_t> axes, int64_t rank) {
  if (axes.empty()) {
    for (int64_t i = 0; i < rank; ++i) axes.push_back(i);
  }
  for (int64_t& axis : axes) {
    if (axis < 0) axis += rank;
  }
  std::sort(axes.begin(), axes.end());
  return axes;
}

// function: line -> value. T is double for floating inputs, else int64_t.
template <typename T, typename Function>
void reduce(const Call& call, int self, int out, std::vector<int64_t> axes,
            Function function) {
  View from = open_view(call, self, Access::kRead, "self");
  View to = open_view(call, out, Access::kWrite, "out");
  if (!from.ok || !to.ok || to.info.numel() == 0) return;
  std::vector<T> results;
  for (auto& line : lines_of<T>(from, normalized(axes, from.info.rank()))) {
    results.push_back(static_cast<T>(function(line)));
  }
  // An empty input reduces to the value of an empty line.
  results.resize(to.info.numel(), static_cast<T>(function(std::vector<T>())));
  write_values(to, results);
}

template <typename Function>
Kernel reduce_kernel(int self, int out, std::vector<int64_t> axes, bool real,
                     Function function) {
  return [=](const Call& call) {
    if (real || is_floating(call.tensors[self].data_type)) {
      reduce<double>(call, self, out, axes, function);
    } else {
      reduce<int64_t>(call, self, out, axes, function);
    }
  };
}

constexpr auto kSum = [](const auto& line) {
  typename std::decay_t<decltype(line)>::value_type sum = 0;
  for (auto v : line) sum += v;
  return sum;
};
constexpr auto kMean = [](const auto& line) {
  double sum = 0;
  for (auto v : line) sum += static_cast<double>(v);
  return sum / static_cast<double>(line.size());
};
constexpr auto kProduct = [](const auto& line) {
  typename std::decay_t<decltype(line)>::value_type out = 1;
  for (auto v : line) out *= v;
  return out;
};
// NaN wins, as in torch.
constexpr auto kArgMax = [](const auto& line) {
  size_t best = 0;
  for (size_t i = 1; i < line.size(); ++i) {
    if (line[i] > line[best] ||
        (line[i] != line[i] && line[best] == line[best]))
      best = i;
  }
  return static_cast<int64_t>(best);
};
constexpr auto kArgMin = [](const auto& line) {
  size_t best = 0;
  for (size_t i = 1; i < line.size(); ++i) {
    if (line[i] < line[best] ||
        (line[i] != line[i] && line[best] == line[best]))
      best = i;
  }
  return static_cast<int64_t>(best);
};
using Reals = std::vector<double>;
constexpr auto kMax = [](const auto& line) {
  using T = typename std::decay_t<decltype(line)>::value_type;
  return line.empty() ? T(0) : line[kArgMax(line)];
};
constexpr auto kMin = [](const auto& line) {
  using T = typename std::decay_t<decltype(line)>::value_type;
  return line.empty() ? T(0) : line[kArgMin(line)];
};
constexpr auto kAll = [](const auto& line) {
  using T = typename std::decay_t<decltype(line)>::value_type;
  for (auto v : line) {
    if (v == 0) return T(0);
  }
  return T(1);
};
constexpr auto kAny = [](const auto& line) {
  using T = typename std::decay_t<decltype(line)>::value_type;
  for (auto v : line) {
    if (v != 0) return T(1);
  }
  return T(0);
};

std::vector<int64_t> axes_of(const aclIntArray* dims) {
  return dims ? dims->values : std::vector<int64_t>();
}

template <typename Function>
int plan_reduce(Plan* plan, const aclTensor* self,
                const std::vector<int64_t>& axes, aclTensor* out, bool real,
                Function function) {
  int from = plan->tensor("self", self);
  int to = plan->tensor("out", out);
  if (from < 0 || to < 0) return plan->refuse(kAclnnNullptr, "null tensor");
  return plan->accept(reduce_kernel(from, to, axes, real, function));
}

}  // namespace

#define REDUCE_ALL(op, function)                                        \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                             \
      const aclTensor* self, aclTensor* out, uint64_t* workspace_bytes, \
      aclOpExecutor** executor) {                                       \
    ACLNN_PHASE1(op);                                                   \
    return plan_reduce(&plan, self, {}, out, false, function);          \
  }                                                                     \
  ACLNN_PHASE2(op)

// (self, dims, keepdim, dtype, out)
#define REDUCE_TYPED(op, real, function)                                     \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                                  \
      const aclTensor* self, const aclIntArray* dims, bool keep, int type,   \
      aclTensor* out, uint64_t* workspace_bytes, aclOpExecutor** executor) { \
    ACLNN_PHASE1(op);                                                        \
    plan.ints("dims", dims);                                                 \
    plan.number("keep", keep);                                               \
    plan.number("type", type);                                               \
    return plan_reduce(&plan, self, axes_of(dims), out, real, function);     \
  }                                                                          \
  ACLNN_PHASE2(op)

// (self, dims, keepdim, out)
#define REDUCE_DIMS(op, function)                                            \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                                  \
      const aclTensor* self, const aclIntArray* dims, bool keep,             \
      aclTensor* out, uint64_t* workspace_bytes, aclOpExecutor** executor) { \
    ACLNN_PHASE1(op);                                                        \
    plan.ints("dims", dims);                                                 \
    plan.number("keep", keep);                                               \
    return plan_reduce(&plan, self, axes_of(dims), out, false, function);    \
  }                                                                          \
  ACLNN_PHASE2(op)

// (self, dim, keepdim, out) for the index of an extreme.
#define REDUCE_INDEX(op, function)                                   \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                          \
      const aclTensor* self, int64_t dim, bool keep, aclTensor* out, \
      uint64_t* workspace_bytes, aclOpExecutor** executor) {         \
    ACLNN_PHASE1(op);                                                \
    plan.number("dim", static_cast<double>(dim));                    \
    plan.number("keep", keep);                                       \
    return plan_reduce(&plan, self, {dim}, out, false, function);    \
  }                                                                  \
  ACLNN_PHASE2(op)

REDUCE_ALL(aclnnMax, kMax)
REDUCE_ALL(aclnnMin, kMin)
REDUCE_TYPED(aclnnReduceSum, false, kSum)
REDUCE_TYPED(aclnnMean, true, kMean)
REDUCE_DIMS(aclnnAmax, kMax)
REDUCE_DIMS(aclnnAmin, kMin)
REDUCE_DIMS(aclnnAll, kAll)
REDUCE_DIMS(aclnnAny, kAny)
REDUCE_INDEX(aclnnArgMax, kArgMax)
REDUCE_INDEX(aclnnArgMin, kArgMin)

// (self, dims, correction, keepdim, out)
CANN_SIM_EXPORT int aclnnVarCorrectionGetWorkspaceSize(
    const aclTensor* self, const aclIntArray* dims, int64_t correction,
    bool keep, aclTensor* out, uint64_t* workspace_bytes,
    aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnVarCorrection);
  plan.ints("dims", dims);
  plan.number("correction", static_cast<double>(correction));
  plan.number("keep", keep);
  return plan_reduce(&plan, self, axes_of(dims), out, true,
                     [=](const auto& line) {
                       double mean = kMean(line);
                       double sum = 0;
                       for (auto v : line) sum += (v - mean) * (v - mean);
                       return sum / (static_cast<double>(line.size()) -
                                     static_cast<double>(correction));
                     });
}
ACLNN_PHASE2(aclnnVarCorrection)

CANN_SIM_EXPORT int aclnnProdGetWorkspaceSize(const aclTensor* self, int type,
                                              aclTensor* out,
                                              uint64_t* workspace_bytes,
                                              aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnProd);
  plan.number("type", type);
  return plan_reduce(&plan, self, {}, out, false, kProduct);
}
ACLNN_PHASE2(aclnnProd)

namespace {

template <typename Value, typename Index>
int plan_extreme(Plan* plan, const aclTensor* self, int64_t axis,
                 aclTensor* out, aclTensor* indices, Value value, Index index) {
  int from = plan->tensor("self", self);
  plan->number("dim", static_cast<double>(axis));
  int to = plan->tensor("out", out);
  int at = plan->tensor("indices", indices);
  if (from < 0 || to < 0 || at < 0) {
    return plan->refuse(kAclnnNullptr, "null tensor");
  }
  Kernel values = reduce_kernel(from, to, {axis}, false, value);
  Kernel places = reduce_kernel(from, at, {axis}, false, index);
  return plan->accept([=](const Call& call) {
    values(call);
    places(call);
  });
}

}  // namespace

CANN_SIM_EXPORT int aclnnMaxDimGetWorkspaceSize(
    const aclTensor* self, int64_t dim, bool, aclTensor* out,
    aclTensor* indices, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnMaxDim);
  return plan_extreme(&plan, self, dim, out, indices, kMax, kArgMax);
}
ACLNN_PHASE2(aclnnMaxDim)

CANN_SIM_EXPORT int aclnnMinDimGetWorkspaceSize(
    const aclTensor* self, int64_t dim, bool, aclTensor* out,
    aclTensor* indices, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnMinDim);
  return plan_extreme(&plan, self, dim, out, indices, kMin, kArgMin);
}
ACLNN_PHASE2(aclnnMinDim)

// ---- line in, line out
// -------------------------------------------------------

namespace {

template <typename T>
void transform(const Call& call, int self, int out, int64_t axis,
               const std::function<void(std::vector<T>*)>& function) {
  View from = open_view(call, self, Access::kRead, "self");
  View to = open_view(call, out, Access::kWrite, "out");
  if (!from.ok || !to.ok || to.info.numel() == 0) return;
  std::vector<T> flat;
  if (from.info.rank() == 0) {
    flat = read_values<T>(from);
    function(&flat);
    write_values(to, flat);
    return;
  }
  if (axis < 0) axis += from.info.rank();
  for (auto& line : lines_of<T>(from, {axis})) {
    function(&line);
    flat.insert(flat.end(), line.begin(), line.end());
  }
  write_values(axis_last(to, axis), flat);
}

void softmax_line(std::vector<double>* line, bool logarithm) {
  double top = -std::numeric_limits<double>::infinity();
  for (double v : *line) top = std::max(top, v);
  double sum = 0;
  for (double v : *line) sum += std::exp(v - top);
  for (double& v : *line) {
    v = logarithm ? v - top - std::log(sum) : std::exp(v - top) / sum;
  }
}

int plan_softmax(Plan* plan, const aclTensor* self, int64_t axis,
                 aclTensor* out, bool logarithm) {
  int from = plan->tensor("self", self);
  plan->number("dim", static_cast<double>(axis));
  int to = plan->tensor("out", out);
  if (from < 0 || to < 0) return plan->refuse(kAclnnNullptr, "null tensor");
  return plan->accept([=](const Call& call) {
    transform<double>(call, from, to, axis, [=](std::vector<double>* line) {
      softmax_line(line, logarithm);
    });
  });
}

template <typename T>
void cumulate(std::vector<T>* line) {
  for (size_t i = 1; i < line->size(); ++i) (*line)[i] += (*line)[i - 1];
}

}  // namespace

CANN_SIM_EXPORT int aclnnSoftmaxGetWorkspaceSize(const aclTensor* self,
                                                 int64_t dim, aclTensor* out,
                                                 uint64_t* workspace_bytes,
                                                 aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnSoftmax);
  return plan_softmax(&plan, self, dim, out, false);
}
ACLNN_PHASE2(aclnnSoftmax)

CANN_SIM_EXPORT int aclnnLogSoftmaxGetWorkspaceSize(const aclTensor* self,
                                                    int64_t dim, aclTensor* out,
                                                    uint64_t* workspace_bytes,
                                                    aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnLogSoftmax);
  return plan_softmax(&plan, self, dim, out, true);
}
ACLNN_PHASE2(aclnnLogSoftmax)

CANN_SIM_EXPORT int aclnnCumsumGetWorkspaceSize(const aclTensor* self,
                                                int64_t dim, int,
                                                aclTensor* out,
                                                uint64_t* workspace_bytes,
                                                aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnCumsum);
  int from = plan.tensor("self", self);
  plan.number("dim", static_cast<double>(dim));
  int to = plan.tensor("out", out);
  if (from < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null tensor");
  return plan.accept([=](const Call& call) {
    if (is_floating(call.tensors[to].data_type)) {
      transform<double>(call, from, to, dim, cumulate<double>);
    } else {
      transform<int64_t>(call, from, to, dim, cumulate<int64_t>);
    }
  });
}
ACLNN_PHASE2(aclnnCumsum)

namespace {

// Keeps the lower (or upper) triangle of the last two axes.
int plan_triangle(Plan* plan, const aclTensor* self, int64_t diagonal,
                  aclTensor* out, bool lower) {
  int from = plan->tensor("self", self);
  plan->number("diagonal", static_cast<double>(diagonal));
  int to = out == self ? from : plan->tensor("out", out);
  if (from < 0 || to < 0) return plan->refuse(kAclnnNullptr, "null tensor");
  return plan->accept([=](const Call& call) {
    View x = open_view(call, from, Access::kRead, "self");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !y.ok || x.info.numel() == 0) return;
    int64_t rows = x.info.dims[x.info.rank() - 2];
    int64_t columns = x.info.dims[x.info.rank() - 1];
    std::vector<double> values = read_reals(x);
    for (size_t i = 0; i < values.size(); ++i) {
      int64_t column = static_cast<int64_t>(i) % columns;
      int64_t row = static_cast<int64_t>(i) / columns % rows;
      bool kept = lower ? column - row <= diagonal : column - row >= diagonal;
      if (!kept) values[i] = 0;
    }
    write_reals(y, values);
  });
}

}  // namespace

#define TRIANGLE(op, lower)                                         \
  CANN_SIM_EXPORT int aclnn##op##GetWorkspaceSize(                  \
      const aclTensor* self, int64_t diagonal, aclTensor* out,      \
      uint64_t* workspace_bytes, aclOpExecutor** executor) {        \
    ACLNN_PHASE1(aclnn##op);                                        \
    return plan_triangle(&plan, self, diagonal, out, lower);        \
  }                                                                 \
  ACLNN_PHASE2(aclnn##op)                                           \
  CANN_SIM_EXPORT int aclnnInplace##op##GetWorkspaceSize(           \
      aclTensor* self, int64_t diagonal, uint64_t* workspace_bytes, \
      aclOpExecutor** executor) {                                   \
    ACLNN_PHASE1(aclnnInplace##op);                                 \
    return plan_triangle(&plan, self, diagonal, self, lower);       \
  }                                                                 \
  ACLNN_PHASE2(aclnnInplace##op)

TRIANGLE(Tril, true)
TRIANGLE(Triu, false)
