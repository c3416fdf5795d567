// scatter_pa_kv_cache and scatter_pa_kv_cache_packed on the CPU.
//
// Every argument and every slot has been checked before the first byte moves,
// so nothing below can fail or leave a cache half written. Work is divided
// over tokens (or over heads in the compressed kinds); distinct slots never
// share bytes, so threads need no order. With duplicate slots the last token
// wins only in serial order, which is kept when deterministic algorithms are
// asked for.

#include "../scatter_args.h"
#include "../written.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "past_cache.h"
#include "register.h"
#include "row_copy.h"
#include "window_mean.h"

namespace pacache::cpu {
namespace {

RowShape row_shape(const ScatterPlane& plane, int64_t num_heads) {
  const int64_t units =
      plane.unit_bytes == 0 ? 0 : plane.head_bytes / plane.unit_bytes;
  return RowShape{num_heads,
                  units,
                  plane.unit_bytes,
                  plane.src_head_stride,
                  plane.dst_head_stride,
                  plane.dst_unit_stride,
                  plane.src_token_stride,
                  plane.dst_token_stride}
      .collapsed();
}

// One head of one token, for the compressed kinds: their cache has one head.
RowShape head_shape(const ScatterPlane& plane) {
  return RowShape{1,
                  1,
                  plane.head_bytes,
                  plane.head_bytes,
                  plane.head_bytes,
                  plane.head_bytes,
                  plane.src_token_stride,
                  plane.dst_token_stride};
}

char* slot_address(const ScatterPlane& plane, int64_t slot,
                   int64_t block_size) {
  return plane.dst + slot / block_size * plane.dst_block_stride +
         slot % block_size * plane.dst_token_stride;
}

// A token and where it goes.
struct Placed {
  int64_t slot;
  int64_t token;
  bool operator<(const Placed& other) const {
    return std::tie(slot, token) < std::tie(other.slot, other.token);
  }
};

// Tokens [begin, end) of an NZ call. A token's units are half a cache line
// each, and its neighbour in the block has the other halves: tokens are moved
// in tiles, ordered by slot where they do not come that way (equal slots keep
// their order).
template <typename Index>
void scatter_nz_range(const ScatterArgs& args, const RowShape& key_row,
                      const RowShape& value_row, int64_t begin, int64_t end,
                      const PastCache& past_cache) {
  const auto* slots = static_cast<const Index*>(args.slot_mapping.data);
  const int64_t slot_stride = args.slot_mapping.stride_row;
  std::vector<Placed> placed;
  placed.reserve(end - begin);
  int64_t breaks = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = slots[i * slot_stride];
    if (slot >= 0) {
      breaks += placed.empty() || slot != placed.back().slot + 1;
      placed.push_back({slot, i});
    }
  }
  const auto count = static_cast<int64_t>(placed.size());
  if (breaks * kTileTokens > count) {
    std::sort(placed.begin(), placed.end());
  }
  const CopyKernels& kernels = copy_kernels();
  for (int64_t first = 0; first < count; first += kTileTokens) {
    const int64_t tokens = std::min(kTileTokens, count - first);
    const Placed* tile = placed.data() + first;
    bool adjacent = tile[0].slot % args.block_size + tokens <= args.block_size;
    for (int64_t t = 1; t < tokens; ++t) {
      adjacent = adjacent && tile[t].slot == tile[0].slot + t;
    }
    const auto scatter_plane = [&](const ScatterPlane& plane,
                                   const RowShape& row) {
      char* paged[kTileTokens];
      const char* dense[kTileTokens];
      for (int64_t t = 0; t < tokens; ++t) {
        paged[t] = slot_address(plane, tile[t].slot, args.block_size);
        dense[t] = plane.src + tile[t].token * plane.src_token_stride;
      }
      scatter_tile(kernels, paged, dense, tokens, row,
                   adjacent && row.paged_token_stride == kNzUnit,
                   past_cache.run_of(kLongRun));
    };
    scatter_plane(args.key, key_row);
    if (args.has_value) {
      scatter_plane(args.value, value_row);
    }
  }
}

// Tokens [begin, end) of any other call. Tokens that go to consecutive
// positions of one block are copied together; every slot of the run is looked
// at, not its ends.
template <typename Index>
void scatter_range(const ScatterArgs& args, const RowShape& key_row,
                   const RowShape& value_row, int64_t begin, int64_t end,
                   const PastCache& past_cache) {
  const auto* slots = static_cast<const Index*>(args.slot_mapping.data);
  const int64_t slot_stride = args.slot_mapping.stride_row;
  const CopyKernels& kernels = copy_kernels();
  const bool alone =
      args.has_value &&
      side_by_side(args.key.dst, args.value.dst, args.key.dst_token_stride);
  for (int64_t i = begin; i < end;) {
    const int64_t slot = slots[i * slot_stride];
    if (slot < 0) {
      ++i;
      continue;
    }
    const int64_t most =
        alone ? 1 : std::min(end - i, args.block_size - slot % args.block_size);
    int64_t count = 1;
    while (count < most && slots[(i + count) * slot_stride] == slot + count) {
      ++count;
    }
    const auto scatter_plane = [&](const ScatterPlane& plane,
                                   const RowShape& row) {
      if (!row.is_empty()) {
        const bool stream =
            past_cache.run_of(count * args.num_heads * plane.head_bytes);
        scatter_run(kernels, slot_address(plane, slot, args.block_size),
                    plane.src + i * plane.src_token_stride, count, row, stream);
      }
    };
    scatter_plane(args.key, key_row);
    if (args.has_value) {
      scatter_plane(args.value, value_row);
    }
    i += count;
  }
}

template <typename Index>
void scatter_tokens(const ScatterArgs& args) {
  const int64_t token_bytes =
      args.num_heads * (args.key.head_bytes + args.value.head_bytes);
  const RowShape key_row = row_shape(args.key, args.num_heads);
  const RowShape value_row = row_shape(args.value, args.num_heads);
  const PastCache past_cache(
      args.num_tokens * token_bytes, num_threads(),
      std::max<int64_t>(0, args.num_blocks - 1) *
          (args.key.dst_block_stride + args.value.dst_block_stride));
  // Tiles serve both planes, so both must be made of units.
  const bool nz = key_row.is_nz() && (!args.has_value || value_row.is_nz());
  parallel_by_bytes(args.num_tokens, token_bytes,
                    [&](int64_t begin, int64_t end) {
                      if (nz) {
                        scatter_nz_range<Index>(args, key_row, value_row, begin,
                                                end, past_cache);
                      } else {
                        scatter_range<Index>(args, key_row, value_row, begin,
                                             end, past_cache);
                      }
                      if (past_cache.any()) {
                        copy_kernels().fence();
                      }
                    });
}

// Rows of one head: source tokens first.. to slots slot.., count of them. The
// cache has one head, so a row is head_bytes; slots run on across blocks.
void copy_rows(const ScatterPlane& plane, const char* src, int64_t slot,
               int64_t count, int64_t block_size) {
  while (count > 0) {
    const int64_t position = slot % block_size;
    const int64_t run = std::min(count, block_size - position);
    scatter_run(copy_kernels(), slot_address(plane, slot, block_size), src, run,
                head_shape(plane), /*stream=*/false);
    src += run * plane.src_token_stride;
    slot += run;
    count -= run;
  }
}

// One head of one plane. src is the head's first token.
void scatter_head(const ScatterArgs& args, const ScatterPlane& plane,
                  const char* src, const CompressedHead& head,
                  std::vector<float>& sum) {
  const auto token = [&](int64_t j) {
    return src + j * plane.src_token_stride;
  };
  if (args.kind == ScatterKind::kAlibi) {
    // The last `window` tokens of the sequence.
    copy_rows(plane, token(head.length - head.window), head.slot, head.window,
              args.block_size);
    return;
  }
  if (is_uncompressed(head)) {
    copy_rows(plane, src, head.slot, head.length, args.block_size);
    return;
  }
  // Tokens before the window, (Rope) its mean, tokens behind it.
  copy_rows(plane, src, head.slot, head.offset, args.block_size);
  int64_t slot = head.slot + head.offset;
  if (args.kind == ScatterKind::kRope) {
    window_mean(plane.dtype, slot_address(plane, slot, args.block_size),
                token(head.offset), plane.src_token_stride, head.window,
                plane.head_size, sum);
    ++slot;
  }
  const int64_t behind = head.offset + head.window;
  copy_rows(plane, token(behind), slot, head.length - behind, args.block_size);
}

void scatter_heads(const ScatterArgs& args) {
  // First token of every sequence; padded sequences have their own stride.
  std::vector<int64_t> first_token(args.batch, 0);
  if (args.scenario != 3) {
    for (int64_t b = 1; b < args.batch; ++b) {
      first_token[b] = first_token[b - 1] + args.seq_lens[b - 1];
    }
  }
  const int64_t num_tasks = args.batch * args.num_heads;
  if (num_tasks == 0 || args.num_tokens == 0) {
    return;
  }
  const int64_t head_bytes = args.key.head_bytes + args.value.head_bytes;
  // No more tokens than make a grain: an expanded key may have any number.
  const int64_t task_bytes =
      std::clamp<int64_t>(args.num_tokens / args.batch, 1, kGrainBytes) *
      head_bytes;
  parallel_by_bytes(num_tasks, task_bytes, [&](int64_t begin, int64_t end) {
    std::vector<float> sum;
    for (int64_t task = begin; task < end; ++task) {
      const CompressedHead head = compressed_head(args, task);
      if (head.slot < 0) {
        continue;
      }
      const int64_t b = task / args.num_heads;
      const int64_t h = task % args.num_heads;
      for (const ScatterPlane* plane : {&args.key, &args.value}) {
        if (plane->head_bytes == 0) {
          continue;
        }
        scatter_head(args, *plane,
                     plane->src + b * plane->src_batch_stride +
                         first_token[b] * plane->src_token_stride +
                         h * plane->src_head_stride,
                     head, sum);
      }
    }
  });
}

void scatter(const ScatterArgs& args) {
  check_scatter_values(args);
  if (args.is_compressed()) {
    scatter_heads(args);
  } else if (args.slot_mapping.is_int64) {
    scatter_tokens<int64_t>(args);
  } else {
    scatter_tokens<int32_t>(args);
  }
}

void scatter_pa_kv_cache(
    const at::Tensor& key, const OptionalTensor& value,
    const at::Tensor& key_cache, const OptionalTensor& value_cache,
    const at::Tensor& slot_mapping, const OptionalTensor& compress_lens,
    const OptionalTensor& compress_seq_offsets, const OptionalTensor& seq_lens,
    c10::string_view cache_mode, c10::string_view scatter_mode,
    at::OptionalIntArrayRef strides, at::OptionalIntArrayRef offsets) {
  scatter(check_scatter_args({key, value, key_cache, value_cache, slot_mapping,
                              compress_lens, compress_seq_offsets, seq_lens,
                              cache_mode, scatter_mode, strides, offsets}));
  mark_written(key_cache);
  mark_written(value_cache);
}

void scatter_pa_kv_cache_packed(const at::Tensor& key, const at::Tensor& value,
                                const at::Tensor& kv_cache,
                                const at::Tensor& slot_mapping,
                                c10::string_view kv_layout) {
  scatter(
      check_packed_scatter_args({key, value, kv_cache, slot_mapping, kv_layout})
          .args);
  mark_written(kv_cache);
}

}  // namespace

TORCH_LIBRARY_IMPL(pacache, CPU, m) {
  if (kernels_enabled()) {
    m.impl("scatter_pa_kv_cache", TORCH_FN(scatter_pa_kv_cache));
    m.impl("scatter_pa_kv_cache_packed", TORCH_FN(scatter_pa_kv_cache_packed));
  }
}

}  // namespace pacache::cpu
