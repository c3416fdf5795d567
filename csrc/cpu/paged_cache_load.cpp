// paged_cache_load and paged_cache_load_packed on the CPU.
//
// Every argument, length and block id has been checked before the first byte
// moves. Sequences fill disjoint, consecutive output rows, so work is divided
// over rows, whatever sequence they belong to: one long sequence keeps all
// threads busy.

#include "../load_args.h"
#include "../written.h"

#include <torch/library.h>

#include <algorithm>

#include "parallel.h"
#include "past_cache.h"
#include "register.h"
#include "row_copy.h"

namespace pacache::cpu {
namespace {

RowShape row_shape(const LoadPlane& plane) {
  const int64_t units =
      plane.unit_bytes == 0 ? 0 : plane.head_bytes / plane.unit_bytes;
  return RowShape{plane.num_heads,        units,
                  plane.unit_bytes,       plane.dst_head_stride,
                  plane.src_head_stride,  plane.src_unit_stride,
                  plane.dst_token_stride, plane.src_token_stride}
      .collapsed();
}

// `count` rows that lie in one block, from position on.
void load_run(const LoadPlane& plane, const RowShape& shape, int64_t row,
              int64_t block, int64_t position, int64_t count, bool stream) {
  if (shape.is_empty()) {
    return;
  }
  gather_run(copy_kernels(), plane.dst + row * plane.dst_token_stride,
             plane.src + block * plane.src_block_stride +
                 position * plane.src_token_stride,
             count, shape, stream);
}

void load_rows(const LoadArgs& args, const RowStarts& rows) {
  const RowShape key_shape = row_shape(args.key);
  const RowShape value_shape = row_shape(args.value);
  const int64_t row_bytes = args.key.num_heads * args.key.head_bytes +
                            args.value.num_heads * args.value.head_bytes;
  const int64_t first_row = rows.front();
  // What is read back goes on to be read.
  const PastCache past_cache((rows.back() - first_row) * row_bytes,
                             num_threads(), /*memory=*/0);
  const int64_t together =
      side_by_side(args.key.src, args.value.src, args.key.src_token_stride)
          ? 1
          : args.block_size;
  parallel_by_bytes(
      rows.back() - first_row, row_bytes, [&](int64_t begin, int64_t end) {
        int64_t row = first_row + begin;
        const int64_t last = first_row + end;
        // The sequence that holds the row: the last one to start at or before
        // it (those before it with the same start are empty).
        int64_t b =
            std::upper_bound(rows.begin(), rows.end(), row) - rows.begin() - 1;
        while (row < last) {
          const int64_t sequence_end = std::min(rows[b + 1], last);
          const int64_t column = args.first_column(b);
          while (row < sequence_end) {
            const int64_t j = row - rows[b];
            const int64_t position = j % args.block_size;
            const int64_t block =
                args.block_tables.at(b, column + j / args.block_size);
            const int64_t count =
                std::min(args.block_size - position, sequence_end - row);
            const bool stream = past_cache.run_of(count * row_bytes / 2);
            for (int64_t done = 0; done < count; done += together) {
              const int64_t now = std::min(together, count - done);
              load_run(args.key, key_shape, row + done, block, position + done,
                       now, stream);
              load_run(args.value, value_shape, row + done, block,
                       position + done, now, stream);
            }
            row += count;
          }
          ++b;
        }
        if (past_cache.any()) {
          copy_kernels().fence();
        }
      });
}

void paged_cache_load(const at::Tensor& key_cache,
                      const at::Tensor& value_cache,
                      const at::Tensor& block_tables,
                      const at::Tensor& context_lens, const at::Tensor& key,
                      const at::Tensor& value, const OptionalTensor& seq_starts,
                      c10::string_view cache_mode, bool is_seq_lens_cumsum) {
  const LoadArgs args =
      check_load_args({key_cache, value_cache, block_tables, context_lens, key,
                       value, seq_starts, cache_mode, is_seq_lens_cumsum});
  load_rows(args, check_load_values(args));
  mark_written(key);
  mark_written(value);
}

void paged_cache_load_packed(const at::Tensor& kv_cache,
                             const at::Tensor& block_tables,
                             const at::Tensor& context_lens,
                             const at::Tensor& key, const at::Tensor& value,
                             c10::string_view kv_layout,
                             const OptionalTensor& seq_starts,
                             bool is_seq_lens_cumsum) {
  const LoadArgs args =
      check_packed_load_args({kv_cache, block_tables, context_lens, key, value,
                              kv_layout, seq_starts, is_seq_lens_cumsum})
          .args;
  load_rows(args, check_load_values(args));
  mark_written(key);
  mark_written(value);
}

}  // namespace

TORCH_LIBRARY_IMPL(pacache, CPU, m) {
  if (kernels_enabled()) {
    m.impl("paged_cache_load", TORCH_FN(paged_cache_load));
    m.impl("paged_cache_load_packed", TORCH_FN(paged_cache_load_packed));
  }
}

}  // namespace pacache::cpu
