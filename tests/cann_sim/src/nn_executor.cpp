#include "nn_executor.h"

#include "acl_codes.h"
#include "journal.h"
#include "memory.h"
#include "settings.h"

namespace cann_sim {

Plan::Plan(const char* op, uint64_t* workspace_bytes, aclOpExecutor** executor,
           void* caller)
    : op_(op),
      workspace_out_(workspace_bytes),
      executor_out_(executor),
      caller_(caller) {
  std::string api = op_ + "GetWorkspaceSize";
  early_ = enter(api);
  spin(settings().phase1_us);
  if (!early_ && (!workspace_bytes || !executor)) early_ = kAclnnNullptr;
  if (early_) write_trace(early_);
}

void Plan::note(const char* name, const std::string& json) {
  std::string field = std::string(", \"") + name + "\": ";
  signature_ += field + json;
  trace_ += field + json;
}

int Plan::tensor(const char* name, const aclTensor* tensor) {
  if (!tensor) {
    note(name, "null");
    return -1;
  }
  if (!handle_live("aclTensor", tensor, op_ + "GetWorkspaceSize")) {
    handles_ok_ = false;
    return -1;
  }
  std::string field = std::string(", \"") + name + "\": ";
  signature_ += field + tensor_json(tensor->info, false);
  trace_ += field + tensor_json(tensor->info, true);
  tensors_.push_back(tensor->info);
  tensors_.back().name = name;
  handles_.push_back(tensor);
  return static_cast<int>(tensors_.size()) - 1;
}

int Plan::tensors(const char* name, const aclTensorList* list) {
  if (!list || !handle_live("aclTensorList", list, op_)) {
    handles_ok_ = handles_ok_ && !list;
    return -1;
  }
  int first = static_cast<int>(tensors_.size());
  for (size_t i = 0; i < list->items.size(); ++i) {
    tensor((std::string(name) + std::to_string(i)).c_str(), list->items[i]);
  }
  return first;
}

void Plan::scalar(const char* name, const aclScalar* scalar) {
  if (scalar && !handle_live("aclScalar", scalar, op_)) {
    handles_ok_ = false;
    return;
  }
  note(name, scalar ? format("%.17g", scalar->info.real) : "null");
}

void Plan::ints(const char* name, const aclIntArray* array) {
  if (array && !handle_live("aclIntArray", array, op_)) {
    handles_ok_ = false;
    return;
  }
  note(name, array ? numbers_json(array->values) : "null");
}

void Plan::text(const char* name, const char* text) {
  note(name, text ? quoted(text) : "null");
}

void Plan::number(const char* name, double value) {
  note(name, format("%.17g", value));
}

void Plan::write_trace(int code) {
  if (!tracing()) return;
  trace("\"api\": \"" + op_ +
        "GetWorkspaceSize\", \"code\": " + std::to_string(code) +
        ", \"module\": " + quoted(module_of(caller_)) + trace_);
}

int Plan::refuse(int code, const std::string& reason) {
  set_error("cann_sim: " + op_ + ": " + reason);
  write_trace(code);
  return code;
}

int Plan::accept(Kernel kernel, uint64_t workspace_bytes) {
  if (!handles_ok_) return refuse(kAclnnInvalid, "a handle is not alive");
  aclOpExecutor* executor = new aclOpExecutor;
  executor->op = op_;
  executor->kernel = std::move(kernel);
  executor->tensors = std::move(tensors_);
  executor->handles = std::move(handles_);
  executor->workspace_bytes = workspace_bytes;
  executor->device = current_device();
  executor->phase2_code = phase2_code_;
  executor->entry = cache_phase_one(op_, signature_);
  if (executor->entry) {
    executor->entry->kernel = executor->kernel;
    executor->entry->tensors = executor->tensors;
    executor->entry->workspace_bytes = workspace_bytes;
  }
  handle_created("aclOpExecutor", executor, caller_);
  *workspace_out_ = workspace_bytes;
  *executor_out_ = executor;
  write_trace(kOk);
  return kOk;
}

namespace {

void consume(aclOpExecutor* executor, const char* op) {
  if (executor->repeatable) return;
  handle_retired("aclOpExecutor", executor, op,
                 [executor] { delete executor; });
}

bool executor_usable(aclOpExecutor* executor, const char* op) {
  switch (handle_state("aclOpExecutor", executor)) {
    case HandleState::kLive:
      break;
    case HandleState::kRetired:
      violation("executor_reuse", op,
                "executor " + hex(executor) +
                    " was used before and is not repeatable");
      return false;
    case HandleState::kUnknown:
      violation("bad_handle", op, hex(executor) + " is no executor");
      return false;
  }
  if (executor->op == op) return true;
  violation("bad_handle", op, "the executor was made for " + executor->op);
  return false;
}

}  // namespace

int run_executor(const char* op, void* workspace, uint64_t workspace_bytes,
                 aclOpExecutor* executor, void* stream_handle) {
  int injected = enter(op);
  spin(settings().phase2_us);
  if (!executor) return kAclnnNullptr;
  if (!executor_usable(executor, op)) return kAclnnInner;
  auto finish = [&](int code) {
    if (tracing()) {
      Stream* s = handle_known("stream", stream_handle)
                      ? static_cast<Stream*>(stream_handle)
                      : nullptr;
      trace(format(
          "\"api\": \"%s\", \"code\": %d, \"stream\": %d, "
          "\"workspace\": \"%s\", \"workspace_bytes\": %llu, "
          "\"cached\": %s",
          op, code, s ? stream_number(s) : -1, hex(workspace).c_str(),
          static_cast<unsigned long long>(workspace_bytes),
          executor->handles.empty() && executor->entry ? "true" : "false"));
    }
    consume(executor, op);
    return code;
  };
  if (injected) return finish(injected);
  if (executor->phase2_code) return finish(executor->phase2_code);
  if (workspace_bytes > 0 && !workspace) return finish(kAclnnNullptr);
  if (workspace_bytes < executor->workspace_bytes) {
    violation(
        "workspace_small", op,
        format("%llu bytes given, %llu asked for",
               static_cast<unsigned long long>(workspace_bytes),
               static_cast<unsigned long long>(executor->workspace_bytes)));
    return finish(kAclnnInner);
  }
  for (const aclTensor* handle : executor->handles) {
    if (!handle_live("aclTensor", handle, op)) return finish(kAclnnInner);
  }
  Stream* stream = find_stream(stream_handle, op);
  if (!stream) return finish(kAclnnRuntime);
  if (stream_device(stream) != executor->device) {
    violation("wrong_device", op,
              format("phase one on device %d, stream of device %d",
                     executor->device, stream_device(stream)));
  }
  Kernel kernel = executor->kernel;
  std::vector<TensorInfo> tensors = executor->tensors;
  uint64_t needed = executor->workspace_bytes;
  enqueue(stream, op, [=](const Run& run) {
    if (needed &&
        !host_view(workspace, needed, Access::kWrite, run, "workspace")) {
      return;
    }
    kernel(Call{run, tensors, workspace, needed});
  });
  if (executor->entry) executor->entry->usable = true;
  return finish(kOk);
}

}  // namespace cann_sim

