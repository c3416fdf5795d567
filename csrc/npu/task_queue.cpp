#include "task_queue.h"

#include "torch_npu/csrc/core/npu/NPUGraphsUtils.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace pacache::npu {

void* current_stream(const c10::Device& device) {
  // stream() without `false` would wait until the queue is empty.
  return c10_npu::getCurrentNPUStream(device.index()).stream(false);
}

bool is_capturing(void* stream) {
  return c10_npu::isStreamCapturingMayInitCtx(stream);
}

void enqueue(const std::string& name, const std::function<int()>& launch) {
  at_npu::native::OpCommand::RunOpApiV2(name, launch);
}

void synchronize_device() { c10_npu::npuSynchronizeDevice(); }

}  // namespace pacache::npu
