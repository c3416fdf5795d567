#include "workspace.h"

#include <ATen/ops/empty.h>

#include <map>
#include <utility>

#include "task_queue.h"
#include "torch_npu/csrc/core/npu/NPUWorkspaceAllocator.h"

namespace pacache::npu {
namespace {

at::Tensor allocate(uint64_t size, const at::Device& device) {
  return at::empty({static_cast<int64_t>(size)},
                   at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

void* workspace(uint64_t size, const at::Device& device, void* stream) {
  if (size == 0) {
    return nullptr;
  }
  if (is_capturing(stream)) {
    // Freed at once as far as the allocator is concerned: within the capture
    // its reuse is ordered by the stream, and the pool belongs to the graph.
    return allocate(size, device).data_ptr();
  }
  // Per thread, so that nothing is locked. The map is never destroyed: at
  // thread exit the allocator may be gone already.
  thread_local auto* kept = new std::map<std::pair<int, void*>, at::Tensor>();
  at::Tensor& tensor = (*kept)[{device.index(), stream}];
  if (!tensor.defined() || static_cast<uint64_t>(tensor.numel()) < size) {
    tensor = allocate(size, device);
  }
  return tensor.data_ptr();
}

at::Tensor workspace_on_queue(uint64_t size, void* stream) {
  return at_npu::native::allocate_workspace(size, stream);
}

}  // namespace pacache::npu
