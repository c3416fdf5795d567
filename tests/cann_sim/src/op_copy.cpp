// libopapi: copies, casts, fills.
#include <algorithm>
#include <cmath>
#include <vector>

#include "acl_codes.h"
#include "nn_view.h"

using namespace cann_sim;

namespace {

// Copies src, broadcast and converted, into dst.
void copy_kernel(const Call& call, int dst, int src) {
  View to = open_view(call, dst, Access::kWrite, "destination");
  View from = open_view(call, src, Access::kRead, "source");
  View wide;
  if (!to.ok || !from.ok || !expand(from, to.info.dims, &wide)) return;
  copy_view(to, wide);
}

void fill_kernel(const Call& call, int index, const ScalarInfo& value) {
  View to = open_view(call, index, Access::kWrite, "self");
  if (!to.ok || to.info.numel() == 0) return;
  if (is_floating(to.info.data_type)) {
    write_reals(to, std::vector<double>(to.info.numel(), value.real));
  } else {
    write_integers(to, std::vector<int64_t>(to.info.numel(), value.integer));
  }
}

ScalarInfo constant(double value) {
  ScalarInfo s;
  s.data_type = kFloat;
  s.real = value;
  s.integer = static_cast<int64_t>(value);
  return s;
}

bool broadcasts(const TensorInfo& from, const TensorInfo& to) {
  View view;
  view.info = from;
  View out;
  return expand(view, to.dims, &out);
}

int copy_plan(Plan* plan, const aclTensor* dst, const aclTensor* src,
              const char* dst_name, const char* src_name, bool dst_first) {
  int to = -1;
  int from = -1;
  if (dst_first) to = plan->tensor(dst_name, dst);
  from = plan->tensor(src_name, src);
  if (!dst_first) to = plan->tensor(dst_name, dst);
  if (to < 0 || from < 0) return plan->refuse(kAclnnNullptr, "null tensor");
  if (!broadcasts(plan->info(from), plan->info(to))) {
    return plan->refuse(kAclnnInvalid, "shapes do not broadcast");
  }
  return plan->accept(
      [to, from](const Call& call) { copy_kernel(call, to, from); });
}

int fill_plan(Plan* plan, aclTensor* self, const ScalarInfo& value) {
  int to = plan->tensor("self", self);
  if (to < 0) return plan->refuse(kAclnnNullptr, "self is null");
  return plan->accept(
      [to, value](const Call& call) { fill_kernel(call, to, value); });
}

}  // namespace

CANN_SIM_EXPORT int aclnnInplaceCopyGetWorkspaceSize(aclTensor* self,
                                                     const aclTensor* src,
                                                     uint64_t* workspace_bytes,
                                                     aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceCopy);
  return copy_plan(&plan, self, src, "self", "src", true);
}
ACLNN_PHASE2(aclnnInplaceCopy)

CANN_SIM_EXPORT int aclnnCastGetWorkspaceSize(const aclTensor* self, int,
                                              aclTensor* out,
                                              uint64_t* workspace_bytes,
                                              aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnCast);
  return copy_plan(&plan, out, self, "out", "self", false);
}
ACLNN_PHASE2(aclnnCast)

CANN_SIM_EXPORT int aclnnInplaceFillScalarGetWorkspaceSize(
    aclTensor* self, const aclScalar* value, uint64_t* workspace_bytes,
    aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceFillScalar);
  plan.scalar("value", value);
  if (!value) return plan.refuse(kAclnnNullptr, "value is null");
  return fill_plan(&plan, self, value->info);
}
ACLNN_PHASE2(aclnnInplaceFillScalar)

CANN_SIM_EXPORT int aclnnInplaceFillTensorGetWorkspaceSize(
    aclTensor* self, const aclTensor* value, uint64_t* workspace_bytes,
    aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceFillTensor);
  return copy_plan(&plan, self, value, "self", "value", true);
}
ACLNN_PHASE2(aclnnInplaceFillTensor)

CANN_SIM_EXPORT int aclnnInplaceZeroGetWorkspaceSize(aclTensor* self,
                                                     uint64_t* workspace_bytes,
                                                     aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceZero);
  return fill_plan(&plan, self, constant(0));
}
ACLNN_PHASE2(aclnnInplaceZero)

CANN_SIM_EXPORT int aclnnInplaceOneGetWorkspaceSize(aclTensor* self,
                                                    uint64_t* workspace_bytes,
                                                    aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceOne);
  return fill_plan(&plan, self, constant(1));
}
ACLNN_PHASE2(aclnnInplaceOne)

CANN_SIM_EXPORT int aclnnCatGetWorkspaceSize(const aclTensorList* list,
                                             int64_t axis, aclTensor* out,
                                             uint64_t* workspace_bytes,
                                             aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnCat);
  int first = plan.tensors("tensor", list);
  plan.number("dim", static_cast<double>(axis));
  int to = plan.tensor("out", out);
  if (first < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null tensor");
  if (axis < 0) axis += plan.info(to).rank();
  return plan.accept([first, to, axis](const Call& call) {
    View target = open_view(call, to, Access::kWrite, "out");
    if (!target.ok || target.info.numel() == 0) return;
    for (int i = first; i < to; ++i) {
      View from = open_view(call, i, Access::kRead, "tensor");
      if (!from.ok || from.info.numel() == 0) continue;
      View part = target;
      part.info.dims[axis] = from.info.dims[axis];
      copy_view(part, from);
      target.base += from.info.dims[axis] * target.info.strides[axis] *
                     target.info.itemsize();
    }
  });
}
ACLNN_PHASE2(aclnnCat)

// Every value of the sequence is start + i * step, in double.
CANN_SIM_EXPORT int aclnnArangeGetWorkspaceSize(
    const aclScalar* start, const aclScalar* end, const aclScalar* step,
    aclTensor* out, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnArange);
  plan.scalar("start", start);
  plan.scalar("end", end);
  plan.scalar("step", step);
  int to = plan.tensor("out", out);
  if (!start || !step || to < 0) return plan.refuse(kAclnnNullptr, "null");
  double first = start->info.real;
  double delta = step->info.real;
  return plan.accept([=](const Call& call) {
    View target = open_view(call, to, Access::kWrite, "out");
    if (!target.ok) return;
    std::vector<double> values(target.info.numel());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = first + static_cast<double>(i) * delta;
    }
    write_reals(target, values);
  });
}
ACLNN_PHASE2(aclnnArange)
