#include "memory_rules.h"

#include <algorithm>
#include <numeric>

namespace pacache {
namespace {

// One term x * step of a sum, low <= x <= high.
struct Term {
  int64_t step;
  int64_t low;
  int64_t high;
};

int64_t floor_div(int64_t a, int64_t b) {
  return a / b - ((a % b != 0) && (a < 0));
}

// Does sum_i x_i * step_i equal a target? Terms stand in descending order of
// step, the last has step 1. With nested strides (each at least the reach of
// what is inside it) every level leaves at most two candidates, so the search
// is short; max_steps bounds it for anything else.
class SumSearch {
 public:
  explicit SumSearch(c10::SmallVector<Term, 12> terms)
      : terms_(std::move(terms)),
        low_(terms_.size() + 1, 0),
        high_(terms_.size() + 1, 0),
        gcd_(terms_.size() + 1, 0) {
    for (size_t i = terms_.size(); i-- > 0;) {
      low_[i] = low_[i + 1] + terms_[i].low * terms_[i].step;
      high_[i] = high_[i + 1] + terms_[i].high * terms_[i].step;
      gcd_[i] = std::gcd(gcd_[i + 1], terms_[i].step);
    }
  }

  bool reaches(int64_t target, size_t level = 0) {
    if (target < low_[level] || target > high_[level]) {
      return false;
    }
    if (level == terms_.size()) {
      return target == 0;
    }
    if (target % gcd_[level] != 0) {
      return false;
    }
    const Term& term = terms_[level];
    // target - x * step must stay within what the inner terms reach.
    const int64_t first =
        std::max(term.low, -floor_div(high_[level + 1] - target, term.step));
    const int64_t last =
        std::min(term.high, floor_div(target - low_[level + 1], term.step));
    for (int64_t x = first; x <= last; ++x) {
      if (++steps_ > kMaxSteps) {
        return false;
      }
      if (reaches(target - x * term.step, level + 1)) {
        return true;
      }
    }
    return false;
  }

 private:
  static constexpr int64_t kMaxSteps = 1 << 16;
  c10::SmallVector<Term, 12> terms_;
  c10::SmallVector<int64_t, 13> low_;
  c10::SmallVector<int64_t, 13> high_;
  c10::SmallVector<int64_t, 13> gcd_;
  int64_t steps_ = 0;
};

int64_t reach_of(const Region& region) {
  int64_t reach = region.run;
  for (const auto& dim : region.dims) {
    reach += (dim.count - 1) * dim.step;
  }
  return reach;
}

}  // namespace

Region region_of(NamedTensor t) {
  return region_of(t, t.tensor->sizes(), t.tensor->strides(), 0);
}

Region region_of(NamedTensor t, at::IntArrayRef sizes, at::IntArrayRef strides,
                 int64_t start) {
  const int64_t itemsize = t.tensor->element_size();
  Region region;
  region.name = t.name;
  region.storage_offset = t.tensor->storage_offset() + start;
  region.base = reinterpret_cast<uintptr_t>(t.tensor->const_data_ptr()) +
                start * itemsize;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return region;
  }
  region.run = itemsize;
  // Innermost first, so that dense inner dimensions fold into the run.
  for (size_t dim = sizes.size(); dim-- > 0;) {
    const int64_t count = sizes[dim];
    if (count == 1 || strides[dim] == 0) {
      continue;
    }
    const int64_t step = strides[dim] * itemsize;
    if (region.dims.empty() && step == region.run) {
      region.run *= count;
    } else {
      region.dims.push_back({step, count});
    }
  }
  return region;
}

bool regions_overlap(const Region& a, const Region& b) {
  if (a.run == 0 || b.run == 0 || a.base + reach_of(a) <= b.base ||
      b.base + reach_of(b) <= a.base) {
    return false;
  }
  // a.base + sum x_i a_i + p = b.base + sum y_j b_j + q, as one sum whose
  // terms of equal step are merged.
  c10::SmallVector<Term, 12> terms;
  for (const auto& dim : a.dims) {
    terms.push_back({dim.step, 0, dim.count - 1});
  }
  for (const auto& dim : b.dims) {
    terms.push_back({dim.step, -(dim.count - 1), 0});
  }
  terms.push_back({1, -(b.run - 1), a.run - 1});
  std::sort(terms.begin(), terms.end(),
            [](const Term& x, const Term& y) { return x.step > y.step; });
  c10::SmallVector<Term, 12> merged;
  for (const Term& term : terms) {
    if (!merged.empty() && merged.back().step == term.step) {
      merged.back().low += term.low;
      merged.back().high += term.high;
    } else {
      merged.push_back(term);
    }
  }
  return SumSearch(std::move(merged))
      .reaches(static_cast<int64_t>(b.base - a.base));
}

void check_within_storage(const char* op, NamedTensor t) {
  const at::Tensor& tensor = *t.tensor;
  if (tensor.numel() == 0) {
    return;
  }
  const int64_t capacity =
      static_cast<int64_t>(tensor.storage().nbytes()) / tensor.element_size();
  // The strides are the caller's, so even this sum may overflow.
  bool within = true;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim() && within; ++dim) {
    int64_t reach = 0;
    within = !__builtin_mul_overflow(tensor.size(dim) - 1, tensor.stride(dim),
                                     &reach) &&
             !__builtin_add_overflow(last, reach, &last);
  }
  TORCH_CHECK_VALUE(within && last < capacity, op, ": ", t.name,
                    " must stay within its storage of ", capacity,
                    " elements, got shape ", tensor.sizes(), " and strides ",
                    tensor.strides(), " at offset ", tensor.storage_offset());
}

void check_no_self_overlap(const char* op, NamedTensor t) {
  bool overlaps = false;
  for (int64_t dim = 0; dim < t.tensor->dim(); ++dim) {
    overlaps |= t.tensor->size(dim) > 1 && t.tensor->stride(dim) == 0;
  }
  TORCH_CHECK_VALUE(!overlaps, op, ": ", t.name,
                    " must not overlap itself, got shape ", t.tensor->sizes(),
                    " and strides ", t.tensor->strides());
}

void check_disjoint(const char* op, c10::ArrayRef<Region> written,
                    c10::ArrayRef<Region> read) {
  const auto check = [op](const Region& later, const Region& earlier) {
    TORCH_CHECK_VALUE(!regions_overlap(later, earlier), op, ": ", later.name,
                      " must not share memory with ", earlier.name,
                      ", got storage offsets ", later.storage_offset, " and ",
                      earlier.storage_offset);
  };
  for (size_t i = 0; i < written.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      check(written[i], written[j]);
    }
  }
  for (const Region& input : read) {
    for (const Region& output : written) {
      check(input, output);
    }
  }
}

}  // namespace pacache
