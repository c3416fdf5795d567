// libopapi: one tensor in, one out, and the in-place forms.
#include <cmath>
#include <cstdint>

#include "acl_codes.h"
#include "op_elementwise.h"

using namespace cann_sim;

namespace {

template <typename Function>
int unary(Plan* plan, const aclTensor* self, aclTensor* out, bool real,
          Function function) {
  int from = plan->tensor("self", self);
  int to = out == self ? from : plan->tensor("out", out);
  if (from < 0 || to < 0) return plan->refuse(kAclnnNullptr, "null tensor");
  return plan->accept(map_kernel({tensor_operand(from)}, to, real, function));
}

double sigmoid(double a) { return 1.0 / (1.0 + std::exp(-a)); }

}  // namespace

#define UNARY(op, real, expression)                                     \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                             \
      const aclTensor* self, aclTensor* out, uint64_t* workspace_bytes, \
      aclOpExecutor** executor) {                                       \
    ACLNN_PHASE1(op);                                                   \
    return unary(&plan, self, out, real, ELEMENT(expression));          \
  }                                                                     \
  ACLNN_PHASE2(op)

#define UNARY_INPLACE(op, real, expression)                                   \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                                   \
      aclTensor* self, uint64_t* workspace_bytes, aclOpExecutor** executor) { \
    ACLNN_PHASE1(op);                                                         \
    return unary(&plan, self, self, real, ELEMENT(expression));               \
  }                                                                           \
  ACLNN_PHASE2(op)

#define UNARY_BOTH(name, real, expression) \
  UNARY(aclnn##name, real, expression)     \
  UNARY_INPLACE(aclnnInplace##name, real, expression)

UNARY_BOTH(Neg, false, -a)
UNARY_BOTH(Exp, true, std::exp(a))
UNARY_BOTH(Log, true, std::log(a))
UNARY_BOTH(Sqrt, true, std::sqrt(a))
UNARY_BOTH(Rsqrt, true, 1.0 / std::sqrt(a))
UNARY_BOTH(Reciprocal, true, 1.0 / a)
UNARY_BOTH(Sin, true, std::sin(a))
UNARY_BOTH(Cos, true, std::cos(a))
UNARY_BOTH(Tanh, true, std::tanh(a))
UNARY_BOTH(Sigmoid, true, sigmoid(a))
UNARY_BOTH(Relu, false, a > 0 ? a : decltype(a)(0))
UNARY_BOTH(Floor, true, std::floor(a))
UNARY_BOTH(Ceil, true, std::ceil(a))
UNARY_BOTH(Round, true, std::nearbyint(a))
UNARY_BOTH(Trunc, true, std::trunc(a))
UNARY(aclnnAbs, false, a < 0 ? -a : a)
UNARY(aclnnSilu, true, a* sigmoid(a))
UNARY(aclnnSign, false, decltype(a)((a > 0) - (a < 0)))
UNARY(aclnnIsFinite, true, static_cast<int64_t>(std::isfinite(a)))
UNARY(aclnnIsInf, true, static_cast<int64_t>(std::isinf(a)))
UNARY(aclnnGelu, true, 0.5 * a * (1.0 + std::erf(a / std::sqrt(2.0))))
UNARY_BOTH(LogicalNot, false, static_cast<int64_t>(a == 0))

// A boolean is negated, not complemented.
CANN_SIM_EXPORT int aclnnBitwiseNotGetWorkspaceSize(const aclTensor* self,
                                                    aclTensor* out,
                                                    uint64_t* workspace_bytes,
                                                    aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnBitwiseNot);
  bool truth = self && self->info.data_type == kBool;
  return unary(&plan, self, out, false, [=](const auto& x, size_t i) {
    int64_t a = static_cast<int64_t>(x[0][i]);
    return static_cast<int64_t>(truth ? a == 0 : ~a);
  });
}
ACLNN_PHASE2(aclnnBitwiseNot)
