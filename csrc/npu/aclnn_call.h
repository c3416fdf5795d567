// The two-phase call of an aclnn operator.

#pragma once

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <string>

#include "acl_handles.h"

namespace pacache::npu {

// The functions of one operator, looked up once per process.
struct AclnnFunctions {
  std::string function;  // phase two's name, "aclnnScatterPaKvCache"
  void* phase_one = nullptr;
  void* phase_two = nullptr;

  // RuntimeError, in the name of an operator of ours, when one is missing.
  static AclnnFunctions look_up(const char* op, const char* function,
                                const char* phase_one_name, const char* since);
};

// One call: its arguments in the function's order, then run(). Arguments are
// descriptions only; CANN's handles are made from them if phase one is needed.
// Names and texts must be literals, that of the operator of ours too, which is
// for error texts.
class AclnnCall {
 public:
  // Calls the operator's first phase with the call's arguments.
  using PhaseOne = int (*)(const AclnnCall&, uint64_t* workspace_size,
                           aclOpExecutor** executor);

  AclnnCall(const char* op, const AclnnFunctions& functions)
      : op_(op), functions_(functions) {}

  AclnnCall& tensor(const char* name, TensorDescriptor descriptor);
  AclnnCall& text(const char* name, const char* value);  // or null
  AclnnCall& ints(const char* name, at::IntArrayRef values);
  AclnnCall& number(const char* name, int64_t value);

  // The i-th tensor, integer array, text or number, for phase one; CANN takes
  // texts that it does not change as char*.
  aclTensor* tensor_handle(size_t i) const { return tensor_handles_[i].get(); }
  aclIntArray* array_handle(size_t i) const { return array_handles_[i].get(); }
  char* text_value(size_t i) const {
    return const_cast<char*>(texts_[i].value);
  }
  int64_t number_value(size_t i) const { return numbers_[i].value; }

  // Runs on the current stream of `device`, which must be the current device:
  // takes the executor from CANN's cache or calls phase_one, then phase two.
  // Phase two is queued; with TASK_QUEUE_ENABLE=2 phase one is, too, as
  // torch_npu does it. Nothing waits for the device.
  //
  // The queued closure does not hold the tensors: like the operators of
  // torch_npu it relies on the allocator, which gives a freed block away only
  // behind what was queued before on the block's stream. (A closure with the
  // last reference would call the allocator from the queue's thread, while an
  // allocation that runs out of memory waits for that queue: a deadlock.)
  static void run(std::shared_ptr<AclnnCall> call, const c10::Device& device,
                  PhaseOne phase_one);

  std::string describe() const;

 private:
  struct NamedDescriptor {
    const char* name;
    TensorDescriptor descriptor;
  };
  struct NamedText {
    const char* name;
    const char* value;
  };
  struct NamedInts {
    const char* name;
    c10::SmallVector<int64_t, 2> values;
  };

  struct NamedNumber {
    const char* name;
    int64_t value;
  };

  void make_handles();
  void release();
  void prepare(const c10::Device& device, void* stream, PhaseOne phase_one);
  int launch(void* workspace, void* stream);

  const char* op_;
  const AclnnFunctions& functions_;
  c10::SmallVector<NamedDescriptor, 8> tensors_;
  c10::SmallVector<NamedText, 2> texts_;
  c10::SmallVector<NamedInts, 2> ints_;
  c10::SmallVector<NamedNumber, 1> numbers_;
  c10::SmallVector<TensorHandle, 8> tensor_handles_;
  c10::SmallVector<IntArrayHandle, 2> array_handles_;

  // What prepare() has found out for launch().
  ExecutorHandle executor_;
  uint64_t workspace_size_ = 0;
  bool first_use_ = false;
};

}  // namespace pacache::npu
