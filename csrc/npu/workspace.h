// Device memory that a kernel needs for itself.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pacache::npu {

// At least `size` bytes that every call on this device and stream may use:
// calls on one stream run one after the other. Kept between calls, grown when
// needed; during a graph capture it is new each time and comes from the
// capture's pool, so that it lives as long as the graph. Undefined for size 0.
// To be held until the work that uses it is queued.
at::Tensor workspace(uint64_t size, const at::Device& device, void* stream);

// The same for a size that is known only on the task queue's thread, where
// torch's allocator must not be called: from torch_npu's workspace allocator,
// which may be. The memory stays valid for work on the stream that is queued
// while the tensor lives.
at::Tensor workspace_on_queue(uint64_t size, void* stream);

// Its address, as phase two takes it: null for none.
void* data_of(const at::Tensor& workspace);

}  // namespace pacache::npu
