// libopapi: selection and placement by index.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "journal.h"
#include "nn_view.h"

using namespace cann_sim;

namespace {

// Index i wrapped once from below; a violation and -1 when out of range.
int64_t checked(const Call& call, int64_t i, int64_t size) {
  int64_t wrapped = i < 0 ? i + size : i;
  if (wrapped >= 0 && wrapped < size) return wrapped;
  violation("out_of_bounds", call.run.op,
            format("index %lld of an axis with %lld", static_cast<long long>(i),
                   static_cast<long long>(size)));
  return -1;
}

// The sub-view at position `at` of axis `axis`, which disappears.
View select(View view, int64_t axis, int64_t at) {
  view.base += at * view.info.strides[axis] * view.info.itemsize();
  view.info.dims.erase(view.info.dims.begin() + axis);
  view.info.strides.erase(view.info.strides.begin() + axis);
  return view;
}

void select_rows(const Call& call, int self, int64_t axis, int index, int out) {
  View from = open_view(call, self, Access::kRead, "self");
  View at = open_view(call, index, Access::kRead, "index");
  View to = open_view(call, out, Access::kWrite, "out");
  if (!from.ok || !at.ok || !to.ok || to.info.numel() == 0) return;
  if (axis < 0) axis += from.info.rank();
  std::vector<int64_t> rows = read_integers(at);
  for (size_t i = 0; i < rows.size(); ++i) {
    int64_t row = checked(call, rows[i], from.info.dims[axis]);
    if (row < 0) return;
    copy_view(select(to, axis, static_cast<int64_t>(i)),
              select(from, axis, row));
  }
}

}  // namespace

CANN_SIM_EXPORT int aclnnIndexSelectGetWorkspaceSize(
    const aclTensor* self, int64_t dim, const aclTensor* index, aclTensor* out,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnIndexSelect);
  int from = plan.tensor("self", self);
  plan.number("dim", static_cast<double>(dim));
  int at = plan.tensor("index", index);
  int to = plan.tensor("out", out);
  if (from < 0 || at < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null");
  return plan.accept(
      [=](const Call& call) { select_rows(call, from, dim, at, to); });
}
ACLNN_PHASE2(aclnnIndexSelect)

CANN_SIM_EXPORT int aclnnEmbeddingGetWorkspaceSize(const aclTensor* weight,
                                                   const aclTensor* indices,
                                                   aclTensor* out,
                                                   uint64_t* workspace_bytes,
                                                   aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnEmbedding);
  int from = plan.tensor("weight", weight);
  int at = plan.tensor("indices", indices);
  int to = plan.tensor("out", out);
  if (from < 0 || at < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null");
  return plan.accept([=](const Call& call) {
    View table = open_view(call, from, Access::kRead, "weight");
    View index = open_view(call, at, Access::kRead, "indices");
    View target = open_view(call, to, Access::kWrite, "out");
    if (!table.ok || !index.ok || !target.ok) return;
    if (target.info.numel() == 0) return;
    std::vector<double> result;
    for (int64_t i : read_integers(index)) {
      int64_t row = checked(call, i, table.info.dims[0]);
      if (row < 0) return;
      std::vector<double> line = read_reals(select(table, 0, row));
      result.insert(result.end(), line.begin(), line.end());
    }
    write_reals(target, result);
  });
}
ACLNN_PHASE2(aclnnEmbedding)

CANN_SIM_EXPORT int aclnnGatherGetWorkspaceSize(
    const aclTensor* self, int64_t dim, const aclTensor* index, aclTensor* out,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnGather);
  int from = plan.tensor("self", self);
  plan.number("dim", static_cast<double>(dim));
  int at = plan.tensor("index", index);
  int to = plan.tensor("out", out);
  if (from < 0 || at < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null");
  return plan.accept([=](const Call& call) {
    View x = open_view(call, from, Access::kRead, "self");
    View i = open_view(call, at, Access::kRead, "index");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !i.ok || !y.ok || y.info.numel() == 0) return;
    int64_t axis = dim < 0 ? dim + x.info.rank() : dim;
    std::vector<int64_t> places = read_integers(i);
    std::vector<double> result(places.size());
    std::vector<int64_t> exact(places.size());
    std::vector<int64_t> position(y.info.rank(), 0);
    for (size_t n = 0; n < places.size(); ++n) {
      int64_t place = checked(call, places[n], x.info.dims[axis]);
      if (place < 0) return;
      View element = x;
      for (int64_t a = 0; a < x.info.rank(); ++a) {
        int64_t p = a == axis ? place : position[a];
        element.base += p * x.info.strides[a] * x.info.itemsize();
      }
      element.info.dims.clear();
      element.info.strides.clear();
      result[n] = read_reals(element)[0];
      exact[n] = read_integers(element)[0];
      for (int64_t a = y.info.rank(); a-- > 0;) {
        if (++position[a] < y.info.dims[a]) break;
        position[a] = 0;
      }
    }
    if (is_floating(y.info.data_type)) {
      write_reals(y, result);
    } else {
      write_integers(y, exact);
    }
  });
}
ACLNN_PHASE2(aclnnGather)

// ---- advanced indexing ------------------------------------------------------

