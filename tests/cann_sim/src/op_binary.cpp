// libopapi: two operands, tensors or scalars, broadcast to the output.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "acl_codes.h"
#include "op_elementwise.h"

using namespace cann_sim;

namespace {

// Integer division by zero is 0 here, where hardware gives something else.
template <typename T>
T floor_div(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) return 0;
    T q = a / b;
    return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
  } else {
    return std::floor(a / b);
  }
}

template <typename T>
T trunc_div(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return b == 0 ? 0 : a / b;
  } else {
    return std::trunc(a / b);
  }
}

template <typename T>
T remainder(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return b == 0 ? 0 : a - floor_div(a, b) * b;
  } else {
    return a - std::floor(a / b) * b;
  }
}

template <typename T>
T power(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    T out = 1;
    for (T i = 0; i < b; ++i) out *= a;
    return out;
  } else {
    return std::pow(a, b);
  }
}

// Tensor and tensor.
template <typename Function>
int binary(Plan* plan, const aclTensor* self, const aclTensor* other,
           aclTensor* out, bool real, Function function) {
  int a = plan->tensor("self", self);
  int b = plan->tensor("other", other);
  int to = out == self ? a : plan->tensor("out", out);
  if (a < 0 || b < 0 || to < 0) {
    return plan->refuse(kAclnnNullptr, "null tensor");
  }
  return plan->accept(
      map_kernel({tensor_operand(a), tensor_operand(b)}, to, real, function));
}

// Tensor and scalar.
template <typename Function>
int binary(Plan* plan, const aclTensor* self, const aclScalar* other,
           aclTensor* out, bool real, Function function) {
  int a = plan->tensor("self", self);
  plan->scalar("other", other);
  int to = out == self ? a : plan->tensor("out", out);
  if (a < 0 || !other || to < 0) {
    return plan->refuse(kAclnnNullptr, "null argument");
  }
  return plan->accept(map_kernel({tensor_operand(a), scalar_operand(other)}, to,
                                 real, function));
}

}  // namespace

#define BINARY(op, Other, real, expression)                             \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                             \
      const aclTensor* self, const Other* other, aclTensor* out,        \
      uint64_t* workspace_bytes, aclOpExecutor** executor) {            \
    ACLNN_PHASE1(op);                                                   \
    return binary(&plan, self, other, out, real, ELEMENT2(expression)); \
  }                                                                     \
  ACLNN_PHASE2(op)

#define BINARY_INPLACE(op, Other, real, expression)                      \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                              \
      aclTensor* self, const Other* other, uint64_t* workspace_bytes,    \
      aclOpExecutor** executor) {                                        \
    ACLNN_PHASE1(op);                                                    \
    return binary(&plan, self, other, self, real, ELEMENT2(expression)); \
  }                                                                      \
  ACLNN_PHASE2(op)

// With a factor alpha for the second operand, as add and sub have it.
#define SCALED(op, Other, expression)                                        \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                                  \
      const aclTensor* self, const Other* other, const aclScalar* alpha,     \
      aclTensor* out, uint64_t* workspace_bytes, aclOpExecutor** executor) { \
    ACLNN_PHASE1(op);                                                        \
    plan.scalar("alpha", alpha);                                             \
    if (!alpha) return plan.refuse(kAclnnNullptr, "alpha is null");          \
    ScalarInfo f = alpha->info;                                              \
    return binary(&plan, self, other, out, false, ELEMENT2(expression));     \
  }                                                                          \
  ACLNN_PHASE2(op)

#define SCALED_INPLACE(op, Other, expression)                             \
  CANN_SIM_EXPORT int op##GetWorkspaceSize(                               \
      aclTensor* self, const Other* other, const aclScalar* alpha,        \
      uint64_t* workspace_bytes, aclOpExecutor** executor) {              \
    ACLNN_PHASE1(op);                                                     \
    plan.scalar("alpha", alpha);                                          \
    if (!alpha) return plan.refuse(kAclnnNullptr, "alpha is null");       \
    ScalarInfo f = alpha->info;                                           \
    return binary(&plan, self, other, self, false, ELEMENT2(expression)); \
  }                                                                       \
  ACLNN_PHASE2(op)

