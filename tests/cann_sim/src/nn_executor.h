// libnnopbase: the two phases of an aclnn call.
//
// Phase one (a Plan) checks its arguments and leaves an executor: the kernel
// as a closure, the tensor descriptors in argument order, the workspace size.
// Phase two puts the kernel on a stream. An executor is consumed by phase two
// unless it was made repeatable; one from the PTA cache is a single-use ticket
// for an entry that stays.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nn_objects.h"
#include "stream.h"

namespace cann_sim {

// What a kernel gets when it runs on its stream.
struct Call {
  const Run& run;
  const std::vector<TensorInfo>& tensors;
  void* workspace;
  uint64_t workspace_bytes;
};

using Kernel = std::function<void(const Call&)>;

struct CacheEntry;

}  // namespace cann_sim

struct aclOpExecutor {
  std::string op;
  cann_sim::Kernel kernel;
  std::vector<cann_sim::TensorInfo> tensors;
  // Handles that must still be alive in phase two; empty for a cached one.
  std::vector<const aclTensor*> handles;
  uint64_t workspace_bytes = 0;
  bool repeatable = false;
  int device = 0;
  int phase2_code = 0;
  std::shared_ptr<cann_sim::CacheEntry> entry;
};

namespace cann_sim {

class Plan {
 public:
  Plan(const char* op, uint64_t* workspace_bytes, aclOpExecutor** executor,
       void* caller);

  // Result of an injected failure or of null output pointers; 0 to go on.
  int early() const { return early_; }

  // Registers an argument and returns its number in Call::tensors, -1 for
  // null. Call in argument order: the PTA cache refreshes addresses by it.
  int tensor(const char* name, const aclTensor* tensor);
  int tensors(const char* name, const aclTensorList* list);
  void scalar(const char* name, const aclScalar* scalar);
  void ints(const char* name, const aclIntArray* array);
  void text(const char* name, const char* text);
  void number(const char* name, double value);

  const TensorInfo& info(int index) const { return tensors_[index]; }

  // False after a handle that was not alive: its violation is recorded.
  bool handles_ok() const { return handles_ok_; }

  // Phase two will fail with code, as when a kernel is missing.
  void fail_in_phase2(int code) { phase2_code_ = code; }

  // Ends phase one with a refusal and its reason, or with an executor.
  int refuse(int code, const std::string& reason);
  int accept(Kernel kernel, uint64_t workspace_bytes = 0);

 private:
  void note(const char* name, const std::string& json);
  void write_trace(int code);

  std::string op_;
  uint64_t* workspace_out_;
  aclOpExecutor** executor_out_;
  void* caller_;
  int early_ = 0;
  bool handles_ok_ = true;
  int phase2_code_ = 0;
  std::vector<TensorInfo> tensors_;
  std::vector<const aclTensor*> handles_;
  std::string signature_;  // all arguments without addresses
  std::string trace_;      // all arguments
};

// Phase two of every operator.
int run_executor(const char* op, void* workspace, uint64_t workspace_bytes,
                 aclOpExecutor* executor, void* stream);

// ---- PTA executor cache (nn_cache.cpp) ------------------------------------

struct CacheEntry {
  std::string op;
  std::string signature;
  Kernel kernel;
  std::vector<TensorInfo> tensors;
  uint64_t workspace_bytes = 0;
  std::atomic<bool> usable{false};  // set once phase two ran
};

// Called by phase one: a new entry when this thread has a cache key set, null
// otherwise. Records a collision when the key stands for another signature.
std::shared_ptr<CacheEntry> cache_phase_one(const std::string& op,
                                            const std::string& signature);

}  // namespace cann_sim

// Phase two of an operator, and the opening of its phase one. Phase one is
// written as
//   CANN_SIM_EXPORT int aclnnFooGetWorkspaceSize(..., uint64_t*
//       workspace_bytes, aclOpExecutor** executor) { ACLNN_PHASE1(aclnnFoo);
// and has a Plan named plan from there on.
#define ACLNN_PHASE1(op)                                \
  ::cann_sim::Plan plan(#op, workspace_bytes, executor, \
                        __builtin_return_address(0));   \
  if (plan.early()) return plan.early()

#define ACLNN_PHASE2(op)                                                       \
  CANN_SIM_EXPORT int op(void* workspace, uint64_t workspace_bytes,            \
                         aclOpExecutor* executor, void* stream) {              \
    return ::cann_sim::run_executor(#op, workspace, workspace_bytes, executor, \
                                    stream);                                   \
  }
