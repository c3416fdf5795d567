#include "aclnn_call.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ScopeExit.h>

#include "call_error.h"
#include "cann_library.h"
#include "executor_cache.h"
#include "task_queue.h"
#include "workspace.h"

namespace pacache::npu {
namespace {

// Phase one's memory for tensor data on the host ("huge memory"), which some
// releases want set up and taken down around it.
struct HugeMemory {
  using Init = int (*)(void*, bool);
  using Release = void (*)(void*, bool);

  HugeMemory() {
    static const auto init =
        reinterpret_cast<Init>(find_op_api("InitHugeMemThreadLocal"));
    if (init != nullptr) {
      init(nullptr, false);
    }
  }
  ~HugeMemory() {
    static const auto uninit =
        reinterpret_cast<Release>(find_op_api("UnInitHugeMemThreadLocal"));
    if (uninit != nullptr) {
      uninit(nullptr, false);
    }
  }
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;

  // On the launching thread, behind phase two.
  static void release() {
    static const auto release =
        reinterpret_cast<Release>(find_op_api("ReleaseHugeMem"));
    if (release != nullptr) {
      release(nullptr, false);
    }
  }
};

using PhaseTwo = int (*)(void* workspace, uint64_t workspace_size,
                         aclOpExecutor* executor, void* stream);

}  // namespace

AclnnFunctions AclnnFunctions::look_up(const char* op, const char* function,
                                       const char* phase_one_name,
                                       const char* since) {
  return {function, require_op_api<void*>(op, phase_one_name, since),
          require_op_api<void*>(op, function, since)};
}

AclnnCall& AclnnCall::tensor(const char* name, TensorDescriptor descriptor) {
  tensors_.push_back({name, std::move(descriptor)});
  return *this;
}

AclnnCall& AclnnCall::text(const char* name, const char* value) {
  texts_.push_back({name, value});
  return *this;
}

AclnnCall& AclnnCall::ints(const char* name, at::IntArrayRef values) {
  ints_.push_back({name, {values.begin(), values.end()}});
  return *this;
}

AclnnCall& AclnnCall::number(const char* name, int64_t value) {
  numbers_.push_back({name, value});
  return *this;
}

void AclnnCall::make_handles() {
  for (const auto& tensor : tensors_) {
    tensor_handles_.push_back(make_tensor(op_, tensor.descriptor));
  }
  for (const auto& array : ints_) {
    array_handles_.push_back(make_int_array(op_, array.values));
  }
}

void AclnnCall::release() {
  executor_.reset();
  tensor_handles_.clear();
  array_handles_.clear();
}

std::string AclnnCall::describe() const {
  std::ostringstream text;
  const char* separator = "";
  for (const auto& [name, tensor] : tensors_) {
    text << separator << name << " ";
    if (tensor.present) {
      text << acl_dtype_name(tensor.dtype) << " "
           << at::IntArrayRef(tensor.sizes) << " strides "
           << at::IntArrayRef(tensor.strides);
    } else {
      text << "null";
    }
    separator = ", ";
  }
  for (const auto& [name, value] : texts_) {
    text << separator << name << " " << (value == nullptr ? "null" : value);
  }
  for (const auto& [name, values] : ints_) {
    text << separator << name << " " << at::IntArrayRef(values);
  }
  for (const auto& [name, value] : numbers_) {
    text << separator << name << " " << value;
  }
  return text.str();
}

// The executor, on the thread whose executors are to be reused.
void AclnnCall::prepare(const c10::Device& device, void* stream,
                        PhaseOne phase_one) {
  CallKey key(functions_.function.c_str(), device.index(), stream);
  for (const auto& tensor : tensors_) {
    key.add(tensor.descriptor);
  }
  for (const auto& text : texts_) {
    key.add(text.value);
  }
  for (const auto& array : ints_) {
    key.add(at::IntArrayRef(array.values));
  }
  for (const auto& number : numbers_) {
    key.add(number.value);
  }
  ExecutorCache cache(key);
  executor_ = cache.find(&workspace_size_);
  if (executor_ != nullptr) {
    return;
  }
  first_use_ = true;
  HugeMemory memory;
  make_handles();
  aclOpExecutor* made = nullptr;
  const int status = phase_one(*this, &workspace_size_, &made);
  executor_.reset(made);
  if (status != 0) {
    throw_aclnn(op_, (functions_.function + "GetWorkspaceSize").c_str(), status,
                describe());
  }
}

int AclnnCall::launch(void* workspace, void* stream) {
  // Phase two consumes the executor, whatever it returns.
  const int status = reinterpret_cast<PhaseTwo>(functions_.phase_two)(
      workspace, workspace_size_, executor_.release(), stream);
  // On every path, but behind the error's text: CANN's own message is that of
  // the last call.
  const auto finish = c10::make_scope_exit([&] {
    release();
    if (first_use_) {
      HugeMemory::release();
    }
  });
  if (status != 0) {
    throw_aclnn(op_, functions_.function.c_str(), status, describe());
  }
  return status;
}

void AclnnCall::run(std::shared_ptr<AclnnCall> call, const c10::Device& device,
                    PhaseOne phase_one) {
  const char* op = call->op_;
  const std::string& function = call->functions_.function;
  void* stream = current_stream(device);
  // The closures may be copied and outlive their run in the queue's ring, so
  // the call is shared, and what it owns is given back as soon as it has run.
  // If it never runs, its end destroys the handles and the executor.
  if (phase_one_is_queued()) {
    enqueue(op, function, device,
            [call = std::move(call), device, stream, phase_one]() -> int {
              const c10::DeviceGuard guard(device);
              // Also if there is no second phase.
              const auto done = c10::make_scope_exit([&] { call->release(); });
              call->prepare(device, stream, phase_one);
              const at::Tensor held =
                  workspace_on_queue(call->workspace_size_, stream);
              return call->launch(data_of(held), stream);
            });
    return;
  }
  call->prepare(device, stream, phase_one);
  // Held until the call is queued.
  const at::Tensor held = workspace(call->workspace_size_, device, stream);
  enqueue(op, function, device,
          [call = std::move(call), memory = data_of(held), stream]() -> int {
            return call->launch(memory, stream);
          });
}

}  // namespace pacache::npu
