#include "packed_layout.h"

#include <string>

#include "memory_rules.h"

namespace pacache {
namespace {

constexpr PackedLayout kLayouts[] = {
    {"2BNHD", "[2, num_blocks, block_size, num_heads, head_size]", 5, 0, 1, 2,
     3},
    {"B2NHD", "[num_blocks, 2, block_size, num_heads, head_size]", 5, 1, 0, 2,
     3},
    {"BHNC", "[num_blocks, num_heads, block_size, C]", 4, -1, 0, 2, 1},
    {"BNHC", "[num_blocks, block_size, num_heads, C]", 4, -1, 0, 1, 2},
};

}  // namespace

const PackedLayout& packed_layout(const char* op, std::string_view kv_layout) {
  for (const PackedLayout& layout : kLayouts) {
    if (kv_layout == layout.name) {
      return layout;
    }
  }
  TORCH_CHECK_VALUE(false, op,
                    ": kv_layout must be '2BNHD', 'B2NHD', 'BHNC' or 'BNHC', "
                    "got '",
                    kv_layout, "'");
}

at::Tensor PackedCache::half(int64_t start, int64_t head_size) const {
  return tensor->as_strided(half_sizes(head_size), half_strides(),
                            tensor->storage_offset() + start);
}

PackedCache check_packed_cache(const char* op, const PackedLayout& layout,
                               NamedTensor key, NamedTensor value,
                               const at::Tensor& t) {
  const NamedTensor cache{"kv_cache", &t};
  const int64_t num_heads = key.tensor->size(1);
  const int64_t key_size = key.tensor->size(2);
  const int64_t value_size = value.tensor->size(2);
  PackedCache packed{&layout, &t, key_size, value_size, key_size};
  if (layout.half >= 0) {
    TORCH_CHECK_VALUE(value_size == key_size, op, ": ", value.name,
                      " must have head_size ", key_size,
                      " as key with kv_layout '", layout.name, "', got ",
                      value.tensor->sizes());
    check_shape(op, cache, layout.rank,
                {{layout.half, 2}, {layout.head, num_heads}, {4, key_size}},
                [&] {
                  return std::string(layout.shape) + " with num_heads " +
                         std::to_string(num_heads) + " and head_size " +
                         std::to_string(key_size) + " as key";
                });
    packed.value_start = t.stride(layout.half);
  } else {
    check_shape(op, cache, layout.rank,
                {{layout.head, num_heads}, {3, key_size + value_size}}, [&] {
                  return std::string(layout.shape) + " with num_heads " +
                         std::to_string(num_heads) + " as key and C " +
                         std::to_string(key_size) + " + " +
                         std::to_string(value_size) +
                         ", the head sizes of key and value";
                });
  }
  TORCH_CHECK_VALUE(packed.block_size() >= 1, op, ": ", cache.name,
                    " must have a block_size of at least 1, got ", t.sizes());
  if (t.numel() == 0) {
    packed.value_start = 0;  // no value lies behind a null pointer
  }
  return packed;
}

void check_halves_apart(const char* op, const PackedCache& cache) {
  const NamedTensor whole{"kv_cache", cache.tensor};
  check_no_self_overlap(op, whole);
  const HalfDims strides = cache.half_strides();
  const auto region = [&](int64_t start, int64_t head_size) {
    return region_of(whole, cache.half_sizes(head_size), strides, start);
  };
  TORCH_CHECK_VALUE(
      !regions_overlap(region(0, cache.key_size),
                       region(cache.value_start, cache.value_size)),
      op, ": kv_cache must not overlap itself, got shape ",
      cache.tensor->sizes(), " and strides ", cache.tensor->strides());
}

}  // namespace pacache
