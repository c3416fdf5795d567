// How does work get onto a stream in its place among torch_npu's operators?

#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>

namespace pacache::npu {

// The current stream of a device, as CANN's handle. Does not wait for what is
// queued.
void* current_stream(const c10::Device& device);

// Is the stream being captured into a graph?
bool is_capturing(void* stream);

// Runs `launch` behind everything that has been queued: on the queue's thread
// (TASK_QUEUE_ENABLE 1 or 2) or at once (0, or ASCEND_LAUNCH_BLOCKING=1). It
// must launch and return, and must not allocate from torch's allocator. An
// exception becomes the queue's error and is raised by a later call or
// synchronisation.
void enqueue(const std::string& name, const std::function<int()>& launch);

// Waits until everything on the device is done. Never used by an operator.
void synchronize_device();

}  // namespace pacache::npu
