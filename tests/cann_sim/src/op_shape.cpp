// libopapi: operators that rearrange, repeat or select elements.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "nn_view.h"

using namespace cann_sim;

namespace {

// The part [from, from + count) of an axis.
View narrow(View view, int64_t axis, int64_t from, int64_t count) {
  view.base += from * view.info.strides[axis] * view.info.itemsize();
  view.info.dims[axis] = count;
  return view;
}

// An operator whose number of results only the data tells: the kernel
// writes the shape into the aclTensor, which the caller reads with
// aclGetViewShape after a synchronisation.
void set_result_shape(aclTensor* out, std::vector<int64_t> dims) {
  out->info.dims = std::move(dims);
}

}  // namespace

CANN_SIM_EXPORT int aclnnStackGetWorkspaceSize(const aclTensorList* list,
                                               int64_t axis, aclTensor* out,
                                               uint64_t* workspace_bytes,
                                               aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnStack);
  int first = plan.tensors("tensor", list);
  plan.number("dim", static_cast<double>(axis));
  int to = plan.tensor("out", out);
  if (first < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null tensor");
  if (axis < 0) axis += plan.info(to).rank();
  return plan.accept([=](const Call& call) {
    View target = open_view(call, to, Access::kWrite, "out");
    if (!target.ok || target.info.numel() == 0) return;
    for (int i = first; i < to; ++i) {
      View from = open_view(call, i, Access::kRead, "tensor");
      if (!from.ok) return;
      View part = narrow(target, axis, i - first, 1);
      part.info.dims.erase(part.info.dims.begin() + axis);
      part.info.strides.erase(part.info.strides.begin() + axis);
      copy_view(part, from);
    }
  });
}
ACLNN_PHASE2(aclnnStack)

CANN_SIM_EXPORT int aclnnRepeatGetWorkspaceSize(const aclTensor* self,
                                                const aclIntArray* repeats,
                                                aclTensor* out,
                                                uint64_t* workspace_bytes,
                                                aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnRepeat);
  int from = plan.tensor("self", self);
  plan.ints("repeats", repeats);
  int to = plan.tensor("out", out);
  if (from < 0 || to < 0 || !repeats) {
    return plan.refuse(kAclnnNullptr, "null argument");
  }
  std::vector<int64_t> times = repeats->values;
  return plan.accept([=](const Call& call) {
    View x = open_view(call, from, Access::kRead, "self");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !y.ok || y.info.numel() == 0) return;
    // Both sides as [times0, dim0, times1, dim1, ...].
    View wide = x;
    View target = y;
    for (View* v : {&wide, &target}) {
      v->info.dims.clear();
      v->info.strides.clear();
    }
    size_t lead = times.size() - x.info.dims.size();
    for (size_t i = 0; i < times.size(); ++i) {
      int64_t dim = i < lead ? 1 : x.info.dims[i - lead];
      int64_t stride = i < lead ? 0 : x.info.strides[i - lead];
      for (View* v : {&wide, &target}) {
        v->info.dims.push_back(times[i]);
        v->info.dims.push_back(dim);
      }
      wide.info.strides.push_back(0);
      wide.info.strides.push_back(stride);
      target.info.strides.push_back(y.info.strides[i] * dim);
      target.info.strides.push_back(y.info.strides[i]);
    }
    copy_view(target, wide);
  });
}
ACLNN_PHASE2(aclnnRepeat)

CANN_SIM_EXPORT int aclnnRepeatInterleaveIntWithDimGetWorkspaceSize(
    const aclTensor* self, int64_t repeats, int64_t dim, int64_t,
    aclTensor* out, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnRepeatInterleaveIntWithDim);
  int from = plan.tensor("self", self);
  plan.number("repeats", static_cast<double>(repeats));
  plan.number("dim", static_cast<double>(dim));
  int to = plan.tensor("out", out);
  if (from < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null tensor");
  return plan.accept([=](const Call& call) {
    View x = open_view(call, from, Access::kRead, "self");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !y.ok || y.info.numel() == 0) return;
    int64_t axis = dim < 0 ? dim + x.info.rank() : dim;
    auto split = [&](View v, int64_t outer, int64_t inner) {
      v.info.dims[axis] = x.info.dims[axis];
      v.info.strides[axis] = outer;
      v.info.dims.insert(v.info.dims.begin() + axis + 1, repeats);
      v.info.strides.insert(v.info.strides.begin() + axis + 1, inner);
      return v;
    };
    int64_t stride = y.info.strides[axis];
    copy_view(split(y, stride * repeats, stride),
              split(x, x.info.strides[axis], 0));
  });
}
ACLNN_PHASE2(aclnnRepeatInterleaveIntWithDim)

