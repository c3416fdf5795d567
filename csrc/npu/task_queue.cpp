#include "task_queue.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "torch_npu/csrc/core/npu/NPUGraphsUtils.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/core/npu/sys_ctrl/npu_sys_ctrl.h"
#include "torch_npu/csrc/framework/OpCommand.h"

// Of torch_npu; the header that declares it includes others that are not
// installed. Weak: an older torch_npu does not have it.
__attribute__((weak)) uint32_t OpApiGetTaskQueueEnable();

namespace pacache::npu {
namespace {

// The text of our last call that failed on a queue's thread, per device, until
// a later one of ours runs there.
class Failures {
 public:
  void remember(int device, std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_[device] = std::move(text);
    any_ = true;
  }
  void forget(int device) {
    if (any_) {
      const std::lock_guard<std::mutex> lock(mutex_);
      texts_.erase(device);
      any_ = !texts_.empty();
    }
  }
  std::string of(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = texts_.find(device);
    return found == texts_.end() ? std::string() : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::string> texts_;
  std::atomic<bool> any_{false};
};

Failures& failures() {
  static auto* all = new Failures;  // the queue's thread outlives statics
  return *all;
}

std::string text_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours == nullptr ? error.what() : ours->what_without_backtrace();
}

// One call on its way through the queue. The queue copies its closures, which
// share this.
struct Ticket {
  Ticket(int device, std::function<int()> launch)
      : device(device), launch(std::move(launch)) {}

  int device;
  std::function<int()> launch;
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> started{false};
};

// What the queue runs. Called at once by the caller's thread, an exception is
// the caller's; on the queue's thread, torch_npu logs its text and drops it,
// so that it is kept here.
int run(Ticket& ticket) {
  ticket.started = true;
  if (std::this_thread::get_id() == ticket.caller) {
    return ticket.launch();
  }
  std::string text;
  try {
    const int status = ticket.launch();
    failures().forget(ticket.device);
    return status;
  } catch (const std::exception& error) {
    text = text_of(error);
  }
  failures().remember(ticket.device, text);
  throw std::runtime_error(text);
}

// Has the queue thrown the closure away? Only then is ours the last ticket of
// one that did not start.
bool was_dropped(const std::shared_ptr<Ticket>& ticket) {
  if (ticket.use_count() != 1) {
    return false;
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return !ticket->started;
}

bool forked = false;

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  forked = c10_npu::NpuSysCtrl::GetInstance().GetInitFlag();
});

}  // namespace

bool forked_in_use() { return forked; }

void require_not_forked(const char* op) {
  TORCH_CHECK(!forked, op,
              ": npu tensors cannot be used in a process that was forked when "
              "the NPU was already in use; start it with the spawn method "
              "(torch.multiprocessing.get_context('spawn')), or use the NPU "
              "for the first time in the child");
}

void* current_stream(const c10::Device& device) {
  // stream() without `false` would wait until the queue is empty.
  return c10_npu::getCurrentNPUStream(device.index()).stream(false);
}

bool phase_one_is_queued() {
  return OpApiGetTaskQueueEnable != nullptr && OpApiGetTaskQueueEnable() == 2;
}

bool is_capturing(void* stream) {
  return c10_npu::isStreamCapturingMayInitCtx(stream);
}

void enqueue(const char* op, const std::string& function,
             const c10::Device& device, std::function<int()> launch) {
  const auto ticket =
      std::make_shared<Ticket>(device.index(), std::move(launch));
  try {
    at_npu::native::OpCommand::RunOpApiV2(
        function, [ticket]() -> int { return run(*ticket); });
  } catch (const std::exception& error) {
    const std::string earlier = failures().of(device.index());
    if (earlier.empty()) {
      throw;  // our own, from a call that was run at once, or another
              // operator's
    }
    TORCH_CHECK(false, earlier, "; raised at a call of ", op,
                ", since calls are queued (ASCEND_LAUNCH_BLOCKING=1 raises "
                "where they are made); torch_npu says: ",
                text_of(error));
  }
  if (was_dropped(ticket)) {
    const std::string earlier = failures().of(device.index());
    TORCH_CHECK(false, op, ": ", function, " was not run: the task queue of ",
                device,
                " stopped at an earlier error, and torch_npu drops what is "
                "queued after it until the process ends; that error: ",
                earlier.empty() ? "of another operator, see the log" : earlier);
  }
}

void synchronize_device() { c10_npu::npuSynchronizeDevice(); }

}  // namespace pacache::npu
