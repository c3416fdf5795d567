#include "atb_context.h"

#include <c10/core/DeviceGuard.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "call_error.h"
#include "cann_library.h"
#include "task_queue.h"

namespace pacache::npu {
namespace {

constexpr const char* kOp = "paged_cache_load";
constexpr const char* kSince = "8.3.RC1";
constexpr const char* kPhaseOne = "AtbPagedCacheLoadGetWorkspaceSize";
constexpr const char* kPhaseTwo = "AtbPagedCacheLoad";
// The C++ functions, mangled; they carry no ABI tag, so both builds of ATB
// have them under these names.
constexpr const char* kCreateContext = "_ZN3atb13CreateContextEPPNS_7ContextE";
constexpr const char* kDestroyContext = "_ZN3atb14DestroyContextEPNS_7ContextE";
constexpr const char* kDestroyOperation =
    "_ZN3atb16DestroyOperationEPNS_9OperationE";

using OperationKey = std::tuple<int, int8_t, bool>;

c10::Device npu(int index) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

// What a thread has made, given back at the thread's end or by release_all().
class ThreadState {
 public:
  ThreadState();
  ~ThreadState();
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;

  // With the devices idle. The destructor sees to that.
  void release();

  std::map<int, atb::Context*> contexts;
  std::map<OperationKey, atb::Operation*> operations;
};

// A state is used by its own thread only, until release_all().
struct Registry {
  std::mutex mutex;
  std::set<ThreadState*> states;
};

Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

ThreadState::ThreadState() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().states.insert(this);
}

void ThreadState::release() {
  for (auto& [key, operation] : operations) {
    const c10::DeviceGuard guard(npu(std::get<0>(key)));
    drop_operation(&operation);
  }
  for (auto& [device, context] : contexts) {
    const c10::DeviceGuard guard(npu(device));
    if (context != nullptr) {
      atb_functions(kOp).destroy_context(context);
      context = nullptr;
    }
  }
}

// Kernels that the thread has launched may still read the context's memory.
// Not by torch_npu's synchronisation: it waits for the task queue, whose
// thread this may be. A device that cannot be waited for keeps what it has.
ThreadState::~ThreadState() {
  if (forked_in_use()) {
    return;  // the parent's
  }
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    if (registry().states.erase(this) == 0) {
      return;  // release_all() was here
    }
  }
  try {
    using Synchronize = int (*)();
    const auto synchronize =
        reinterpret_cast<Synchronize>(find_runtime("aclrtSynchronizeDevice"));
    for (const auto& [device, context] : contexts) {
      const c10::DeviceGuard guard(npu(device));
      if (synchronize == nullptr || synchronize() != 0) {
        return;
      }
    }
    release();
  } catch (const std::exception&) {
    // At the end of a thread nobody is there to be told.
  }
}

ThreadState& my_state() {
  thread_local ThreadState state;
  return state;
}

}  // namespace

const AtbFunctions& atb_functions(const char* op) {
  static const AtbFunctions found = {
      require_atb<AtbPhaseOne>(op, kPhaseOne, kSince),
      require_atb<AtbPhaseTwo>(op, kPhaseTwo, kSince),
      require_atb<int32_t (*)(atb::Context**)>(op, kCreateContext, kSince),
      require_atb<int32_t (*)(atb::Context*)>(op, kDestroyContext, kSince),
      require_atb<int32_t (*)(atb::Operation*)>(op, kDestroyOperation, kSince),
  };
  return found;
}

bool atb_available() {
  static const bool available = [] {
    for (const char* name : {kPhaseOne, kPhaseTwo, kCreateContext,
                             kDestroyContext, kDestroyOperation}) {
      if (find_atb(name) == nullptr) {
        return false;
      }
    }
    return true;
  }();
  return available;
}

atb::Context* atb_context(const char* op, int device) {
  atb::Context*& context = my_state().contexts[device];
  if (context == nullptr) {
    const int32_t status = atb_functions(op).create_context(&context);
    if (status != 0 || context == nullptr) {
      context = nullptr;
      throw_atb(op, "atb::CreateContext", status,
                "device " + std::to_string(device));
    }
  }
  return context;
}

atb::Operation** atb_operation(int device, int8_t kv_cache_cfg, bool cumsum) {
  return &my_state().operations[{device, kv_cache_cfg, cumsum}];
}

void drop_operation(atb::Operation** operation) {
  if (*operation != nullptr) {
    atb_functions(kOp).destroy_operation(*operation);
    *operation = nullptr;
  }
}

void release_all() {
  if (forked_in_use()) {
    return;  // the parent's
  }
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (ThreadState* state : registry().states) {
    state->release();
  }
  registry().states.clear();
}

}  // namespace pacache::npu