CANN_SIM_EXPORT int aclnnFlipGetWorkspaceSize(const aclTensor* self,
                                              const aclIntArray* dims,
                                              aclTensor* out,
                                              uint64_t* workspace_bytes,
                                              aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnFlip);
  int from = plan.tensor("self", self);
  plan.ints("dims", dims);
  int to = plan.tensor("out", out);
  if (from < 0 || to < 0 || !dims) return plan.refuse(kAclnnNullptr, "null");
  std::vector<int64_t> axes = dims->values;
  return plan.accept([=](const Call& call) {
    View x = open_view(call, from, Access::kRead, "self");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !y.ok || y.info.numel() == 0) return;
    for (int64_t axis : axes) {
      if (axis < 0) axis += x.info.rank();
      x.base +=
          (x.info.dims[axis] - 1) * x.info.strides[axis] * x.info.itemsize();
      x.info.strides[axis] = -x.info.strides[axis];
    }
    copy_view(y, x);
  });
}
ACLNN_PHASE2(aclnnFlip)

namespace {

// Sorted lines of an axis, the first `count` of each, values and indices.
struct Order {
  int self = -1;
  int values = -1;
  int indices = -1;
  int64_t axis = 0;
  bool descending = false;
};

void write_order(const Call& call, const Order& p) {
  View x = open_view(call, p.self, Access::kRead, "self");
  View v = open_view(call, p.values, Access::kWrite, "values");
  View n = open_view(call, p.indices, Access::kWrite, "indices");
  if (!x.ok || !v.ok || !n.ok || v.info.numel() == 0) return;
  int64_t axis = p.axis < 0 ? p.axis + x.info.rank() : p.axis;
  int64_t length = x.info.dims[axis];
  int64_t count = v.info.dims[axis];
  std::vector<double> flat = read_reals(axis_last(x, axis));
  std::vector<double> values;
  std::vector<int64_t> indices;
  for (size_t begin = 0; begin < flat.size(); begin += length) {
    const double* line = &flat[begin];
    std::vector<int64_t> order(length);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return p.descending ? line[a] > line[b] : line[a] < line[b];
    });
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(line[order[i]]);
      indices.push_back(order[i]);
    }
  }
  write_reals(axis_last(v, axis), values);
  write_integers(axis_last(n, axis), indices);
}

}  // namespace

CANN_SIM_EXPORT int aclnnTopkGetWorkspaceSize(const aclTensor* self, int64_t k,
                                              int64_t dim, bool largest, bool,
                                              aclTensor* values,
                                              aclTensor* indices,
                                              uint64_t* workspace_bytes,
                                              aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnTopk);
  Order p;
  p.self = plan.tensor("self", self);
  plan.number("k", static_cast<double>(k));
  plan.number("dim", static_cast<double>(dim));
  plan.number("largest", largest);
  p.values = plan.tensor("values", values);
  p.indices = plan.tensor("indices", indices);
  p.axis = dim;
  p.descending = largest;
  if (p.self < 0 || p.values < 0 || p.indices < 0) {
    return plan.refuse(kAclnnNullptr, "null tensor");
  }
  return plan.accept([p](const Call& call) { write_order(call, p); });
}
ACLNN_PHASE2(aclnnTopk)

CANN_SIM_EXPORT int aclnnSortGetWorkspaceSize(const aclTensor* self, bool,
                                              int64_t dim, bool descending,
                                              aclTensor* values,
                                              aclTensor* indices,
                                              uint64_t* workspace_bytes,
                                              aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnSort);
  Order p;
  p.self = plan.tensor("self", self);
  plan.number("dim", static_cast<double>(dim));
  plan.number("descending", descending);
  p.values = plan.tensor("values", values);
  p.indices = plan.tensor("indices", indices);
  p.axis = dim;
  p.descending = descending;
  if (p.self < 0 || p.values < 0 || p.indices < 0) {
    return plan.refuse(kAclnnNullptr, "null tensor");
  }
  return plan.accept([p](const Call& call) { write_order(call, p); });
}
ACLNN_PHASE2(aclnnSort)

