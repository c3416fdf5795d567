#include "load_args.h"

#include <algorithm>
#include <string>

#include "memory_rules.h"

namespace pacache {
namespace {

constexpr const char* kOp = "paged_cache_load";
constexpr const char* kPackedOp = "paged_cache_load_packed";

// Which dimension of a cache is what; -1: none of its own.
struct CacheDims {
  int64_t position;
  int64_t head;
  int64_t unit;
};

void check_block_size(NamedTensor cache, int64_t dim) {
  TORCH_CHECK_VALUE(cache.tensor->size(dim) >= 1, kOp, ": ", cache.name,
                    " must have a block_size of at least 1, got ",
                    cache.tensor->sizes());
}

CacheDims check_norm(NamedTensor cache, NamedTensor out) {
  check_shape(kOp, cache, 4, {},
              [] { return "[num_blocks, block_size, num_heads, head_size]"; });
  check_block_size(cache, 1);
  const int64_t num_heads = cache.tensor->size(2);
  const int64_t head_size = cache.tensor->size(3);
  check_shape(kOp, out, 3, {{1, num_heads}, {2, head_size}}, [&] {
    return "[num_tokens, num_heads, head_size] with num_heads " +
           std::to_string(num_heads) + " and head_size " +
           std::to_string(head_size) + " as " + cache.name;
  });
  return {1, 2, -1};
}

CacheDims check_nz(NamedTensor cache, NamedTensor out) {
  const int64_t unit = nz_unit(*cache.tensor);
  const auto text = [&] {
    const std::string u = std::to_string(unit);
    return "[num_blocks, num_heads * head_size / " + u + ", block_size, " + u +
           "] or [num_blocks, num_heads, head_size / " + u + ", block_size, " +
           u + "]";
  };
  const bool five_d = cache.tensor->dim() == 5;
  if (five_d) {
    check_shape(kOp, cache, 5, {{4, unit}}, text);
  } else {
    check_shape(kOp, cache, 4, {{3, unit}}, text);
  }
  const CacheDims dims = five_d ? CacheDims{3, 1, 2} : CacheDims{2, -1, 1};
  check_block_size(cache, dims.position);
  const int64_t width =
      cache.tensor->size(1) * (five_d ? cache.tensor->size(2) : 1) * unit;
  const at::Tensor& o = *out.tensor;
  const bool fits = (o.dim() == 2 && o.size(1) == width) ||
                    (o.dim() == 3 && o.size(1) * o.size(2) == width);
  TORCH_CHECK_VALUE(fits, kOp, ": ", out.name, " must be [num_tokens, ", width,
                    "] or [num_tokens, num_heads, head_size] with num_heads * "
                    "head_size ",
                    width, " as ", cache.name, ", got ", o.sizes());
  return dims;
}

LoadPlane make_plane(const at::Tensor& cache, const at::Tensor& out,
                     CacheDims dims) {
  const int64_t itemsize = cache.element_size();
  LoadPlane plane;
  plane.src = static_cast<const char*>(cache.const_data_ptr());
  plane.dst = static_cast<char*>(out.mutable_data_ptr());
  plane.src_block_stride = byte_stride(cache, 0);
  plane.src_token_stride = byte_stride(cache, dims.position);
  plane.dst_token_stride = byte_stride(out, 0);
  if (dims.unit < 0) {
    plane.num_heads = cache.size(dims.head);
    plane.head_bytes = cache.size(-1) * itemsize;
    plane.unit_bytes = plane.head_bytes;
    plane.src_head_stride = byte_stride(cache, dims.head);
    plane.dst_head_stride = byte_stride(out, 1);
  } else {
    // Output rows are dense, so the cache alone says what a head is; in the
    // 4-D form all units of a row are one run.
    plane.num_heads = dims.head < 0 ? 1 : cache.size(dims.head);
    plane.head_bytes = cache.size(dims.unit) * 32;
    plane.unit_bytes = 32;
    plane.src_head_stride = dims.head < 0 ? 0 : byte_stride(cache, dims.head);
    plane.src_unit_stride = byte_stride(cache, dims.unit);
    plane.dst_head_stride = plane.head_bytes;
  }
  return plane;
}

// The half of a packed cache that begins `start` elements behind its first.
LoadPlane packed_plane(const at::Tensor& out, const PackedCache& cache,
                       int64_t start) {
  const int64_t itemsize = out.element_size();
  LoadPlane plane;
  plane.src = static_cast<const char*>(cache.tensor->const_data_ptr()) +
              start * itemsize;
  plane.dst = static_cast<char*>(out.mutable_data_ptr());
  plane.num_heads = out.size(1);
  plane.head_bytes = out.size(2) * itemsize;
  plane.unit_bytes = plane.head_bytes;
  plane.src_block_stride = cache.byte_stride(0);
  plane.src_token_stride = cache.byte_stride(1);
  plane.src_head_stride = cache.byte_stride(2);
  plane.dst_token_stride = byte_stride(out, 0);
  plane.dst_head_stride = byte_stride(out, 1);
  return plane;
}

// The index tensors among themselves; is_cumsum has been set.
void check_indices(NamedTensor tables, NamedTensor lens, NamedTensor starts,
                   LoadArgs& args) {
  const char* op = args.names.op;
  check_shape(op, tables, 2, {}, [] { return "[batch, max_num_blocks]"; });
  args.batch = tables.tensor->size(0);
  args.num_columns = tables.tensor->size(1);
  const auto batch_text = [&] {
    return "[batch] = [" + std::to_string(args.batch) + "]";
  };
  if (args.is_cumsum) {
    check_shape(op, lens, 1, {{0, args.batch + 1}}, [&] {
      return "[batch + 1] = [" + std::to_string(args.batch + 1) +
             "] with is_seq_lens_cumsum";
    });
  } else {
    check_shape(op, lens, 1, {{0, args.batch}}, batch_text);
  }
  if (starts.tensor != nullptr) {
    check_shape(op, starts, 1, {{0, args.batch}}, batch_text);
  }
}

void view_indices(NamedTensor tables, NamedTensor lens, NamedTensor starts,
                  LoadArgs& args) {
  args.block_tables = IndexView(*tables.tensor);
  args.context_lens = IndexView(*lens.tensor);
  if (starts.tensor != nullptr) {
    args.has_seq_starts = true;
    args.seq_starts = IndexView(*starts.tensor);
  }
}

// All within their storages; what is written lies over nothing that is there.
void check_memory(const char* op, std::initializer_list<NamedTensor> outputs,
                  std::initializer_list<NamedTensor> all) {
  c10::SmallVector<Region, 5> read;
  for (const NamedTensor t : all) {
    if (t.tensor == nullptr) {
      continue;
    }
    check_within_storage(op, t);
    const auto is_t = [&](NamedTensor out) { return out.name == t.name; };
    if (std::none_of(outputs.begin(), outputs.end(), is_t)) {
      read.push_back(region_of(t));
    }
  }
  c10::SmallVector<Region, 2> written;
  for (const NamedTensor t : outputs) {
    check_no_self_overlap(op, t);
    written.push_back(region_of(t));
  }
  check_disjoint(op, written, read);
}

void check_dense_rows(NamedTensor out) {
  const at::Tensor& t = *out.tensor;
  TORCH_CHECK_VALUE(t.dim() == 2 || t.size(1) <= 1 || t.size(2) == 0 ||
                        t.stride(1) == t.size(2),
                    kOp, ": ", out.name,
                    " must have dense rows with cache_mode 'PA_NZ', got shape ",
                    t.sizes(), " and strides ", t.strides());
}

}  // namespace

LoadArgs check_load_args(const LoadInputs& in) {
  const at::Tensor* seq_starts = get(in.seq_starts);
  const NamedTensor key_cache{"key_cache", &in.key_cache};
  const NamedTensor value_cache{"value_cache", &in.value_cache};
  const NamedTensor tables{"block_tables", &in.block_tables};
  const NamedTensor lens{"context_lens", &in.context_lens};
  const NamedTensor key{"key", &in.key};
  const NamedTensor value{"value", &in.value};
  const NamedTensor starts{"seq_starts", seq_starts};
  check_tensors(kOp,
                {key_cache, value_cache, tables, lens, key, value, starts});

  LoadArgs args;
  args.nz = in.cache_mode == "PA_NZ";
  args.is_cumsum = in.is_seq_lens_cumsum;
  TORCH_CHECK_VALUE(args.nz || in.cache_mode == "Norm", kOp,
                    ": cache_mode must be 'Norm' or 'PA_NZ', got '",
                    in.cache_mode, "'");
  TORCH_CHECK_VALUE(!args.nz || !args.is_cumsum, kOp,
                    ": is_seq_lens_cumsum must be False with cache_mode "
                    "'PA_NZ', got True");
  TORCH_CHECK_VALUE(!args.nz || seq_starts == nullptr, kOp,
                    ": seq_starts must be None with cache_mode 'PA_NZ', got a "
                    "tensor of shape ",
                    seq_starts->sizes());

  check_copy_dtype(kOp, key_cache);
  check_copy_dtype(kOp, value_cache);
  if (!args.nz) {
    check_same_dtype(kOp, value_cache, key_cache, " (only PA_NZ may mix)");
  }
  check_same_dtype(kOp, key, key_cache);
  check_same_dtype(kOp, value, value_cache);
  check_index_dtype(kOp, tables);
  check_index_dtype(kOp, lens);
  check_index_dtype(kOp, starts);

  check_indices(tables, lens, starts, args);

  const CacheDims key_dims =
      args.nz ? check_nz(key_cache, key) : check_norm(key_cache, key);
  args.num_blocks = in.key_cache.size(0);
  args.block_size = in.key_cache.size(key_dims.position);
  const CacheDims value_dims =
      args.nz ? check_nz(value_cache, value) : check_norm(value_cache, value);
  TORCH_CHECK_VALUE(args.nz || in.value_cache.size(2) == in.key_cache.size(2),
                    kOp, ": value_cache must have num_heads ",
                    in.key_cache.size(2), " as key_cache, got ",
                    in.value_cache.sizes());
  TORCH_CHECK_VALUE(
      in.value_cache.size(0) == args.num_blocks &&
          in.value_cache.size(value_dims.position) == args.block_size,
      kOp, ": value_cache must have num_blocks ", args.num_blocks,
      " and block_size ", args.block_size, " as key_cache, got ",
      in.value_cache.sizes());
  args.num_rows = in.key.size(0);
  TORCH_CHECK_VALUE(in.value.size(0) == args.num_rows, kOp,
                    ": value must have num_tokens ", args.num_rows,
                    " as key, got ", in.value.sizes());
  for (const NamedTensor t : {key_cache, value_cache, key, value}) {
    check_dense_last_dim(kOp, t);
  }
  if (args.nz) {
    check_dense_rows(key);
    check_dense_rows(value);
  }

  check_memory(kOp, {key, value},
               {key_cache, value_cache, tables, lens, key, value, starts});

  args.key = make_plane(in.key_cache, in.key, key_dims);
  args.value = make_plane(in.value_cache, in.value, value_dims);
  view_indices(tables, lens, starts, args);
  return args;
}

PackedLoadArgs check_packed_load_args(const PackedLoadInputs& in) {
  const NamedTensor cache{"kv_cache", &in.kv_cache};
  const NamedTensor tables{"block_tables", &in.block_tables};
  const NamedTensor lens{"context_lens", &in.context_lens};
  const NamedTensor key{"key", &in.key};
  const NamedTensor value{"value", &in.value};
  const NamedTensor starts{"seq_starts", get(in.seq_starts)};
  check_tensors(kPackedOp, {cache, tables, lens, key, value, starts});
  const PackedLayout& layout = packed_layout(kPackedOp, in.kv_layout);
  check_copy_dtype(kPackedOp, cache);
  check_same_dtype(kPackedOp, key, cache);
  check_same_dtype(kPackedOp, value, cache);
  for (const NamedTensor t : {tables, lens, starts}) {
    check_index_dtype(kPackedOp, t);
  }

  LoadArgs args;
  args.names = {kPackedOp, cache.name, cache.name, layout.name};
  args.is_cumsum = in.is_seq_lens_cumsum;
  check_indices(tables, lens, starts, args);
  check_shape(kPackedOp, key, 3, {},
              [] { return "[num_tokens, num_heads, head_size]"; });
  args.num_rows = in.key.size(0);
  check_shape(kPackedOp, value, 3, {{0, args.num_rows}, {1, in.key.size(1)}},
              [&] {
                return "[num_tokens, num_heads, head_size] with num_tokens " +
                       std::to_string(args.num_rows) + " and num_heads " +
                       std::to_string(in.key.size(1)) + " as key";
              });
  const PackedCache packed =
      check_packed_cache(kPackedOp, layout, key, value, in.kv_cache);
  args.num_blocks = packed.num_blocks();
  args.block_size = packed.block_size();
  for (const NamedTensor t : {cache, key, value}) {
    check_dense_last_dim(kPackedOp, t);
  }
  check_memory(kPackedOp, {key, value},
               {cache, tables, lens, key, value, starts});

  args.key = packed_plane(in.key, packed, 0);
  args.value = packed_plane(in.value, packed, packed.value_start);
  view_indices(tables, lens, starts, args);
  return {args, packed};
}

RowStarts check_load_values(const LoadArgs& args) {
  const char* op = args.names.op;
  RowStarts rows;
  rows.reserve(args.batch + 1);
  rows.push_back(args.is_cumsum ? args.context_lens[0] : 0);
  TORCH_CHECK_VALUE(rows[0] >= 0, op,
                    ": context_lens[0] must not be negative, got ", rows[0]);
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t row = rows.back();
    int64_t length = 0;
    if (args.is_cumsum) {
      const int64_t end = args.context_lens[b + 1];
      TORCH_CHECK_VALUE(end >= row, op, ": context_lens[", b + 1,
                        "] must be at least context_lens[", b, "] = ", row,
                        ", got ", end);
      length = end - row;
    } else {
      length = args.context_lens[b];
      TORCH_CHECK_VALUE(length >= 0, op, ": context_lens[", b,
                        "] must not be negative, got ", length);
    }
    const int64_t start = args.has_seq_starts ? args.seq_starts[b] : 0;
    TORCH_CHECK_VALUE(start >= 0, op, ": seq_starts[", b,
                      "] must not be negative, got ", start);
    if (length == 0) {
      rows.push_back(row);
      continue;
    }
    TORCH_CHECK_VALUE(length <= args.num_rows - row, op,
                      ": key must have room for the ", length,
                      " rows of sequence ", b, " from row ", row, ", got ",
                      args.num_rows, " rows");
    const int64_t first = start / args.block_size;
    const int64_t blocks = (length - 1) / args.block_size + 1;
    TORCH_CHECK_VALUE(first <= args.num_columns - blocks, op,
                      ": block_tables must have the columns for context_lens ",
                      length, " from seq_starts ", start, " of sequence ", b,
                      " with block_size ", args.block_size, ", got ",
                      args.num_columns, " columns");
    for (int64_t column = first; column < first + blocks; ++column) {
      const int64_t block = args.block_tables.at(b, column);
      TORCH_CHECK_INDEX(block >= 0 && block < args.num_blocks, op,
                        ": block_tables[", b, ", ", column,
                        "] must be between 0 and num_blocks - 1 = ",
                        args.num_blocks - 1, ", got ", block);
    }
    rows.push_back(row + length);
  }
  return rows;
}

}  // namespace pacache
