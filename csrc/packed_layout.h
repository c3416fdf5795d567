// Where do keys and values lie in a cache that holds both?

#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>

#include "tensor_rules.h"

namespace pacache {

// Letters of a name: B num_blocks, N block_size, H num_heads, D head_size, C
// the elements of key and then of value of one token and head. The numbers are
// dimensions.
struct PackedLayout {
  const char* name;
  const char* shape;  // as errors give it
  int64_t rank;
  int64_t half;  // of size 2: key, value; -1: the last dimension holds both
  int64_t block;
  int64_t position;
  int64_t head;
};

// ValueError when kv_layout is none of the names.
const PackedLayout& packed_layout(const char* op, std::string_view kv_layout);

using HalfDims = std::array<int64_t, 4>;

// A checked cache. Its two halves have the same strides.
struct PackedCache {
  const PackedLayout* layout;
  const at::Tensor* tensor;
  int64_t key_size;     // head_size of key
  int64_t value_size;   // and of value
  int64_t value_start;  // elements from the first of key to the first of value

  int64_t num_blocks() const { return tensor->size(layout->block); }
  int64_t block_size() const { return tensor->size(layout->position); }
  int64_t num_heads() const { return tensor->size(layout->head); }

  // Of a half as [num_blocks, block_size, num_heads, head_size].
  HalfDims half_sizes(int64_t head_size) const {
    return {num_blocks(), block_size(), num_heads(), head_size};
  }
  HalfDims half_strides() const {
    return {tensor->stride(layout->block), tensor->stride(layout->position),
            tensor->stride(layout->head), tensor->stride(-1)};
  }

  // Bytes of half_strides()[dim], as byte_stride of a tensor.
  int64_t byte_stride(size_t dim) const {
    return tensor->numel() > 0 && half_sizes(1)[dim] > 1
               ? half_strides()[dim] * tensor->element_size()
               : 0;
  }

  at::Tensor key_cache() const { return half(0, key_size); }
  at::Tensor value_cache() const { return half(value_start, value_size); }

 private:
  at::Tensor half(int64_t start, int64_t head_size) const;
};

// The rules on kv_cache's shape, and on the head size of a value beside key's.
// Key and value have been found to be 3-D with the same number of heads.
PackedCache check_packed_cache(const char* op, const PackedLayout& layout,
                               NamedTensor key, NamedTensor value,
                               const at::Tensor& cache);

// ValueError when the halves share memory: for a cache that is written.
void check_halves_apart(const char* op, const PackedCache& cache);

}  // namespace pacache
