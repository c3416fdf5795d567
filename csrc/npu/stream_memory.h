// Tensors that all calls on one stream share, whichever thread makes them.

#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <mutex>
#include <utility>

namespace pacache::npu {

// One tensor per device and stream. A call holds the tensor that it was given
// until its work is queued: a call that needs more may replace it meanwhile,
// and memory that nobody holds goes to whoever queues next. A StreamMemory is
// never destroyed: at the end of the process the allocator may be gone.
class StreamMemory {
 public:
  // The stream's tensor if it has as many elements, else undefined.
  at::Tensor find(const c10::Device& device, void* stream, int64_t elements) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kept_.find({device.index(), stream});
    return found != kept_.end() && found->second.numel() >= elements
               ? found->second
               : at::Tensor();
  }

  // From now on this is the stream's, unless it has a greater one. Gives what
  // it replaces, if anything.
  at::Tensor keep(const c10::Device& device, void* stream,
                  const at::Tensor& made) {
    const std::lock_guard<std::mutex> lock(mutex_);
    at::Tensor& kept = kept_[{device.index(), stream}];
    return !kept.defined() || kept.numel() < made.numel()
               ? std::exchange(kept, made)
               : at::Tensor();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, void*>, at::Tensor> kept_;
};

}  // namespace pacache::npu
