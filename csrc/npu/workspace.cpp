#include "workspace.h"

#include <ATen/ops/empty.h>

#include "stream_memory.h"
#include "task_queue.h"
#include "torch_npu/csrc/core/npu/NPUWorkspaceAllocator.h"

namespace pacache::npu {
namespace {

at::Tensor allocate(uint64_t size, const at::Device& device) {
  return at::empty({static_cast<int64_t>(size)},
                   at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

at::Tensor workspace(uint64_t size, const at::Device& device, void* stream) {
  if (size == 0) {
    return {};
  }
  if (is_capturing(stream)) {
    // Not kept: within the capture its reuse is ordered by the stream, and the
    // pool belongs to the graph.
    return allocate(size, device);
  }
  static auto* all = new StreamMemory;
  at::Tensor kept = all->find(device, stream, static_cast<int64_t>(size));
  if (!kept.defined()) {
    kept = allocate(size, device);
    all->keep(device, stream, kept);
  }
  return kept;
}

at::Tensor workspace_on_queue(uint64_t size, void* stream) {
  return size == 0 ? at::Tensor()
                   : at_npu::native::allocate_workspace(size, stream);
}

void* data_of(const at::Tensor& workspace) {
  // torch_npu's workspace tensors have memory and no elements, and data_ptr()
  // of such a tensor is null.
  return workspace.defined() ? workspace.storage().mutable_data() : nullptr;
}

}  // namespace pacache::npu
