#include "parallel.h"

#include <pthread.h>

#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace pacache::cpu {
namespace {

thread_local bool forked = false;

// Never destroyed: a thread may outlive the library's other objects.
std::mutex* const setting_up = new std::mutex;

// The child's one thread runs the handler. A thread that held the mutex is not
// in the child to give it back.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  forked = true;
  new (setting_up) std::mutex;
});

}  // namespace

bool came_through_fork() { return forked; }

void set_up_threads() {
  thread_local bool done = false;
  if (!done) {
    const std::lock_guard<std::mutex> turn(*setting_up);
    at::get_num_threads();
    done = true;
  }
}

void parallel_on_new_threads(int64_t count, int64_t grain,
                             c10::function_ref<void(int64_t, int64_t)> f) {
  const int64_t parts =
      std::min<int64_t>(num_threads(), (count + grain - 1) / grain);
  const int64_t each = (count + parts - 1) / parts;
  std::vector<std::thread> others;
  int64_t end = count;  // what lies behind has been handed out
  try {
    while (end > each) {
      const int64_t begin = end - each;
      others.emplace_back([f, begin, end] { f(begin, end); });
      end = begin;
    }
  } catch (const std::system_error&) {
    // No thread to be had: the rest is done here.
  }
  f(0, end);
  for (std::thread& other : others) {
    other.join();
  }
}

}  // namespace pacache::cpu
