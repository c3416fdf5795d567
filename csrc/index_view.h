// Index tensors (slots, block ids, lengths), read where they lie.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pacache {

// A rank-1 or rank-2 int32 or int64 tensor of any strides. The tensor must
// outlive the view. Rank 1 is addressed as [i]; rank 2 as [row, column].
struct IndexView {
  const void* data = nullptr;
  bool is_int64 = false;
  int64_t rank = 1;
  int64_t size = 0;         // number of elements
  int64_t num_columns = 1;  // rank 2 only
  int64_t stride_row = 0;   // rank 1: the only stride
  int64_t stride_column = 0;

  IndexView() = default;

  explicit IndexView(const at::Tensor& t)
      : data(t.const_data_ptr()),
        is_int64(t.scalar_type() == at::kLong),
        rank(t.dim()),
        size(t.numel()) {
    stride_row = t.stride(0);
    if (rank == 2) {
      num_columns = t.size(1);
      stride_column = t.stride(1);
    }
  }

  int64_t at_offset(int64_t offset) const {
    return is_int64 ? static_cast<const int64_t*>(data)[offset]
                    : static_cast<const int32_t*>(data)[offset];
  }

  int64_t at(int64_t row, int64_t column) const {
    return at_offset(row * stride_row + column * stride_column);
  }

  // The i-th element in row-major order.
  int64_t operator[](int64_t i) const {
    return rank == 1 ? at_offset(i * stride_row)
                     : at(i / num_columns, i % num_columns);
  }

  // How an error names the i-th element: "3" or "1, 0".
  std::string position(int64_t i) const {
    return rank == 1 ? std::to_string(i)
                     : std::to_string(i / num_columns) + ", " +
                           std::to_string(i % num_columns);
  }
};

}  // namespace pacache
