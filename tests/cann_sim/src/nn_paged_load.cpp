#include "nn_paged_load.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "journal.h"
#include "nn_view.h"

namespace cann_sim {
namespace {

constexpr int64_t kLine = 32;

int64_t dense_bytes(const TensorInfo& t) { return t.numel() * t.itemsize(); }

// Reads element i of an int32 tensor.
bool get(Region* region, int64_t i, int64_t* value) {
  const uint8_t* p = region->at(i * 4, 4);
  if (!p) return false;
  int32_t word;
  memcpy(&word, p, 4);
  *value = word;
  return true;
}

// One of key and value: [source of token] -> [output row].
struct Side {
  Side(const Call& call, int cache_index, int out_index, bool nz,
       const std::string& name)
      : from(call, cache_index, Access::kRead, name + "_cache",
             dense_bytes(call.tensors[cache_index])),
        to(call, out_index, Access::kWrite, name,
           dense_bytes(call.tensors[out_index])) {
    const TensorInfo& cache = call.tensors[cache_index];
    blocks = cache.dims[0];
    block_size = cache.dims[nz ? 2 : 1];
    row_bytes = cache.dims[nz ? 1 : 2] * cache.dims[3] * cache.itemsize();
  }

  Region from;
  Region to;
  int64_t blocks = 0;
  int64_t block_size = 0;
  int64_t row_bytes = 0;
};

void copy(Side* s, int64_t source, int64_t target, int64_t bytes) {
  uint8_t* read = s->from.at(source, bytes);
  uint8_t* write = s->to.at(target, bytes);
  if (read && write) memcpy(write, read, bytes);
}

// `count` tokens from the start of a block to consecutive rows.
void copy_run(Side* s, bool nz, int64_t block, int64_t row, int64_t count) {
  int64_t start = block * s->block_size * s->row_bytes;
  if (!nz) {
    copy(s, start, row * s->row_bytes, count * s->row_bytes);
    return;
  }
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t c = 0; c < s->row_bytes / kLine; ++c) {
      copy(s, start + (c * s->block_size + t) * kLine,
           (row + t) * s->row_bytes + c * kLine, kLine);
    }
  }
}

}  // namespace

void run_paged_load(const PagedLoad& p, const Call& call) {
  const TensorInfo& table = call.tensors[p.tables];
  int64_t batch = table.dims[0];
  int64_t columns = table.dims[1];
  Region tables(call, p.tables, Access::kRead, "block_tables",
                dense_bytes(table));
  Region lengths(call, p.lengths, Access::kRead, "context_lens",
                 dense_bytes(call.tensors[p.lengths]));
  Side sides[] = {Side(call, p.key_cache, p.key, p.nz, "key"),
                  Side(call, p.value_cache, p.value, p.nz, "value")};
  int64_t block_size = sides[0].block_size;
  int64_t row = 0;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t length = 0;
    if (!get(&lengths, b, &length)) return;
    if (p.cumulative) {
      row = length;
      int64_t next = 0;
      if (!get(&lengths, b + 1, &next)) return;
      length = next - row;
    }
    int64_t first_column = 0;
    if (p.starts >= 0) {
      Region starts(call, p.starts, Access::kRead, "seq_starts",
                    dense_bytes(call.tensors[p.starts]));
      int64_t start = 0;
      if (!get(&starts, b, &start)) return;
      first_column = start / block_size;
    }
    for (int64_t j = 0; j < length; j += block_size) {
      int64_t column = first_column + j / block_size;
      if (column < 0 || column >= columns) {
        violation("out_of_bounds", call.run.op,
                  format("column %lld of a block table with %lld",
                         static_cast<long long>(column),
                         static_cast<long long>(columns)));
      }
      int64_t block = 0;
      if (!get(&tables, b * columns + column, &block)) return;
      int64_t count = std::min(block_size, length - j);
      for (Side& s : sides) copy_run(&s, p.nz, block, row + j, count);
      if (sides[0].from.failed() || sides[0].to.failed()) return;
    }
    if (!p.cumulative) row += length;
  }
}

}  // namespace cann_sim
