// A call of either operator, read from bytes.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pacache::testing {

// What a fuzzer gives, byte by byte; zeros behind its end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  // 0 to count - 1
  int64_t pick(int64_t count) { return byte() % count; }
  // Any int64, those at the edges more often than others.
  int64_t number();

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

// A tensor as it will be made: which part of which storage.
struct Argument {
  const char* name = nullptr;
  enum Kind { kNone, kStrided, kSparse, kMeta, kRequiresGrad } kind = kNone;
  at::ScalarType dtype = at::kHalf;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;  // in elements
  size_t storage = 0;
};

using Memory = std::vector<std::vector<uint8_t>>;

struct Call {
  bool is_load = false;
  // key, value, key_cache, value_cache, then slot_mapping, compress_lens,
  // compress_seq_offsets, seq_lens of scatter_pa_kv_cache, or block_tables,
  // context_lens, seq_starts of paged_cache_load.
  std::vector<Argument> arguments;
  std::string cache_mode = "Norm";
  std::string scatter_mode = "None";
  std::optional<std::vector<int64_t>> strides;
  std::optional<std::vector<int64_t>> offsets;
  bool is_cumsum = false;
  // Of the packed operators, whose kv_cache stands at kKeyCache; empty for the
  // others.
  std::string kv_layout;
  // The storages, by Argument::storage.
  Memory memory;
  // How the kernels may divide the work, and whether in a fixed order.
  int64_t shares = 1;
  bool deterministic = false;

  const Argument& operator[](size_t i) const { return arguments[i]; }
};

enum ArgumentIndex : size_t {
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kSlotMapping,
  kCompressLens,
  kCompressSeqOffsets,
  kSeqLens,
  kBlockTables = kSlotMapping,
  kContextLens,
  kSeqStarts,
};

// Most calls are valid or one thing away from it.
Call read_call(Bytes& bytes);

}  // namespace pacache::testing
