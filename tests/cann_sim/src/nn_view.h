// libnnopbase: tensors as kernels see them.
//
// A View is a described tensor with its memory checked. A kernel that cannot
// get one of its views does nothing: the violation is recorded, the output
// keeps what it had.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"
#include "nn_executor.h"

namespace cann_sim {

struct View {
  TensorInfo info;
  // Host address of the view's first element; null when the check failed or
  // the tensor is empty.
  uint8_t* base = nullptr;
  bool ok = true;
};

// Checks the byte range that the view spans and tells the race detector
// about its contiguous runs.
View open_view(const Call& call, int index, Access access,
               const std::string& name);

// Calls visit(byte offset) for every element in row-major order. Strides are
// in elements; 0 repeats.
template <typename Visit>
void for_each_offset(const std::vector<int64_t>& dims,
                     const std::vector<int64_t>& strides, int64_t itemsize,
                     Visit visit) {
  size_t rank = dims.size();
  for (int64_t d : dims) {
    if (d == 0) return;
  }
  std::vector<int64_t> position(rank, 0);
  int64_t offset = 0;
  while (true) {
    visit(offset * itemsize);
    size_t axis = rank;
    while (axis-- > 0) {
      offset += strides[axis];
      if (++position[axis] < dims[axis]) break;
      offset -= strides[axis] * dims[axis];
      position[axis] = 0;
    }
    if (axis == static_cast<size_t>(-1)) return;
  }
}

// The view repeated to dims by the broadcasting rule. False when it does not
// fit.
bool expand(const View& view, const std::vector<int64_t>& dims, View* out);

// The view with axis `axis` moved to the end.
View axis_last(View view, int64_t axis);

// Elements in row-major order, as double or exactly as integer.
std::vector<double> read_reals(const View& view);
std::vector<int64_t> read_integers(const View& view);
void write_reals(const View& view, const std::vector<double>& values);
void write_integers(const View& view, const std::vector<int64_t>& values);

// Elements of either kind.
template <typename T>
std::vector<T> read_values(const View& view);
template <>
inline std::vector<double> read_values(const View& view) {
  return read_reals(view);
}
template <>
inline std::vector<int64_t> read_values(const View& view) {
  return read_integers(view);
}
inline void write_values(const View& view, const std::vector<double>& v) {
  write_reals(view, v);
}
inline void write_values(const View& view, const std::vector<int64_t>& v) {
  write_integers(view, v);
}

// Copies with dtype conversion; both in row-major order of equal numel.
void copy_view(const View& to, const View& from);

// A tensor as a raw kernel sees it: bytes from the first element on, with no
// regard to strides. at() checks every access and records the first one that
// leaves the limit or the allocation. Neighbouring accesses reach the race
// detector as one, at the latest when the Region goes.
class Region {
 public:
  // limit: bytes behind the first element that belong to the tensor; -1 lets
  // the allocation be the only limit.
  Region(const Call& call, int index, Access access, std::string name,
         int64_t limit);
  ~Region() { flush(); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* at(int64_t offset, int64_t bytes);
  bool failed() const { return failed_; }

 private:
  void flush();

  const Call& call_;
  Access access_;
  std::string name_;
  char* first_ = nullptr;
  int64_t limit_;
  // Host address of the whole tensor, when all of it is alive.
  uint8_t* whole_ = nullptr;
  int64_t pending_begin_ = 0;
  int64_t pending_end_ = 0;
  bool failed_ = false;
};

int64_t product(const std::vector<int64_t>& numbers);

}  // namespace cann_sim
