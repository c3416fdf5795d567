// How much work is worth a thread?

#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>

namespace pacache::cpu {

// Below this, handing work to another thread costs more than the copy.
constexpr int64_t kGrainBytes = 64 * 1024;

// f(begin, end) over disjoint ranges that cover [0, count); serial, in order,
// when deterministic algorithms are asked for, so that the last of several
// writers to one place is the last in order.
template <typename F>
void parallel_by_bytes(int64_t count, int64_t bytes_each, const F& f) {
  if (count <= 0) {
    return;
  }
  const int64_t grain =
      std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes_each));
  if (count <= grain || at::globalContext().deterministicAlgorithms()) {
    f(int64_t{0}, count);
    return;
  }
  at::parallel_for(0, count, grain, f);
}

}  // namespace pacache::cpu