SCALED(aclnnAdd, aclTensor, a + scalar_value(f, b) * b)
SCALED(aclnnAdds, aclScalar, a + scalar_value(f, b) * b)
SCALED(aclnnSub, aclTensor, a - scalar_value(f, b) * b)
SCALED(aclnnSubs, aclScalar, a - scalar_value(f, b) * b)
SCALED_INPLACE(aclnnInplaceAdd, aclTensor, a + scalar_value(f, b) * b)
SCALED_INPLACE(aclnnInplaceAdds, aclScalar, a + scalar_value(f, b) * b)
SCALED_INPLACE(aclnnInplaceSub, aclTensor, a - scalar_value(f, b) * b)
SCALED_INPLACE(aclnnInplaceSubs, aclScalar, a - scalar_value(f, b) * b)

SCALED(aclnnRsub, aclTensor, b - scalar_value(f, a) * a)
SCALED(aclnnRsubs, aclScalar, b - scalar_value(f, a) * a)

BINARY(aclnnMul, aclTensor, false, a* b)
BINARY(aclnnMuls, aclScalar, false, a* b)
BINARY_INPLACE(aclnnInplaceMul, aclTensor, false, a* b)
BINARY_INPLACE(aclnnInplaceMuls, aclScalar, false, a* b)
BINARY(aclnnDiv, aclTensor, true, a / b)
BINARY(aclnnDivs, aclScalar, true, a / b)
BINARY_INPLACE(aclnnInplaceDiv, aclTensor, true, a / b)
BINARY_INPLACE(aclnnInplaceDivs, aclScalar, true, a / b)
BINARY(aclnnFloorDivide, aclTensor, false, floor_div(a, b))
BINARY(aclnnFloorDivides, aclScalar, false, floor_div(a, b))
BINARY(aclnnRemainderTensorTensor, aclTensor, false, remainder(a, b))
BINARY(aclnnRemainderTensorScalar, aclScalar, false, remainder(a, b))
BINARY(aclnnPowTensorTensor, aclTensor, false, power(a, b))
BINARY(aclnnPowTensorScalar, aclScalar, false, power(a, b))
BINARY_INPLACE(aclnnInplacePowTensorScalar, aclScalar, false, power(a, b))
BINARY(aclnnMaximum, aclTensor, false, a > b ? a : b)
BINARY(aclnnMinimum, aclTensor, false, a < b ? a : b)
BINARY(aclnnClampMin, aclScalar, false, a > b ? a : b)
BINARY(aclnnClampMax, aclScalar, false, a < b ? a : b)
BINARY_INPLACE(aclnnInplaceClampMin, aclScalar, false, a > b ? a : b)

#define TRUTH(expression) static_cast<int64_t>(expression)

