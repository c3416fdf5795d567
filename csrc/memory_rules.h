// Where a tensor's bytes lie: do they stay in their storage, and do two
// tensors share any?

#pragma once

#include <c10/util/SmallVector.h>

#include "tensor_rules.h"

namespace pacache {

// The set of bytes {base + sum_i x_i * step_i + y}, 0 <= x_i < count_i and
// 0 <= y < run. Empty when run is 0.
struct Region {
  struct Dim {
    int64_t step;
    int64_t count;
  };
  const char* name = nullptr;
  int64_t storage_offset = 0;  // in elements, for the error text
  uintptr_t base = 0;
  int64_t run = 0;
  c10::SmallVector<Dim, 5> dims;
};

Region region_of(NamedTensor t);

// The region of a view of t that begins `start` elements behind its first.
Region region_of(NamedTensor t, at::IntArrayRef sizes, at::IntArrayRef strides,
                 int64_t start);

// True when the two sets have a byte in common. Exact for every layout that a
// cache has; an adversarial set of strides that would take too long counts as
// disjoint (it is only a courtesy to the caller, never a bound).
bool regions_overlap(const Region& a, const Region& b);

// ValueError when an element of a non-empty tensor lies outside its storage.
void check_within_storage(const char* op, NamedTensor t);

// ValueError when distinct elements of a tensor share memory (stride 0).
void check_no_self_overlap(const char* op, NamedTensor t);

// Neither two written regions nor a written and a read one may overlap.
void check_disjoint(const char* op, c10::ArrayRef<Region> written,
                    c10::ArrayRef<Region> read);

}  // namespace pacache
