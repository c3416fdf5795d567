// at::parallel_for for the drivers of this folder, in place of ATen's.
//
// ATen's runs on libgomp, which ThreadSanitizer cannot see into (every
// hand-over of work would be a race to it), and whose number of threads a
// fuzzer cannot draw. This one divides the work as ATen's does and runs the
// shares on threads of its own, or one after the other, the last first.

#pragma once

#include_next <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace pacache::testing {

struct Division {
  int64_t shares = 1;  // at most
  bool on_threads = false;
};

// Of the calls that this thread makes.
inline Division& division() {
  static thread_local Division division;
  return division;
}

}  // namespace pacache::testing

namespace at {

template <typename F>
void parallel_for_in_shares(int64_t begin, int64_t end, int64_t grain,
                            const F& f) {
  const auto [most, on_threads] = pacache::testing::division();
  const int64_t count = end - begin;
  const int64_t shares =
      std::min(most, grain > 0 ? (count + grain - 1) / grain : count);
  if (shares <= 1) {
    f(begin, end);
    return;
  }
  const int64_t size = (count + shares - 1) / shares;
  std::vector<std::thread> threads;
  for (int64_t i = shares - 1; i >= 0; --i) {
    const int64_t first = begin + i * size;
    const int64_t last = std::min(end, first + size);
    if (first >= last) {
      continue;
    }
    if (on_threads) {
      threads.emplace_back([&f, first, last] { f(first, last); });
    } else {
      f(first, last);
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace at

#define parallel_for parallel_for_in_shares
