// libopapi: random fills. Reproducible from seed and offset; the numbers are
// not those of an NPU.
#include <cstdint>
#include <random>
#include <vector>

#include "acl_codes.h"
#include "nn_view.h"

using namespace cann_sim;

namespace {

template <typename Draw>
int plan_random(Plan* plan, aclTensor* self, uint64_t seed, uint64_t offset,
                Draw draw) {
  int to = plan->tensor("self", self);
  plan->number("seed", static_cast<double>(seed));
  plan->number("offset", static_cast<double>(offset));
  if (to < 0) return plan->refuse(kAclnnNullptr, "self is null");
  return plan->accept([=](const Call& call) {
    View y = open_view(call, to, Access::kWrite, "self");
    if (!y.ok || y.info.numel() == 0) return;
    std::mt19937_64 engine(seed * 0x9E3779B97F4A7C15u + offset);
    std::vector<double> values(y.info.numel());
    for (double& v : values) v = draw(engine);
    write_reals(y, values);
  });
}

}  // namespace

CANN_SIM_EXPORT int aclnnInplaceUniformGetWorkspaceSize(
    aclTensor* self, double low, double high, uint64_t seed, uint64_t offset,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceUniform);
  plan.number("from", low);
  plan.number("to", high);
  return plan_random(&plan, self, seed, offset, [=](std::mt19937_64& e) {
    return low + (high - low) * static_cast<double>(e() >> 40) / (1 << 24);
  });
}
ACLNN_PHASE2(aclnnInplaceUniform)

CANN_SIM_EXPORT int aclnnInplaceNormalGetWorkspaceSize(
    aclTensor* self, float mean, float deviation, int64_t seed, int64_t offset,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceNormal);
  plan.number("mean", mean);
  plan.number("std", deviation);
  return plan_random(&plan, self, seed, offset, [=](std::mt19937_64& e) {
    return std::normal_distribution<double>(mean, deviation)(e);
  });
}
ACLNN_PHASE2(aclnnInplaceNormal)

CANN_SIM_EXPORT int aclnnInplaceRandomGetWorkspaceSize(
    aclTensor* self, int64_t low, int64_t high, int64_t seed, int64_t offset,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceRandom);
  plan.number("from", static_cast<double>(low));
  plan.number("to", static_cast<double>(high));
  return plan_random(&plan, self, seed, offset, [=](std::mt19937_64& e) {
    return static_cast<double>(
        low + static_cast<int64_t>(e() % static_cast<uint64_t>(high - low)));
  });
}
ACLNN_PHASE2(aclnnInplaceRandom)