using namespace cann_sim;

CANN_SIM_EXPORT int aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  CANN_SIM_ENTER(aclSetAclOpExecutorRepeatable);
  if (!executor) return kAclnnNullptr;
  if (!handle_live("aclOpExecutor", executor,
                   "aclSetAclOpExecutorRepeatable")) {
    return kAclnnInvalid;
  }
  executor->repeatable = true;
  executor->handles.clear();
  return kOk;
}

CANN_SIM_EXPORT int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  int injected = enter("aclDestroyAclOpExecutor");
  bool fine =
      handle_retired("aclOpExecutor", executor, "aclDestroyAclOpExecutor",
                     [executor] { delete executor; });
  return fine ? injected : kAclnnInvalid;
}

namespace {

int set_address(const char* api, aclOpExecutor* executor, size_t index,
                void* address) {
  if (!handle_live("aclOpExecutor", executor, api)) return kAclnnInvalid;
  if (index >= executor->tensors.size()) return kAclnnInvalid;
  executor->tensors[index].data = address;
  return kOk;
}

}  // namespace

// The index counts all tensors of the call in argument order.
CANN_SIM_EXPORT int aclSetTensorAddr(aclOpExecutor* executor, size_t index,
                                     aclTensor*, void* address) {
  CANN_SIM_ENTER(aclSetTensorAddr);
  return set_address("aclSetTensorAddr", executor, index, address);
}
CANN_SIM_EXPORT int aclSetInputTensorAddr(aclOpExecutor* executor, size_t index,
                                          aclTensor*, void* address) {
  CANN_SIM_ENTER(aclSetInputTensorAddr);
  return set_address("aclSetInputTensorAddr", executor, index, address);
}

CANN_SIM_EXPORT int InitHugeMemThreadLocal(void*, bool) {
  CANN_SIM_ENTER(InitHugeMemThreadLocal);
  return kOk;
}
CANN_SIM_EXPORT void UnInitHugeMemThreadLocal(void*, bool) {
  enter("UnInitHugeMemThreadLocal");
}
CANN_SIM_EXPORT void ReleaseHugeMem(void*, bool) { enter("ReleaseHugeMem"); }
