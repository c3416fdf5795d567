// How does autograd learn that an operator has written into a tensor?

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace pacache {

// Counts the write, so that a backward that saved the old contents raises
// instead of using the new ones. Inference tensors have no count.
inline void mark_written(const at::Tensor& t) {
  if (!t.is_inference()) {
    t.unsafeGetTensorImpl()->bump_version();
  }
}

inline void mark_written(const std::optional<at::Tensor>& t) {
  if (t.has_value() && t->defined()) {
    mark_written(*t);
  }
}

}  // namespace pacache