#define COMPARE(name, operation)                                      \
  BINARY(aclnn##name##Tensor, aclTensor, false, TRUTH(a operation b)) \
  BINARY(aclnn##name##Scalar, aclScalar, false, TRUTH(a operation b))

COMPARE(Eq, ==)
COMPARE(Ne, !=)
COMPARE(Lt, <)
COMPARE(Le, <=)
COMPARE(Gt, >)
COMPARE(Ge, >=)

BINARY(aclnnLogicalAnd, aclTensor, false, TRUTH(a != 0 && b != 0))
BINARY(aclnnLogicalOr, aclTensor, false, TRUTH(a != 0 || b != 0))
BINARY(aclnnBitwiseAndTensor, aclTensor, false,
       static_cast<int64_t>(a) & static_cast<int64_t>(b))
BINARY(aclnnBitwiseAndScalar, aclScalar, false,
       static_cast<int64_t>(a) & static_cast<int64_t>(b))
BINARY(aclnnBitwiseOrTensor, aclTensor, false,
       static_cast<int64_t>(a) | static_cast<int64_t>(b))
BINARY(aclnnBitwiseOrScalar, aclScalar, false,
       static_cast<int64_t>(a) | static_cast<int64_t>(b))
BINARY(aclnnBitwiseXorTensor, aclTensor, false,
       static_cast<int64_t>(a) ^ static_cast<int64_t>(b))
BINARY_INPLACE(aclnnInplaceBitwiseAndTensor, aclTensor, false,
               static_cast<int64_t>(a) & static_cast<int64_t>(b))

// Rounding mode of a division: 0 none, 1 toward zero, 2 down.
namespace {

template <typename Other>
int divide_with_mode(Plan* plan, const aclTensor* self, const Other* other,
                     int mode, aclTensor* out) {
  plan->number("mode", mode);
  if (mode == 1) {
    return binary(plan, self, other, out, false, ELEMENT2(trunc_div(a, b)));
  }
  if (mode == 2) {
    return binary(plan, self, other, out, false, ELEMENT2(floor_div(a, b)));
  }
  return binary(plan, self, other, out, true, ELEMENT2(a / b));
}

}  // namespace

CANN_SIM_EXPORT int aclnnDivModGetWorkspaceSize(const aclTensor* self,
                                                const aclTensor* other,
                                                int mode, aclTensor* out,
                                                uint64_t* workspace_bytes,
                                                aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnDivMod);
  return divide_with_mode(&plan, self, other, mode, out);
}
ACLNN_PHASE2(aclnnDivMod)

CANN_SIM_EXPORT int aclnnDivModsGetWorkspaceSize(const aclTensor* self,
                                                 const aclScalar* other,
                                                 int mode, aclTensor* out,
                                                 uint64_t* workspace_bytes,
                                                 aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnDivMods);
  return divide_with_mode(&plan, self, other, mode, out);
}
ACLNN_PHASE2(aclnnDivMods)

CANN_SIM_EXPORT int aclnnPowScalarTensorGetWorkspaceSize(
    const aclScalar* self, const aclTensor* exponent, aclTensor* out,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnPowScalarTensor);
  plan.scalar("self", self);
  int b = plan.tensor("exponent", exponent);
  int to = plan.tensor("out", out);
  if (!self || b < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null");
  return plan.accept(map_kernel({scalar_operand(self), tensor_operand(b)}, to,
                                false, ELEMENT2(power(a, b))));
}
ACLNN_PHASE2(aclnnPowScalarTensor)

CANN_SIM_EXPORT int aclnnSWhereGetWorkspaceSize(
    const aclTensor* condition, const aclTensor* self, const aclTensor* other,
    aclTensor* out, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnSWhere);
  int c = plan.tensor("condition", condition);
  int a = plan.tensor("self", self);
  int b = plan.tensor("other", other);
  int to = plan.tensor("out", out);
  if (c < 0 || a < 0 || b < 0 || to < 0) {
    return plan.refuse(kAclnnNullptr, "null tensor");
  }
  return plan.accept(map_kernel(
      {tensor_operand(c), tensor_operand(a), tensor_operand(b)}, to, false,
      [](const auto& x, size_t i) { return x[0][i] ? x[1][i] : x[2][i]; }));
}
ACLNN_PHASE2(aclnnSWhere)

CANN_SIM_EXPORT int aclnnInplaceMaskedFillScalarGetWorkspaceSize(
    aclTensor* self, const aclTensor* mask, const aclScalar* value,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceMaskedFillScalar);
  int a = plan.tensor("self", self);
  int m = plan.tensor("mask", mask);
  plan.scalar("value", value);
  if (a < 0 || m < 0 || !value) return plan.refuse(kAclnnNullptr, "null");
  return plan.accept(map_kernel(
      {tensor_operand(a), tensor_operand(m), scalar_operand(value)}, a, false,
      [](const auto& x, size_t i) { return x[1][i] ? x[2][i] : x[0][i]; }));
}
ACLNN_PHASE2(aclnnInplaceMaskedFillScalar)

