// How much work is worth a thread, and whose threads do it?

#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

namespace pacache::cpu {

// Below this, handing work to another thread costs more than the copy.
constexpr int64_t kGrainBytes = 64 * 1024;
// And where a thread has to be made for it.
constexpr int64_t kNewThreadBytes = 1024 * 1024;

// Is this the thread of a forked process that called fork()? Then OpenMP's
// other threads may be gone without its knowledge, and it would wait for them
// for ever (libgomp does).
bool came_through_fork();

// ATen sets its pools up in the first call of every thread. In a forked process
// two threads at once do that wrong (the second finds no pool and throws): here
// they take turns.
void set_up_threads();

// Threads that a call may use.
inline int64_t num_threads() {
  set_up_threads();
  return at::get_num_threads();
}

// at::parallel_for with threads of its own, made and joined in the call. Fewer
// if the system gives no more.
void parallel_on_new_threads(int64_t count, int64_t grain,
                             c10::function_ref<void(int64_t, int64_t)> f);

// f(begin, end) over disjoint ranges that cover [0, count); serial, in order,
// when deterministic algorithms are asked for, so that the last of several
// writers to one place is the last in order.
template <typename F>
void parallel_by_bytes(int64_t count, int64_t bytes_each, const F& f) {
  if (count <= 0) {
    return;
  }
  const auto grain = [bytes_each](int64_t bytes) {
    return std::max<int64_t>(1, bytes / std::max<int64_t>(1, bytes_each));
  };
  if (count <= grain(kGrainBytes) ||
      at::globalContext().deterministicAlgorithms()) {
    f(int64_t{0}, count);
  } else if (came_through_fork()) {
    parallel_on_new_threads(count, grain(kNewThreadBytes), f);
  } else {
    set_up_threads();
    at::parallel_for(0, count, grain(kGrainBytes), f);
  }
}

}  // namespace pacache::cpu
