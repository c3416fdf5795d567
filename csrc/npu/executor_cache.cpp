#include "executor_cache.h"

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "cann_library.h"

namespace pacache::npu {
namespace {

// What CANN offers; older releases have none of it, or only the form that is
// keyed by a 64-bit hash. The exact key is preferred: it cannot collide.
struct CacheFunctions {
  bool (*can_use)(const char*) = nullptr;
  void (*init)() = nullptr;
  void (*uninit)() = nullptr;
  void (*add_address)(void*) = nullptr;
  void (*set_key)(uint8_t*, size_t) = nullptr;
  aclOpExecutor* (*find_by_key)(uint8_t*, size_t, uint64_t*) = nullptr;
  void (*set_hash)(uint64_t) = nullptr;
  aclOpExecutor* (*find_by_hash)(uint64_t, uint64_t*) = nullptr;

  bool has_exact() const {
    return set_key != nullptr && find_by_key != nullptr;
  }
  bool has_hash() const {
    return set_hash != nullptr && find_by_hash != nullptr;
  }
  bool usable() const {
    return can_use != nullptr && init != nullptr && uninit != nullptr &&
           add_address != nullptr && (has_exact() || has_hash());
  }
};

template <typename F>
void look_up(F& function, const char* name) {
  function = reinterpret_cast<F>(find_op_api(name));
}

CacheFunctions look_up_functions() {
  CacheFunctions f;
  const char* enabled = std::getenv("PACACHE_EXECUTOR_CACHE");
  if (enabled != nullptr && std::string_view(enabled) == "0") {
    return f;
  }
  look_up(f.can_use, "CanUsePTACache");
  look_up(f.init, "InitPTACacheThreadLocal");
  look_up(f.uninit, "UnInitPTACacheThreadLocal");
  look_up(f.add_address, "AddTensorAddrToCachedList");
  look_up(f.set_key, "SetPTACacheHashKey");
  look_up(f.find_by_key, "PTAFindExecCache");
  look_up(f.set_hash, "SetPTAHashKey");
  look_up(f.find_by_hash, "PTAGetExecCache");
  return f;
}

const CacheFunctions& functions() {
  static const CacheFunctions found = look_up_functions();
  return found;
}

// FNV-1a over 8 bytes at a time, finished by a bit mix; never 0, which means
// "do not cache".
uint64_t hash_of(const uint8_t* bytes, size_t size) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (size_t i = 0; i < size; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min<size_t>(8, size - i));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 29;
  }
  hash = (hash ^ size) * 0xbf58476d1ce4e5b9ULL;
  hash ^= hash >> 32;
  return hash == 0 ? 1 : hash;
}

}  // namespace

CallKey::CallKey(const char* function, int device, const void* stream)
    : function_(function) {
  add(function);
  add(device);
  append(&stream, sizeof(stream));
}

void CallKey::append(const void* data, size_t size) {
  const auto* begin = static_cast<const uint8_t*>(data);
  bytes_.append(begin, begin + size);
}

void CallKey::add(int64_t value) { append(&value, sizeof(value)); }

void CallKey::add(at::IntArrayRef values) {
  add(static_cast<int64_t>(values.size()));
  append(values.data(), values.size() * sizeof(int64_t));
}

void CallKey::add(const char* text) {
  const size_t size = text == nullptr ? 0 : std::strlen(text);
  add(text == nullptr ? int64_t{-1} : static_cast<int64_t>(size));
  append(text, size);
}

void CallKey::add(const TensorDescriptor& tensor) {
  if (!tensor.present) {
    add(int64_t{-2});
    return;
  }
  add(static_cast<int64_t>(tensor.dtype) << 32 | tensor.format);
  add(at::IntArrayRef(tensor.sizes));
  append(tensor.strides.data(), tensor.strides.size() * sizeof(int64_t));
  add(tensor.extent);
  addresses_.push_back(tensor.data);
}

ExecutorCache::ExecutorCache(CallKey& key) : key_(key) {
  const CacheFunctions& f = functions();
  active_ = f.usable() && f.can_use(key.function());
  if (!active_) {
    return;
  }
  f.init();
  for (void* address : key.addresses()) {
    f.add_address(address);
  }
  if (f.has_exact()) {
    f.set_key(key.bytes(), key.size());
  } else {
    f.set_hash(hash_of(key.bytes(), key.size()));
  }
}

ExecutorCache::~ExecutorCache() {
  if (active_) {
    functions().uninit();
  }
}

ExecutorHandle ExecutorCache::find(uint64_t* workspace_size) {
  if (!active_) {
    return nullptr;
  }
  const CacheFunctions& f = functions();
  if (f.has_exact()) {
    return ExecutorHandle(
        f.find_by_key(key_.bytes(), key_.size(), workspace_size));
  }
  return ExecutorHandle(
      f.find_by_hash(hash_of(key_.bytes(), key_.size()), workspace_size));
}

}  // namespace pacache::npu
