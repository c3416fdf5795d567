#include "dense_inputs.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace pacache::npu {

at::Tensor as_int32(const at::Tensor& index) {
  return index.to(at::kInt).contiguous();
}

at::Tensor as_int32(const OptionalTensor& index) {
  const at::Tensor* t = get(index);
  return t == nullptr ? at::Tensor() : as_int32(*t);
}

at::Tensor as_int32_slots(const at::Tensor& slots) {
  // The cast drops the upper half: -2^63 would be slot 0.
  return as_int32(slots.scalar_type() == at::kLong ? slots.clamp_min(-1)
                                                   : slots);
}

at::Tensor as_aligned_int32(const at::Tensor& index) {
  at::Tensor dense = as_int32(index);
  const auto address = reinterpret_cast<uintptr_t>(dense.const_data_ptr());
  return address % 32 == 0 ? dense : dense.clone();
}

at::Tensor as_aligned_int32(const OptionalTensor& index) {
  const at::Tensor* t = get(index);
  return t == nullptr ? at::Tensor() : as_aligned_int32(*t);
}

at::Tensor as_4d_nz(const at::Tensor& cache) {
  return cache.dim() == 5 ? cache.flatten(1, 2) : cache;
}

at::Tensor on_host(const at::Tensor& index) { return index.to(at::kCPU); }

bool check_values_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("PACACHE_CHECK");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return enabled;
}

}  // namespace pacache::npu
