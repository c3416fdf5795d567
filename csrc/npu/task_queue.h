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
// must launch and return, and must not allocate from torch's allocator.
//
// What becomes of an exception, as torch_npu 2.13.0 does it. Run at once: it is
// raised here, and the next call works. On the queue's thread: its text goes to
// stderr, everything queued behind it is thrown away, and the next operator or
// synchronisation raises one RuntimeError that names the function only ("The
// Inner error is reported as above"); from then on the queue drops every
// operator of the process without a word. Two things are made better for our
// calls: when it is one of ours that raises, the text is in the exception; and
// one that would be dropped raises, with the text of the failure if that was
// ours. `op` and `function` are for these texts.
void enqueue(const char* op, const std::string& function,
             const c10::Device& device, std::function<int()> launch);

// Do torch_npu's operators run their first phase on the queue's thread, too?
// (TASK_QUEUE_ENABLE=2)
bool phase_one_is_queued();

// Is this a child of fork(), forked when the NPU was already in use? It has
// neither the thread that runs the queue nor any of CANN's.
bool forked_in_use();

// RuntimeError in such a child, where work would be queued for ever and a
// synchronisation would never end.
void require_not_forked(const char* op);

// Waits until everything on the device is done. Never used by an operator.
void synchronize_device();

}  // namespace pacache::npu
