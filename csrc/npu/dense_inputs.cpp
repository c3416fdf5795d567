#include "dense_inputs.h"

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

void require_dense(const char* op, NamedTensor t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.tensor->is_contiguous(), op, ": ", t.name, " must be contiguous on ",
      t.tensor->device(),
      " (the device reads and writes it as such, and it is never copied), got "
      "shape ",
      t.tensor->sizes(), " and strides ", t.tensor->strides());
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
