// What is a legal call of scatter_pa_kv_cache or scatter_pa_kv_cache_packed,
// and what does it ask for? Tensors in, a checked plain struct out; the CPU
// kernel and the NPU binding both start from it, so both refuse the same
// things with the same words.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "index_view.h"
#include "packed_layout.h"
#include "tensor_rules.h"

namespace pacache {

// How tokens are laid down. Scenario 3 is kAlibi or kRope over padded rows.
enum class ScatterKind { kNorm, kNct, kNz, kNhsd, kAlibi, kRope, kOmni };

// Key or value: where its tokens are read and where they are written. All
// strides are in bytes. The bytes of one (token, head) are contiguous on the
// reading side; on the writing side they are units of unit_bytes, each
// contiguous, unit_stride apart (one unit per head except in NZ).
struct ScatterPlane {
  const char* src = nullptr;
  char* dst = nullptr;
  at::ScalarType dtype = at::kHalf;
  int64_t head_size = 0;
  int64_t head_bytes = 0;
  // src of (batch, token, head); batch_stride only in scenario 3
  int64_t src_batch_stride = 0;
  int64_t src_token_stride = 0;
  int64_t src_head_stride = 0;
  // dst of (block, position, head, unit)
  int64_t dst_block_stride = 0;
  int64_t dst_token_stride = 0;
  int64_t dst_head_stride = 0;
  int64_t dst_unit_stride = 0;
  int64_t unit_bytes = 0;
};

struct ScatterArgs {
  CallNames names{"scatter_pa_kv_cache"};
  ScatterKind kind = ScatterKind::kNorm;
  int scenario = 2;  // as CANN numbers them
  // Rows of key that are read: slot_mapping's length, or all packed tokens.
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  // Compressed kinds only.
  int64_t batch = 0;
  int64_t seq_len = 0;  // scenario 3: padded length of every sequence

  bool has_value = false;
  ScatterPlane key;
  ScatterPlane value;

  IndexView slot_mapping;
  IndexView compress_lens;
  IndexView compress_seq_offsets;
  IndexView seq_lens;

  bool is_compressed() const {
    return kind == ScatterKind::kAlibi || kind == ScatterKind::kRope ||
           kind == ScatterKind::kOmni;
  }
  int64_t num_slots() const { return num_blocks * block_size; }
};

// The arguments as the operator's schema has them.
struct ScatterInputs {
  const at::Tensor& key;
  const OptionalTensor& value;
  const at::Tensor& key_cache;
  const OptionalTensor& value_cache;
  const at::Tensor& slot_mapping;
  const OptionalTensor& compress_lens;
  const OptionalTensor& compress_seq_offsets;
  const OptionalTensor& seq_lens;
  std::string_view cache_mode;
  std::string_view scatter_mode;
  at::OptionalIntArrayRef strides;
  at::OptionalIntArrayRef offsets;
};

// Every rule that needs no index value. Reads no tensor data.
ScatterArgs check_scatter_args(const ScatterInputs& in);

struct PackedScatterInputs {
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& kv_cache;
  const at::Tensor& slot_mapping;
  std::string_view kv_layout;
};

// Scenario 2 into the halves of one cache.
struct PackedScatterArgs {
  ScatterArgs args;
  PackedCache cache;
};

PackedScatterArgs check_packed_scatter_args(const PackedScatterInputs& in);

// One (sequence, head) of a compressed call.
struct CompressedHead {
  int64_t slot;    // first row written, or negative: skip
  int64_t length;  // tokens of the sequence
  int64_t window;  // compress_lens
  int64_t offset;  // first token of the window (Rope, Omni)
  // First token of the sequence as it is addressed: packed tokens count
  // across sequences, padded ones (scenario 3) start at 0 in each.
  int64_t first_token;
};

// Rope and Omni: is the sequence copied whole, without a window?
inline bool is_uncompressed(const CompressedHead& head) {
  return head.offset == -1 || head.window == 0 || head.offset == head.length;
}

// Rows that this head writes from its slot on.
int64_t rows_written(ScatterKind kind, const CompressedHead& head);

// Head `task` = sequence * num_heads + head of a compressed call. first_token
// is left 0: it needs the lengths before it.
CompressedHead compressed_head(const ScatterArgs& args, int64_t task);

// Every rule on slots, lengths and windows. Reads the index tensors on the
// host.
void check_scatter_values(const ScatterArgs& args);

}  // namespace pacache
