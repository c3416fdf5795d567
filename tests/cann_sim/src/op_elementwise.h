// libopapi: shared parts of the operators that work element by element.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "nn_view.h"

namespace cann_sim {

// An operand is a tensor by number or a scalar.
struct Operand {
  int tensor = -1;
  ScalarInfo scalar;

  bool is_floating(const Call& call) const {
    int type = tensor < 0 ? scalar.data_type : call.tensors[tensor].data_type;
    return cann_sim::is_floating(type);
  }
};

inline Operand tensor_operand(int index) { return {index, {}}; }
inline Operand scalar_operand(const aclScalar* s) { return {-1, s->info}; }

inline double scalar_value(const ScalarInfo& s, double) { return s.real; }
inline int64_t scalar_value(const ScalarInfo& s, int64_t) { return s.integer; }

// The operand repeated to the shape of the output. False when a view is not
// there.
template <typename T>
bool read_operand(const Call& call, const Operand& o,
                  const std::vector<int64_t>& dims, std::vector<T>* out) {
  if (o.tensor < 0) {
    out->assign(product(dims), scalar_value(o.scalar, T()));
    return true;
  }
  View view = open_view(call, o.tensor, Access::kRead, "input");
  View wide;
  if (!view.ok || !expand(view, dims, &wide)) return false;
  *out = read_values<T>(wide);
  return true;
}

template <typename T, typename Function>
void map_operands(const Call& call, const std::vector<Operand>& operands,
                  int out, Function function) {
  View target = open_view(call, out, Access::kWrite, "out");
  if (!target.ok || target.info.numel() == 0) return;
  std::vector<std::vector<T>> inputs(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!read_operand(call, operands[i], target.info.dims, &inputs[i])) return;
  }
  using Result = decltype(function(inputs, size_t{0}));
  size_t count = target.info.numel();
  using Wide =
      std::conditional_t<std::is_floating_point_v<Result>, double, int64_t>;
  std::vector<Wide> results(count);
  for (size_t i = 0; i < count; ++i) {
    results[i] = static_cast<Wide>(function(inputs, i));
  }
  write_values(target, results);
}

// Computes in double when an operand is floating or the function asks for it,
// else exactly in int64.
template <typename Function>
Kernel map_kernel(std::vector<Operand> operands, int out, bool always_real,
                  Function function) {
  return [=](const Call& call) {
    bool real = always_real;
    for (const Operand& o : operands) real = real || o.is_floating(call);
    if (real) {
      map_operands<double>(call, operands, out, function);
    } else {
      map_operands<int64_t>(call, operands, out, function);
    }
  };
}

}  // namespace cann_sim

// A lambda over the values x[0][i], x[1][i], ...
#define ELEMENT(expression)            \
  [=](const auto& x, size_t i) {       \
    [[maybe_unused]] auto a = x[0][i]; \
    return expression;                 \
  }
#define ELEMENT2(expression)     \
  [=](const auto& x, size_t i) { \
    auto a = x[0][i];            \
    auto b = x[1][i];            \
    return expression;           \
  }
