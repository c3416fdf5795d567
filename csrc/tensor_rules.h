// Rules on one tensor that both operators share: layout, device, grad, dtype,
// rank and dense last dimension. The texts are mirrored in
// pacache_torch/_rules.py.

#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

namespace pacache {

using OptionalTensor = std::optional<at::Tensor>;

// An argument by name; tensor is null where the caller passed None.
struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;
};

// How errors name a call: its operator, and its caches, which are one argument
// where a cache holds both.
struct CallNames {
  const char* op;
  const char* key_cache = "key_cache";
  const char* value_cache = "value_cache";
  const char* kv_layout = nullptr;  // of such a cache
};

inline const at::Tensor* get(const OptionalTensor& t) {
  return t.has_value() && t->defined() ? &*t : nullptr;
}

// float16, bfloat16, ... as Python writes them.
std::string dtype_name(at::ScalarType dtype);

// Elements in one 32-byte unit of the NZ layout.
inline int64_t nz_unit(const at::Tensor& t) { return 32 / t.element_size(); }

// Bytes from one element of a dimension to the next; 0 where there is no next:
// the stride may be any number then, and its bytes more than an int64 holds.
// Of a tensor that has been found to lie within its storage.
inline int64_t byte_stride(const at::Tensor& t, int64_t dim) {
  return t.size(dim) > 1 && t.numel() > 0 ? t.stride(dim) * t.element_size()
                                          : 0;
}

// All strided, on the first tensor's device, none asking for a gradient; and of
// sizes, each taken as 1 at least, that make less than 2^62 bytes: sizes of one
// tensor can be multiplied from then on. (Torch sees to that itself, but for
// expanded tensors and those without elements.)
void check_tensors(const char* op, std::initializer_list<NamedTensor> tensors);

void check_copy_dtype(const char* op, NamedTensor t);
void check_same_dtype(const char* op, NamedTensor t, NamedTensor as,
                      const char* why = "");
void check_index_dtype(const char* op, NamedTensor t);
void check_dense_last_dim(const char* op, NamedTensor t);

// a * b of sizes of different tensors, or a number that no size reaches.
inline int64_t bounded_product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product)
             ? std::numeric_limits<int64_t>::max()
             : product;
}

bool has_shape(const at::Tensor& t, int64_t rank,
               std::initializer_list<std::pair<int64_t, int64_t>> dims);

// has_shape or ValueError "<name> must be <text>, got <shape>". The text is
// built only when it is needed.
template <typename Text>
void check_shape(const char* op, NamedTensor t, int64_t rank,
                 std::initializer_list<std::pair<int64_t, int64_t>> dims,
                 const Text& text) {
  TORCH_CHECK_VALUE(has_shape(*t.tensor, rank, dims), op, ": ", t.name,
                    " must be ", text(), ", got ", t.tensor->sizes());
}

}  // namespace pacache
