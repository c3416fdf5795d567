// What is a legal call of paged_cache_load or paged_cache_load_packed, and
// what does it ask for? Tensors in, a checked plain struct out; used by the
// CPU kernel and by the NPU binding.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <string_view>

#include "index_view.h"
#include "packed_layout.h"
#include "tensor_rules.h"

namespace pacache {

// Key or value: where its rows are read and where they are written. Strides
// in bytes. A row is num_heads runs of head_bytes on the writing side; on the
// reading side a run is made of units of unit_bytes, unit_stride apart (one
// unit per head except in NZ).
struct LoadPlane {
  const char* src = nullptr;
  char* dst = nullptr;
  int64_t num_heads = 0;
  int64_t head_bytes = 0;
  // src of (block, position, head, unit)
  int64_t src_block_stride = 0;
  int64_t src_token_stride = 0;
  int64_t src_head_stride = 0;
  int64_t src_unit_stride = 0;
  int64_t unit_bytes = 0;
  // dst of (row, head)
  int64_t dst_token_stride = 0;
  int64_t dst_head_stride = 0;
};

struct LoadArgs {
  CallNames names{"paged_cache_load"};
  bool nz = false;
  bool is_cumsum = false;
  int64_t batch = 0;
  int64_t num_columns = 0;  // of block_tables
  int64_t num_rows = 0;     // of key and value
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  LoadPlane key;
  LoadPlane value;
  IndexView block_tables;
  IndexView context_lens;
  bool has_seq_starts = false;
  IndexView seq_starts;

  // Column of block_tables at which sequence b begins.
  int64_t first_column(int64_t b) const {
    return has_seq_starts ? seq_starts[b] / block_size : 0;
  }
};

struct LoadInputs {
  const at::Tensor& key_cache;
  const at::Tensor& value_cache;
  const at::Tensor& block_tables;
  const at::Tensor& context_lens;
  const at::Tensor& key;
  const at::Tensor& value;
  const OptionalTensor& seq_starts;
  std::string_view cache_mode;
  bool is_seq_lens_cumsum;
};

// Every rule that needs no index value. Reads no tensor data.
LoadArgs check_load_args(const LoadInputs& in);

struct PackedLoadInputs {
  const at::Tensor& kv_cache;
  const at::Tensor& block_tables;
  const at::Tensor& context_lens;
  const at::Tensor& key;
  const at::Tensor& value;
  std::string_view kv_layout;
  const OptionalTensor& seq_starts;
  bool is_seq_lens_cumsum;
};

// Norm, from the halves of one cache.
struct PackedLoadArgs {
  LoadArgs args;
  PackedCache cache;
};

PackedLoadArgs check_packed_load_args(const PackedLoadInputs& in);

// Output row at which each sequence begins; one more element than sequences,
// so that sequence b fills rows [starts[b], starts[b + 1]).
using RowStarts = c10::SmallVector<int64_t, 33>;

// Every rule on lengths, starts and block ids. Reads the index tensors on the
// host.
RowStarts check_load_values(const LoadArgs& args);

}  // namespace pacache