CANN_SIM_EXPORT int aclnnMaskedSelectGetWorkspaceSize(
    const aclTensor* self, const aclTensor* mask, aclTensor* out,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnMaskedSelect);
  int from = plan.tensor("self", self);
  int where = plan.tensor("mask", mask);
  int to = plan.tensor("out", out);
  if (from < 0 || where < 0 || to < 0) {
    return plan.refuse(kAclnnNullptr, "null tensor");
  }
  return plan.accept([=](const Call& call) {
    View x = open_view(call, from, Access::kRead, "self");
    View m = open_view(call, where, Access::kRead, "mask");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !m.ok || !y.ok) return;
    // The common shape is that of the larger operand.
    std::vector<int64_t> dims =
        x.info.numel() >= m.info.numel() ? x.info.dims : m.info.dims;
    View wide_x;
    View wide_m;
    if (!expand(x, dims, &wide_x) || !expand(m, dims, &wide_m)) return;
    std::vector<double> picked;
    std::vector<int64_t> exact;
    if (product(dims)) {
      std::vector<double> values = read_reals(wide_x);
      std::vector<int64_t> integers = read_integers(wide_x);
      std::vector<int64_t> chosen = read_integers(wide_m);
      for (size_t i = 0; i < values.size(); ++i) {
        if (!chosen[i]) continue;
        picked.push_back(values[i]);
        exact.push_back(integers[i]);
      }
    }
    int64_t count = static_cast<int64_t>(picked.size());
    y.info.dims = {count};
    y.info.strides = {1};
    if (count && is_floating(y.info.data_type)) write_reals(y, picked);
    if (count && !is_floating(y.info.data_type)) write_integers(y, exact);
    set_result_shape(out, {count});
  });
}
ACLNN_PHASE2(aclnnMaskedSelect)

namespace {

// Places of non-zero elements: [count, rank], or [rank, count] by columns.
int plan_nonzero(Plan* plan, const aclTensor* self, aclTensor* out,
                 bool by_columns) {
  int from = plan->tensor("self", self);
  int to = plan->tensor("out", out);
  if (from < 0 || to < 0) return plan->refuse(kAclnnNullptr, "null tensor");
  return plan->accept([=](const Call& call) {
    View x = open_view(call, from, Access::kRead, "self");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !y.ok) return;
    std::vector<double> values;
    if (x.info.numel()) values = read_reals(x);
    int64_t rank = x.info.rank();
    std::vector<int64_t> places;
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] == 0) continue;
      std::vector<int64_t> place(rank);
      int64_t rest = static_cast<int64_t>(i);
      for (int64_t a = rank; a-- > 0;) {
        place[a] = rest % x.info.dims[a];
        rest /= x.info.dims[a];
      }
      places.insert(places.end(), place.begin(), place.end());
    }
    int64_t count = rank ? static_cast<int64_t>(places.size()) / rank : 0;
    y.info.dims = {count, rank};
    y.info.strides = {rank, 1};
    if (by_columns) y.info.strides = {1, count};
    if (!places.empty()) write_integers(y, places);
    set_result_shape(out, by_columns ? std::vector<int64_t>{rank, count}
                                     : std::vector<int64_t>{count, rank});
  });
}

}  // namespace

CANN_SIM_EXPORT int aclnnNonzeroGetWorkspaceSize(const aclTensor* self,
                                                 aclTensor* out,
                                                 uint64_t* workspace_bytes,
                                                 aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnNonzero);
  return plan_nonzero(&plan, self, out, false);
}
ACLNN_PHASE2(aclnnNonzero)

CANN_SIM_EXPORT int aclnnNonzeroV2GetWorkspaceSize(const aclTensor* self,
                                                   aclTensor* out,
                                                   uint64_t* workspace_bytes,
                                                   aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnNonzeroV2);
  return plan_nonzero(&plan, self, out, true);
}
ACLNN_PHASE2(aclnnNonzeroV2)
