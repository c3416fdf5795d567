// The only place that moves bytes: rows of heads, in runs.
//
// A row has a dense side, where every head is one run of bytes (the model's
// key and value), and a paged side, where a head is one or more units
// (the cache; more than one in NZ only). Scatter copies from the dense side to
// the paged one, gather back. Strides are in bytes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "stream_copy.h"

namespace pacache::cpu {

// Bytes of one unit of the NZ layout.
constexpr int64_t kNzUnit = 32;

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
  // one unit of one head, one memcpy.
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

  bool is_one_run() const { return heads == 1 && units == 1; }

  // Neighbouring tokens are neighbours in memory on both sides.
  bool is_dense() const {
    return is_one_run() && dense_token_stride == unit_bytes &&
           paged_token_stride == unit_bytes;
  }

  // Units that neighbouring tokens place side by side: half a cache line each.
  bool is_nz() const {
    return unit_bytes == kNzUnit && paged_token_stride == kNzUnit;
  }
};

// Tokens of a tile when units of neighbouring tokens are brought together:
// enough to fill lines, few enough for the dense rows to stay in the L1 cache.
constexpr int64_t kTileTokens = 8;

inline void copy_run(char* dst, const char* src, int64_t n, bool stream) {
  if (stream) {
    stream_copy(dst, src, n);
  } else {
    std::memcpy(dst, src, n);
  }
}

// `tokens` (at most a tile) units of 32 bytes, one per token.
inline void copy_units_across_tokens(char* dst, int64_t dst_stride,
                                     const char* src, int64_t src_stride,
                                     int64_t tokens, bool stream) {
  if (stream) {
    for (int64_t t = 0; t < tokens; ++t) {
      stream_32(dst + t * dst_stride, src + t * src_stride);
    }
  } else {
    for (int64_t t = 0; t < tokens; ++t) {
      std::memcpy(dst + t * dst_stride, src + t * src_stride, kNzUnit);
    }
  }
}

inline bool is_aligned_16(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// `count` tokens from the dense side to consecutive positions of one block.
inline void scatter_run(char* paged, const char* dense, int64_t count,
                        const RowShape& row, bool stream) {
  if (row.is_dense()) {
    copy_run(paged, dense, count * row.unit_bytes, stream);
    return;
  }
  if (row.is_nz() && count > 1) {
    // Whole lines at a time: the units of a tile's tokens are neighbours.
    const bool stream_units = stream && is_aligned_16(paged);
    for (int64_t first = 0; first < count; first += kTileTokens) {
      const int64_t tokens = std::min(kTileTokens, count - first);
      for (int64_t h = 0; h < row.heads; ++h) {
        for (int64_t u = 0; u < row.units; ++u) {
          copy_units_across_tokens(
              paged + first * kNzUnit + h * row.paged_head_stride +
                  u * row.paged_unit_stride,
              kNzUnit,
              dense + first * row.dense_token_stride +
                  h * row.dense_head_stride + u * kNzUnit,
              row.dense_token_stride, tokens, stream_units);
        }
      }
    }
    return;
  }
  for (int64_t t = 0; t < count; ++t) {
    char* to = paged + t * row.paged_token_stride;
    const char* from = dense + t * row.dense_token_stride;
    for (int64_t h = 0; h < row.heads; ++h) {
      char* head = to + h * row.paged_head_stride;
      const char* run = from + h * row.dense_head_stride;
      if (row.unit_bytes == kNzUnit) {
        for (int64_t u = 0; u < row.units; ++u) {
          std::memcpy(head + u * row.paged_unit_stride, run + u * kNzUnit,
                      kNzUnit);
        }
      } else {
        for (int64_t u = 0; u < row.units; ++u) {
          copy_run(head + u * row.paged_unit_stride, run + u * row.unit_bytes,
                   row.unit_bytes, stream);
        }
      }
    }
  }
}

// `count` tokens from consecutive positions of one block to the dense side.
inline void gather_run(char* dense, const char* paged, int64_t count,
                       const RowShape& row, bool stream) {
  if (row.is_dense()) {
    copy_run(dense, paged, count * row.unit_bytes, stream);
    return;
  }
  for (int64_t t = 0; t < count; ++t) {
    char* to = dense + t * row.dense_token_stride;
    const char* from = paged + t * row.paged_token_stride;
    for (int64_t h = 0; h < row.heads; ++h) {
      char* run = to + h * row.dense_head_stride;
      const char* head = from + h * row.paged_head_stride;
      if (row.unit_bytes == kNzUnit) {
        // Neighbouring units complete the lines of the dense row.
        const bool stream_units = stream && is_aligned_16(run);
        copy_units_across_tokens(run, kNzUnit, head, row.paged_unit_stride,
                                 row.units, stream_units);
      } else {
        for (int64_t u = 0; u < row.units; ++u) {
          copy_run(run + u * row.unit_bytes, head + u * row.paged_unit_stride,
                   row.unit_bytes, stream);
        }
      }
    }
  }
}

}  // namespace pacache::cpu
