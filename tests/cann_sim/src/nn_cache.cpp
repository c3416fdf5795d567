// libnnopbase: the executor cache that torch_npu drives ("PTA cache").
//
// Protocol, per thread: CanUsePTACache(api); InitPTACacheThreadLocal(); one
// AddTensorAddrToCachedList(storage address) per non-null tensor in argument
// order; SetPTAHashKey(hash) or SetPTACacheHashKey(bytes); then
// PTAGetExecCache(hash) or PTAFindExecCache(bytes), which returns a single-use
// executor bound to the listed addresses, or null, after which phase one is
// made as usual and enters the cache under the key; UnInitPTACacheThreadLocal
// at the end of either way. An entry can be used once its phase two ran. A
// key of 0 (or no bytes) means "do not cache".
//
// The maps are per thread, as in the real library.
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "journal.h"
#include "nn_executor.h"
#include "settings.h"

namespace cann_sim {
namespace {

struct ThreadCache {
  bool active = false;
  std::string api;
  uint64_t hash = 0;
  std::string key;
  std::vector<void*> addresses;
  std::map<uint64_t, std::shared_ptr<CacheEntry>> by_hash;
  std::map<std::string, std::shared_ptr<CacheEntry>> by_key;
};

ThreadCache& mine() {
  static thread_local ThreadCache* cache = new ThreadCache;
  return *cache;
}

std::atomic<bool> enabled{getenv("CANN_SIM_NO_PTA") == nullptr};
// Never hits, so that every call goes through phase one and its signature is
// compared with the one that the key stood for before.
std::atomic<bool> verifying{getenv("CANN_SIM_PTA_VERIFY") != nullptr};

bool needs_active(const char* api) {
  if (mine().active) return true;
  violation("pta_protocol", api, "InitPTACacheThreadLocal was not called");
  return false;
}

std::shared_ptr<CacheEntry> previous(const ThreadCache& cache) {
  if (cache.hash) {
    auto it = cache.by_hash.find(cache.hash);
    if (it != cache.by_hash.end()) return it->second;
  }
  if (!cache.key.empty()) {
    auto it = cache.by_key.find(cache.key);
    if (it != cache.by_key.end()) return it->second;
  }
  return nullptr;
}

aclOpExecutor* ticket(std::shared_ptr<CacheEntry> entry,
                      uint64_t* workspace_bytes, void* caller) {
  ThreadCache& cache = mine();
  if (!entry || !entry->usable || verifying) {
    count("pta_miss");
    return nullptr;
  }
  if (entry->op != cache.api) {
    // The real library notices a key of another operator, and only that.
    violation("pta_collision", cache.api,
              "the key belongs to an executor of " + entry->op);
    count("pta_miss");
    return nullptr;
  }
  if (cache.addresses.size() != entry->tensors.size()) {
    violation("pta_addresses", cache.api,
              format("%zu addresses listed, the executor has %zu tensors",
                     cache.addresses.size(), entry->tensors.size()));
    count("pta_miss");
    return nullptr;
  }
  count("pta_hit");
  aclOpExecutor* executor = new aclOpExecutor;
  executor->op = entry->op;
  executor->kernel = entry->kernel;
  executor->tensors = entry->tensors;
  for (size_t i = 0; i < executor->tensors.size(); ++i) {
    executor->tensors[i].data = cache.addresses[i];
  }
  executor->workspace_bytes = entry->workspace_bytes;
  executor->device = current_device();
  executor->entry = std::move(entry);
  *workspace_bytes = executor->workspace_bytes;
  handle_created("aclOpExecutor", executor, caller);
  if (tracing()) {
    std::string fields =
        "\"api\": \"pta_hit\", \"op\": \"" + executor->op + "\"";
    for (const TensorInfo& t : executor->tensors) {
      fields += ", " + quoted(t.name) + ": " + tensor_json(t, true);
    }
    trace(fields);
  }
  return executor;
}

}  // namespace

std::shared_ptr<CacheEntry> cache_phase_one(const std::string& op,
                                            const std::string& signature) {
  ThreadCache& cache = mine();
  if (!cache.active || (!cache.hash && cache.key.empty())) return nullptr;
  if (cache.api != op) {
    violation("pta_protocol", op,
              "phase one while the cache key of " + cache.api + " is set");
    return nullptr;
  }
  if (auto old = previous(cache)) {
    if (old->op != op || old->signature != signature) {
      violation("pta_collision", op,
                "one key for two signatures: " + old->signature + " and " +
                    signature);
    }
    return nullptr;
  }
  auto entry = std::make_shared<CacheEntry>();
  entry->op = op;
  entry->signature = signature;
  if (cache.hash) cache.by_hash[cache.hash] = entry;
  if (!cache.key.empty()) cache.by_key[cache.key] = entry;
  return entry;
}

}  // namespace cann_sim

using namespace cann_sim;

CANN_SIM_EXPORT void InitPTACacheThreadLocal() {
  enter("InitPTACacheThreadLocal");
  ThreadCache& cache = mine();
  cache.active = true;
  cache.hash = 0;
  cache.key.clear();
  cache.addresses.clear();
}

CANN_SIM_EXPORT void UnInitPTACacheThreadLocal() {
  enter("UnInitPTACacheThreadLocal");
  mine().active = false;
}

CANN_SIM_EXPORT bool CanUsePTACache(const char* api) {
  if (enter("CanUsePTACache")) return false;
  mine().api = api ? api : "";
  return enabled;
}

CANN_SIM_EXPORT void AddTensorAddrToCachedList(void* address) {
  enter("AddTensorAddrToCachedList");
  if (!needs_active("AddTensorAddrToCachedList")) return;
  mine().addresses.push_back(address);
}

CANN_SIM_EXPORT void SetPTAHashKey(uint64_t hash) {
  enter("SetPTAHashKey");
  if (!needs_active("SetPTAHashKey")) return;
  mine().hash = hash;
}

CANN_SIM_EXPORT void SetPTACacheHashKey(uint8_t* bytes, size_t count) {
  enter("SetPTACacheHashKey");
  if (!needs_active("SetPTACacheHashKey")) return;
  mine().key.assign(reinterpret_cast<const char*>(bytes), bytes ? count : 0);
}

CANN_SIM_EXPORT aclOpExecutor* PTAGetExecCache(uint64_t hash,
                                               uint64_t* workspace_bytes) {
  if (enter("PTAGetExecCache")) return nullptr;
  if (!needs_active("PTAGetExecCache")) return nullptr;
  auto it = mine().by_hash.find(hash);
  if (it == mine().by_hash.end()) {
    count("pta_miss");
    return nullptr;
  }
  return ticket(it->second, workspace_bytes, __builtin_return_address(0));
}

CANN_SIM_EXPORT aclOpExecutor* PTAFindExecCache(uint8_t* bytes, size_t length,
                                                uint64_t* workspace_bytes) {
  if (enter("PTAFindExecCache")) return nullptr;
  if (!needs_active("PTAFindExecCache")) return nullptr;
  std::string key(reinterpret_cast<const char*>(bytes), bytes ? length : 0);
  auto it = mine().by_key.find(key);
  if (it == mine().by_key.end()) {
    count("pta_miss");
    return nullptr;
  }
  return ticket(it->second, workspace_bytes, __builtin_return_address(0));
}

CANN_SIM_EXPORT void cann_sim_set_pta(int on) { enabled = on != 0; }
CANN_SIM_EXPORT void cann_sim_set_pta_verify(int on) { verifying = on != 0; }
