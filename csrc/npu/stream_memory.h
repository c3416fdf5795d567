// Tensors that all calls on one stream share, whichever thread makes them.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

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
  // The stream's tensor if it has as many elements, else a new one from
  // `make`, which is kept from then on. Nothing is locked while that runs.
  at::Tensor get(const c10::Device& device, void* stream, int64_t elements,
                 c10::function_ref<at::Tensor()> make) {
    const std::pair<int, void*> place{device.index(), stream};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = kept_.find(place);
      if (found != kept_.end() && found->second.numel() >= elements) {
        return found->second;
      }
    }
    at::Tensor made = make();
    at::Tensor replaced;  // freed when the lock is open
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      at::Tensor& kept = kept_[place];
      if (!kept.defined() || kept.numel() < made.numel()) {
        replaced = std::exchange(kept, made);
      }
    }
    return made;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, void*>, at::Tensor> kept_;
};

}  // namespace pacache::npu
