// How is a row of heads moved between the model's layout and the cache's?
//
// A row has a dense side, where every head is one run of bytes (the model's
// key and value), and a paged side, where a head is one or more units (the
// cache; more than one in NZ only). Scatter copies from the dense side to the
// paged one, gather back. Strides are in bytes. Bytes are moved by
// copy_kernels.h only.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "copy_kernels.h"

namespace pacache::cpu {

struct RowShape {
  int64_t heads;
  int64_t units;  // per head
  int64_t unit_bytes;
  int64_t dense_head_stride;
  int64_t paged_head_stride;
  int64_t paged_unit_stride;
  // From one token to the next; the paged one within a block.
  int64_t dense_token_stride;
  int64_t paged_token_stride;

  // Merges levels that are dense on both sides: a row that is dense on both is
  // one unit of one head, one copy.
  RowShape collapsed() const {
    RowShape row = *this;
    if (row.units > 1 && row.paged_unit_stride == row.unit_bytes) {
      row.unit_bytes *= row.units;
      row.units = 1;
    }
    if (row.heads > 1 && row.dense_head_stride == row.units * row.unit_bytes) {
      if (row.units == 1 && row.paged_head_stride == row.unit_bytes) {
        row.unit_bytes *= row.heads;
        row.heads = 1;
      } else if (row.units > 1 &&
                 row.paged_head_stride == row.units * row.paged_unit_stride) {
        row.units *= row.heads;
        row.heads = 1;
      } else if (row.units == 1) {
        row.units = row.heads;
        row.paged_unit_stride = row.paged_head_stride;
        row.heads = 1;
      }
    }
    return row;
  }

  // Nothing moves. Such planes may have null pointers, from which no address
  // is formed.
  bool is_empty() const { return heads * units * unit_bytes == 0; }

  // A row is one run, and neighbouring tokens are neighbours on both sides.
  bool is_dense() const {
    return heads == 1 && units == 1 && dense_token_stride == unit_bytes &&
           paged_token_stride == unit_bytes;
  }

  // A row is more than one 32-byte unit: half a cache line each.
  bool is_nz() const { return unit_bytes == kNzUnit && heads * units > 1; }
};

// Do key and value of one token lie side by side in the cache, as halves of
// each head? Then they are moved token by token: going through the cache twice
// takes half as long again.
inline bool side_by_side(const char* key, const char* value,
                         int64_t token_stride) {
  const auto a = reinterpret_cast<uintptr_t>(key);
  const auto b = reinterpret_cast<uintptr_t>(value);
  return std::max(a, b) - std::min(a, b) < static_cast<uintptr_t>(token_stride);
}

// One run of a row. Short ones are left to memcpy, which the compiler knows.
inline void copy_run(const CopyKernels& kernels, char* dst, const char* src,
                     int64_t n, bool stream) {
  if (n < 128) {
    std::memcpy(dst, src, n);
  } else if (stream) {
    kernels.stream(dst, src, n);
  } else {
    kernels.copy(dst, src, n);
  }
}

inline bool is_multiple_of_unit(const void* address, int64_t stride) {
  return (reinterpret_cast<uintptr_t>(address) |
          static_cast<uint64_t>(stride)) %
             kNzUnit ==
         0;
}

// Rows that are not neighbours end the processor's own prefetching at every
// row: in a large call the row after next is asked for ahead.
constexpr int64_t kPrefetchTokens = 2;

inline void prefetch_row(const char* dense, const RowShape& row) {
  for (int64_t h = 0; h < row.heads; ++h) {
    const char* head = dense + h * row.dense_head_stride;
    for (int64_t b = 0; b < row.units * row.unit_bytes; b += 64) {
      __builtin_prefetch(head + b, 0, 0);
    }
  }
}

// `count` tokens from the dense side to consecutive positions of one block.
inline void scatter_run(const CopyKernels& kernels, char* paged,
                        const char* dense, int64_t count, const RowShape& row,
                        bool stream) {
  if (row.is_dense()) {
    copy_run(kernels, paged, dense, count * row.unit_bytes, stream);
    return;
  }
  for (int64_t t = 0; t < count; ++t) {
    char* to = paged + t * row.paged_token_stride;
    const char* from = dense + t * row.dense_token_stride;
    if (stream && t + kPrefetchTokens < count) {
      prefetch_row(from + kPrefetchTokens * row.dense_token_stride, row);
    }
    for (int64_t h = 0; h < row.heads; ++h) {
      char* head = to + h * row.paged_head_stride;
      const char* run = from + h * row.dense_head_stride;
      for (int64_t u = 0; u < row.units; ++u) {
        copy_run(kernels, head + u * row.paged_unit_stride,
                 run + u * row.unit_bytes, row.unit_bytes, stream);
      }
    }
  }
}

// NZ: `tokens` (at most a tile) rows from dense[t] to paged[t]. `adjacent`
// says that they go to consecutive positions, so that lines are completed.
inline void scatter_tile(const CopyKernels& kernels, char* const* paged,
                         const char* const* dense, int64_t tokens,
                         const RowShape& row, bool adjacent, bool stream) {
  // Half a line stored past the cache would cost more than it saves.
  const bool stream_units =
      stream && adjacent && tokens == kTileTokens &&
      is_multiple_of_unit(paged[0],
                          row.paged_unit_stride | row.paged_head_stride);
  char* to[kTileTokens];
  const char* from[kTileTokens];
  for (int64_t h = 0; h < row.heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      to[t] = paged[t] + h * row.paged_head_stride;
      from[t] = dense[t] + h * row.dense_head_stride;
    }
    kernels.scatter_units(to, row.paged_unit_stride, from, tokens, row.units,
                          stream_units);
  }
}

// `count` tokens from consecutive positions of one block to the dense side.
inline void gather_run(const CopyKernels& kernels, char* dense,
                       const char* paged, int64_t count, const RowShape& row,
                       bool stream) {
  if (row.is_dense()) {
    copy_run(kernels, dense, paged, count * row.unit_bytes, stream);
    return;
  }
  if (row.is_nz()) {
    const bool stream_units =
        stream && is_multiple_of_unit(
                      dense, row.dense_token_stride | row.dense_head_stride);
    for (int64_t h = 0; h < row.heads; ++h) {
      kernels.gather_units(
          dense + h * row.dense_head_stride, row.dense_token_stride,
          paged + h * row.paged_head_stride, row.paged_token_stride,
          row.paged_unit_stride, count, row.units, stream_units);
    }
    return;
  }
  for (int64_t t = 0; t < count; ++t) {
    char* to = dense + t * row.dense_token_stride;
    const char* from = paged + t * row.paged_token_stride;
    for (int64_t h = 0; h < row.heads; ++h) {
      char* run = to + h * row.dense_head_stride;
      const char* head = from + h * row.paged_head_stride;
      for (int64_t u = 0; u < row.units; ++u) {
        copy_run(kernels, run + u * row.unit_bytes,
                 head + u * row.paged_unit_stride, row.unit_bytes, stream);
      }
    }
  }
}

}  // namespace pacache::cpu
