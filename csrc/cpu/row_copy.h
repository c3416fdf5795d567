// The only place that moves bytes.

#pragma once

#include <cstdint>
#include <cstring>

namespace pacache::cpu {

// A row of heads, each head a run of bytes on one side and `units` runs of
// unit_bytes on the other. Strides are in bytes. collapsed() merges levels
// that are dense on both sides, so that a dense row is one memcpy.
struct RowShape {
  int64_t heads;
  int64_t units;
  int64_t unit_bytes;
  int64_t run_head_stride;   // side on which a head is one run
  int64_t unit_head_stride;  // side on which a head is units
  int64_t unit_stride;

  RowShape collapsed() const {
    RowShape row = *this;
    if (row.units > 1 && row.unit_stride == row.unit_bytes) {
      row.unit_bytes *= row.units;
      row.units = 1;
    }
    if (row.heads > 1 && row.run_head_stride == row.units * row.unit_bytes) {
      if (row.units == 1 && row.unit_head_stride == row.unit_bytes) {
        row.unit_bytes *= row.heads;
        row.heads = 1;
      } else if (row.units > 1 &&
                 row.unit_head_stride == row.units * row.unit_stride) {
        row.units *= row.heads;
        row.heads = 1;
      } else if (row.units == 1) {
        row.units = row.heads;
        row.unit_stride = row.unit_head_stride;
        row.heads = 1;
      }
    }
    return row;
  }

  // No stride is needed to say where the row is: it is one run on both sides.
  bool is_dense() const { return heads == 1 && units == 1; }
};

// units * 32 bytes; the constant size lets the compiler use two or one
// registers instead of a call.
inline void copy_units_32(char* dst, int64_t dst_stride, const char* src,
                          int64_t src_stride, int64_t units) {
  for (int64_t u = 0; u < units; ++u) {
    std::memcpy(dst + u * dst_stride, src + u * src_stride, 32);
  }
}

inline void copy_units(char* dst, int64_t dst_stride, const char* src,
                       int64_t src_stride, int64_t units, int64_t unit_bytes) {
  if (unit_bytes == 32) {
    copy_units_32(dst, dst_stride, src, src_stride, units);
    return;
  }
  for (int64_t u = 0; u < units; ++u) {
    std::memcpy(dst + u * dst_stride, src + u * src_stride, unit_bytes);
  }
}

// From a side of runs to a side of units.
inline void scatter_row(char* dst, const char* src, const RowShape& row) {
  for (int64_t h = 0; h < row.heads; ++h) {
    copy_units(dst + h * row.unit_head_stride, row.unit_stride,
               src + h * row.run_head_stride, row.unit_bytes, row.units,
               row.unit_bytes);
  }
}

// From a side of units to a side of runs.
inline void gather_row(char* dst, const char* src, const RowShape& row) {
  for (int64_t h = 0; h < row.heads; ++h) {
    copy_units(dst + h * row.run_head_stride, row.unit_bytes,
               src + h * row.unit_head_stride, row.unit_stride, row.units,
               row.unit_bytes);
  }
}

}  // namespace pacache::cpu
