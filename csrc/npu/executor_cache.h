// Has phase one been done for this signature already?
//
// CANN keeps executors per thread under a key that the caller makes from
// everything but the addresses; torch_npu uses the same cache ("PTA cache").
// A hit gives an executor that is bound to the new addresses and can be
// launched without phase one.

#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>

#include "acl_handles.h"

namespace pacache::npu {

// The key of one call, and the addresses in argument order.
class CallKey {
 public:
  CallKey(const char* function, int device, const void* stream);

  void add(const TensorDescriptor& tensor);
  void add(at::IntArrayRef values);
  void add(int64_t value);
  // Text that names a mode; the length is part of the key.
  void add(const char* text);

  const char* function() const { return function_; }
  uint8_t* bytes() { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  const c10::SmallVectorImpl<void*>& addresses() const { return addresses_; }

 private:
  void append(const void* data, size_t size);

  const char* function_;
  c10::SmallVector<uint8_t, 768> bytes_;
  c10::SmallVector<void*, 8> addresses_;
};

// One use of the cache by the calling thread. While it lives, phase one enters
// the cache under the key.
class ExecutorCache {
 public:
  explicit ExecutorCache(CallKey& key);
  ~ExecutorCache();
  ExecutorCache(const ExecutorCache&) = delete;
  ExecutorCache& operator=(const ExecutorCache&) = delete;

  // An executor for the key, or null; sets workspace_size on a hit.
  ExecutorHandle find(uint64_t* workspace_size);

 private:
  CallKey& key_;
  bool active_ = false;
};

}  // namespace pacache::npu