namespace {

// Index tensors per axis of self; -1 takes the axis whole. Results have the
// broadcast shape of the indices in the place of the indexed axes when those
// are neighbours, else in front, and then the other axes.
struct Advanced {
  int self = -1;
  std::vector<int> indices;
  std::vector<int64_t> shape;
  int64_t place = 0;  // where `shape` stands in the result
};

std::vector<int64_t> result_dims(const TensorInfo& self, const Advanced& p) {
  std::vector<int64_t> dims;
  for (int64_t axis = 0; axis < self.rank(); ++axis) {
    bool indexed =
        axis < static_cast<int64_t>(p.indices.size()) && p.indices[axis] >= 0;
    if (!indexed) dims.push_back(self.dims[axis]);
  }
  dims.insert(dims.begin() + p.place, p.shape.begin(), p.shape.end());
  return dims;
}

// Visits (sub-view of self, sub-view of the result) for every index.
template <typename Visit>
void visit_indexed(const Call& call, const View& self, const View& result,
                   const Advanced& p, Visit visit) {
  std::vector<std::vector<int64_t>> columns(p.indices.size());
  for (size_t axis = 0; axis < p.indices.size(); ++axis) {
    if (p.indices[axis] < 0) continue;
    View v = open_view(call, p.indices[axis], Access::kRead, "index");
    View wide;
    if (!v.ok || !expand(v, p.shape, &wide)) return;
    columns[axis] = read_integers(wide);
  }
  int64_t count = product(p.shape);
  for (int64_t n = 0; n < count; ++n) {
    View part = self;
    for (size_t axis = columns.size(); axis-- > 0;) {
      if (columns[axis].empty()) continue;
      int64_t at = checked(call, columns[axis][n], self.info.dims[axis]);
      if (at < 0) return;
      part = select(part, static_cast<int64_t>(axis), at);
    }
    View target = result;
    int64_t rest = n;
    for (size_t axis = p.shape.size(); axis-- > 0;) {
      target = select(target, p.place + static_cast<int64_t>(axis),
                      rest % p.shape[axis]);
      rest /= p.shape[axis];
    }
    visit(part, target);
  }
}

int take_indices(Plan* plan, const aclTensorList* list, Advanced* p) {
  bool some = false;
  for (size_t i = 0; i < list->items.size(); ++i) {
    const aclTensor* t = list->items[i];
    std::string name = "index" + std::to_string(i);
    p->indices.push_back(t ? plan->tensor(name.c_str(), t) : -1);
    int number = p->indices.back();
    some = some || (number >= 0 && plan->info(number).numel() > 0);
  }
  int64_t first = -1;
  int64_t last = -1;
  int64_t axes = 0;
  for (size_t i = 0; i < p->indices.size(); ++i) {
    int& number = p->indices[i];
    // An empty tensor among others stands for a whole axis.
    if (number >= 0 && some && plan->info(number).numel() == 0) number = -1;
    if (number < 0) continue;
    if (plan->info(number).data_type == kBool) {
      return plan->refuse(kAclnnInvalid, "cann_sim: no boolean indices");
    }
    if (first < 0) first = static_cast<int64_t>(i);
    last = static_cast<int64_t>(i);
    ++axes;
    const std::vector<int64_t>& dims = plan->info(number).dims;
    if (dims.size() > p->shape.size()) {
      p->shape.insert(p->shape.begin(), dims.size() - p->shape.size(), 1);
    }
    size_t skip = p->shape.size() - dims.size();
    for (size_t d = 0; d < dims.size(); ++d) {
      if (dims[d] != 1) p->shape[skip + d] = dims[d];
    }
  }
  if (first >= 0 && last - first + 1 == axes) p->place = first;
  return kOk;
}

}  // namespace

CANN_SIM_EXPORT int aclnnIndexGetWorkspaceSize(const aclTensor* self,
                                               const aclTensorList* indices,
                                               aclTensor* out,
                                               uint64_t* workspace_bytes,
                                               aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnIndex);
  Advanced p;
  p.self = plan.tensor("self", self);
  if (p.self < 0 || !indices) return plan.refuse(kAclnnNullptr, "null");
  if (int code = take_indices(&plan, indices, &p)) return code;
  int to = plan.tensor("out", out);
  if (to < 0) return plan.refuse(kAclnnNullptr, "out is null");
  return plan.accept([=](const Call& call) {
    View x = open_view(call, p.self, Access::kRead, "self");
    View y = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !y.ok || y.info.numel() == 0) return;
    visit_indexed(call, x, y, p, [](const View& part, const View& target) {
      copy_view(target, part);
    });
  });
}
ACLNN_PHASE2(aclnnIndex)

CANN_SIM_EXPORT int aclnnIndexPutImplGetWorkspaceSize(
    aclTensor* self, const aclTensorList* indices, const aclTensor* values,
    bool accumulate, bool, uint64_t* workspace_bytes,
    aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnIndexPutImpl);
  Advanced p;
  p.self = plan.tensor("self", self);
  if (p.self < 0 || !indices) return plan.refuse(kAclnnNullptr, "null");
  if (int code = take_indices(&plan, indices, &p)) return code;
  int from = plan.tensor("values", values);
  plan.number("accumulate", accumulate);
  if (from < 0) return plan.refuse(kAclnnNullptr, "values is null");
  return plan.accept([=](const Call& call) {
    View x = open_view(call, p.self, Access::kWrite, "self");
    View v = open_view(call, from, Access::kRead, "values");
    View wide;
    if (!x.ok || !v.ok || !expand(v, result_dims(x.info, p), &wide)) return;
    visit_indexed(call, x, wide, p, [&](const View& part, const View& source) {
      if (!accumulate) {
        copy_view(part, source);
        return;
      }
      std::vector<double> sum = read_reals(part);
      std::vector<double> more = read_reals(source);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
      write_reals(part, sum);
    });
  });
}
ACLNN_PHASE2(aclnnIndexPutImpl)