CANN_SIM_EXPORT int aclnnInplaceMaskedFillTensorGetWorkspaceSize(
    aclTensor* self, const aclTensor* mask, const aclTensor* value,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnInplaceMaskedFillTensor);
  int a = plan.tensor("self", self);
  int m = plan.tensor("mask", mask);
  int v = plan.tensor("value", value);
  if (a < 0 || m < 0 || v < 0) return plan.refuse(kAclnnNullptr, "null");
  return plan.accept(map_kernel(
      {tensor_operand(a), tensor_operand(m), tensor_operand(v)}, a, false,
      [](const auto& x, size_t i) { return x[1][i] ? x[2][i] : x[0][i]; }));
}
ACLNN_PHASE2(aclnnInplaceMaskedFillTensor)

CANN_SIM_EXPORT int aclnnClampGetWorkspaceSize(
    const aclTensor* self, const aclScalar* low, const aclScalar* high,
    aclTensor* out, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnClamp);
  int a = plan.tensor("self", self);
  plan.scalar("min", low);
  plan.scalar("max", high);
  int to = plan.tensor("out", out);
  if (a < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null tensor");
  bool has_low = low != nullptr;
  bool has_high = high != nullptr;
  ScalarInfo l = has_low ? low->info : ScalarInfo();
  ScalarInfo h = has_high ? high->info : ScalarInfo();
  return plan.accept(
      map_kernel({tensor_operand(a)}, to, false, [=](const auto& x, size_t i) {
        auto v = x[0][i];
        if (has_low && v < scalar_value(l, v)) v = scalar_value(l, v);
        if (has_high && v > scalar_value(h, v)) v = scalar_value(h, v);
        return v;
      }));
}
ACLNN_PHASE2(aclnnClamp)

CANN_SIM_EXPORT int aclnnIsCloseGetWorkspaceSize(const aclTensor* self,
                                                 const aclTensor* other,
                                                 double rtol, double atol,
                                                 bool equal_nan, aclTensor* out,
                                                 uint64_t* workspace_bytes,
                                                 aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnIsClose);
  plan.number("rtol", rtol);
  plan.number("atol", atol);
  plan.number("equal_nan", equal_nan);
  return binary(&plan, self, other, out, true, [=](const auto& x, size_t i) {
    double a = static_cast<double>(x[0][i]);
    double b = static_cast<double>(x[1][i]);
    bool nans = equal_nan && a != a && b != b;
    bool near = std::fabs(a - b) <= atol + rtol * std::fabs(b);
    return TRUTH(a == b || nans || near);
  });
}
ACLNN_PHASE2(aclnnIsClose)

// out = 1 when shapes and all elements agree.
CANN_SIM_EXPORT int aclnnEqualGetWorkspaceSize(const aclTensor* self,
                                               const aclTensor* other,
                                               aclTensor* out,
                                               uint64_t* workspace_bytes,
                                               aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnEqual);
  int a = plan.tensor("self", self);
  int b = plan.tensor("other", other);
  int to = plan.tensor("out", out);
  if (a < 0 || b < 0 || to < 0) return plan.refuse(kAclnnNullptr, "null");
  return plan.accept([=](const Call& call) {
    View x = open_view(call, a, Access::kRead, "self");
    View y = open_view(call, b, Access::kRead, "other");
    View target = open_view(call, to, Access::kWrite, "out");
    if (!x.ok || !y.ok || !target.ok) return;
    bool same = x.info.dims == y.info.dims;
    if (same && x.info.numel()) {
      same = is_floating(x.info.data_type)
                 ? read_reals(x) == read_reals(y)
                 : read_integers(x) == read_integers(y);
    }
    write_integers(target, {same});
  });
}
ACLNN_PHASE2(aclnnEqual)
