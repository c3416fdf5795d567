// aclnnScatterPaKvCache, phase one: selection, checks and codes per version.
//
// 8.5.0 and 9.0.0 have a generated layer (161001, 161002) over tiling
// (561002). 9.1.0 has a hand-written layer: its null check answers 561103,
// ranks and dtypes 161002, and a tiling failure surfaces as 561103.
#include "nn_scatter.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "journal.h"
#include "settings.h"

using namespace cann_sim;

namespace {

constexpr int64_t kMaxUint32 = 0xFFFFFFFF;
constexpr int64_t kMaxNzBlockSize = 65535;
constexpr int64_t kUnifiedBufferBytes = 196608 - 1024;
constexpr int64_t kMaxNhsdHeads = 4095;

struct Failure {
  int code = 0;
  std::string reason;
};

Failure tiling(const std::string& reason) { return {kAclnnTiling, reason}; }

// Everything phase one looks at. Absent tensors are null.
struct Arguments {
  const TensorInfo* key;
  const TensorInfo* key_cache;
  const TensorInfo* slots;
  const TensorInfo* value;
  const TensorInfo* value_cache;
  const TensorInfo* compress_lens;
  const TensorInfo* compress_offsets;
  const TensorInfo* seq_lens;
  std::string cache_mode;
  std::string scatter_mode;
};

bool is_kv_type(int type) {
  return type == kHalf || type == kBfloat16 || type == kInt8;
}

bool is_index_type(int type) { return type == kInt32 || type == kInt64; }

// (key, value) pairs that the operator definition registers.
bool pair_is_registered(int key, int value) {
  return is_kv_type(key) && is_kv_type(value) &&
         (value != kInt8 || key == kInt8);
}

bool index_types_agree(const Arguments& a) {
  for (const TensorInfo* t :
       {a.compress_lens, a.compress_offsets, a.seq_lens}) {
    if (t && t->data_type != a.slots->data_type) return false;
  }
  return is_index_type(a.slots->data_type);
}

int64_t lanes(const TensorInfo& t) { return 32 / t.itemsize(); }

bool in_range(int64_t size) { return size > 0 && size <= kMaxUint32; }

// ---- selection --------------------------------------------------------------

ScatterMode by_scatter_mode(const std::string& mode) {
  if (mode == "Rope") return ScatterMode::kRope;
  if (mode == "Alibi") return ScatterMode::kAlibi;
  if (mode == "Omni") return ScatterMode::kOmni;
  if (mode == "Nct") return ScatterMode::kNct;
  if (mode == "NHSD") return ScatterMode::kNhsd;
  return ScatterMode::kNorm;
}

// 8.5.0: unknown strings mean Norm/None, and a 0-dim value_cache turns every
// template into a key-only one.
ScatterMode select_850(const Arguments& a) {
  ScatterMode mode = a.cache_mode == "PA_NZ" ? ScatterMode::kNz
                                             : by_scatter_mode(a.scatter_mode);
  if (mode == ScatterMode::kNhsd) mode = ScatterMode::kNorm;
  if (a.value_cache->rank() == 0) {
    mode =
        mode == ScatterMode::kNct ? ScatterMode::kSisoNct : ScatterMode::kSiso;
  }
  return mode;
}

Failure select_900(const Arguments& a, int version, ScatterMode* mode) {
  if (a.cache_mode == "PA_NZ") {
    *mode = ScatterMode::kNz;
    return {};
  }
  if (!a.cache_mode.empty() && a.cache_mode != "Norm") {
    return tiling("cache_mode " + a.cache_mode);
  }
  static const char* const kModes[] = {"",      "None", "Rope",
                                       "Alibi", "Omni", "Nct"};
  bool known = version >= kCann910 && a.scatter_mode == "NHSD";
  for (const char* name : kModes) known = known || a.scatter_mode == name;
  if (!known) return tiling("scatter_mode " + a.scatter_mode);
  *mode = by_scatter_mode(a.scatter_mode);
  if (a.value_cache->rank() == 0) {
    if (*mode == ScatterMode::kNorm) {
      *mode = ScatterMode::kSiso;
    } else if (*mode == ScatterMode::kNct) {
      *mode = ScatterMode::kSisoNct;
    } else {
      return tiling("value_cache without dimensions in this mode");
    }
  }
  return {};
}

// ---- tiling -----------------------------------------------------------------

Failure check_types(const Arguments& a, const ScatterPlan& p) {
  if (a.key->data_type != a.key_cache->data_type) {
    return tiling("key and key_cache dtypes differ");
  }
  if (!is_kv_type(a.key->data_type)) return tiling("key dtype");
  if (!p.key_only()) {
    if (a.value->data_type != a.value_cache->data_type) {
      return tiling("value and value_cache dtypes differ");
    }
    if (!is_kv_type(a.value->data_type)) return tiling("value dtype");
  }
  if (!is_index_type(a.slots->data_type)) return tiling("slot dtype");
  if (p.version < kCann900) return {};
  if (!p.key_only() &&
      !pair_is_registered(a.key->data_type, a.value->data_type)) {
    return tiling("value int8 needs key int8");
  }
  bool averaging = p.mode == ScatterMode::kRope || p.mode == ScatterMode::kOmni;
  if (averaging && (a.key->data_type == kInt8 || a.value->data_type == kInt8)) {
    return tiling("Rope and Omni take float16 and bfloat16");
  }
  return {};
}

bool cache_rank_fits(const TensorInfo& cache, const ScatterPlan& p) {
  if (cache.rank() == 4) return true;
  return cache.rank() == 5 && p.mode == ScatterMode::kNz &&
         p.version >= kCann900;
}

// Block size and number of blocks do not depend on the rank of an NZ cache
// once the head axis of the 5-D form is skipped.
int64_t block_size_of(const TensorInfo& cache, ScatterMode mode) {
  if (mode == ScatterMode::kNz) return cache.dims[cache.rank() - 2];
  return cache.dims[mode == ScatterMode::kNhsd ? 2 : 1];
}

Failure check_ranks(const Arguments& a, const ScatterPlan& p) {
  if (a.key->rank() != 3) return tiling("key must have 3 dimensions");
  if (!cache_rank_fits(*a.key_cache, p)) return tiling("key_cache rank");
  if (a.slots->rank() != 1) return tiling("slot_mapping rank");
  if (p.key_only()) return {};
  if (a.value->rank() != 3) return tiling("value must have 3 dimensions");
  if (!cache_rank_fits(*a.value_cache, p)) return tiling("value_cache rank");
  if (a.key->dims[0] != a.value->dims[0] ||
      a.key->dims[1] != a.value->dims[1]) {
    return tiling("key and value differ in tokens or heads");
  }
  if (a.key_cache->dims[0] != a.value_cache->dims[0] ||
      block_size_of(*a.key_cache, p.mode) !=
          block_size_of(*a.value_cache, p.mode)) {
    return tiling("the caches differ in blocks or block size");
  }
  return {};
}

Failure check_compress_ranks(const Arguments& a, const ScatterPlan& p) {
  if (!p.compressed()) return {};
  if (!a.compress_lens || a.compress_lens->rank() != 1) {
    return tiling("compress_lens must have 1 dimension");
  }
  if (!a.seq_lens || a.seq_lens->rank() != 1) {
    return tiling("seq_lens must have 1 dimension");
  }
  // The library looks at seq_lens again where it means the offsets, so a
  // missing compress_seq_offset is not noticed.
  return {};
}

Failure check_nz_cache(const TensorInfo& x, const TensorInfo& cache,
                       const char* name) {
  int64_t heads = x.dims[1];
  int64_t head_size = x.dims[2];
  int64_t lane = lanes(x);
  bool fits = cache.dims[cache.rank() - 1] == lane;
  if (cache.rank() == 4) {
    fits = fits && cache.dims[1] == heads * head_size / lane;
  } else {
    fits = fits && cache.dims[1] == heads && cache.dims[2] == head_size / lane;
  }
  return fits ? Failure{} : tiling(std::string(name) + " NZ dimensions");
}

Failure check_sizes(const Arguments& a, const ScatterPlan& p) {
  int64_t tokens = a.key->dims[0];
  int64_t block_size = block_size_of(*a.key_cache, p.mode);
  bool zeros_refused = p.version < kCann900;
  if (zeros_refused) {
    for (int64_t size : {tokens, a.key->dims[1], a.key->dims[2], block_size}) {
      if (!in_range(size)) return tiling("a size is zero or beyond 32 bits");
    }
  }
  if (a.key_cache->dims[0] * block_size < tokens) {
    return tiling("more tokens than slots");
  }
  if (p.key_only()) return {};
  if (zeros_refused && !in_range(a.value->dims[2])) {
    return tiling("value head size");
  }
  if (p.mode == ScatterMode::kNz) {
    Failure f = check_nz_cache(*a.key, *a.key_cache, "key_cache");
    if (!f.code) f = check_nz_cache(*a.value, *a.value_cache, "value_cache");
    if (!f.code && p.version >= kCann900 && block_size > kMaxNzBlockSize) {
      f = tiling("NZ block size beyond 65535");
    }
    return f;
  }
  return {};
}

// Comparisons of the cache with key and value, new in 9.0.0.
Failure check_cache_dims_900(const Arguments& a, const ScatterPlan& p) {
  if (p.version < kCann900 || p.mode == ScatterMode::kNz) return {};
  struct Pair {
    const TensorInfo* x;
    const TensorInfo* cache;
  };
  std::vector<Pair> pairs = {{a.key, a.key_cache}};
  if (!p.key_only()) pairs.push_back({a.value, a.value_cache});
  for (const Pair& pair : pairs) {
    int64_t heads = p.compressed() ? 1 : pair.x->dims[1];
    int head_axis = p.mode == ScatterMode::kNhsd ? 1 : 2;
    if (pair.cache->dims[head_axis] != heads) {
      return tiling("cache heads do not fit");
    }
    if (pair.cache->dims[3] != pair.x->dims[2]) {
      return tiling("cache head size does not fit");
    }
  }
  return {};
}

Failure check_compress_sizes(const Arguments& a, const ScatterPlan& p) {
  if (!p.compressed()) return {};
  int64_t batch = a.seq_lens->dims[0];
  if (!in_range(batch) || !in_range(batch * a.key->dims[1])) {
    return tiling("batch");
  }
  return {};
}

Failure check_head_bytes(const Arguments& a, const ScatterPlan& p) {
  int64_t key_bytes = a.key->dims[2] * a.key->itemsize();
  if (p.mode == ScatterMode::kNz) {
    int64_t value_bytes = a.value->dims[2] * a.value->itemsize();
    if (key_bytes % 32 || value_bytes % 32) {
      return tiling("NZ head bytes must be a multiple of 32");
    }
  }
  if (p.mode == ScatterMode::kNhsd) {
    int64_t value_bytes = a.value->dims[2] * a.value->itemsize();
    int64_t heads = a.key->dims[1];
    int64_t block_size = a.key_cache->dims[2];
    int64_t widest = std::max(a.key->dims[2], a.value->dims[2]);
    if (key_bytes % 32 || value_bytes % 32) {
      return tiling("NHSD head bytes must be a multiple of 32");
    }
    if (heads > kMaxNhsdHeads) return tiling("NHSD heads beyond 4095");
    if (heads * (key_bytes + value_bytes) > kUnifiedBufferBytes) {
      return tiling("NHSD token beyond the on-chip buffer");
    }
    if (block_size * widest > kMaxUint32) return tiling("NHSD block");
    if (a.key->data_type != a.value->data_type) return tiling("NHSD dtypes");
  }
  return {};
}

Failure run_tiling(const Arguments& a, ScatterPlan* p) {
  if (p->version < kCann900) {
    p->mode = select_850(a);
  } else if (Failure f = select_900(a, p->version, &p->mode); f.code) {
    return f;
  }
  using Check = Failure (*)(const Arguments&, const ScatterPlan&);
  static const Check kChecks[] = {
      check_types,      check_ranks,          check_compress_ranks,
      check_sizes,      check_cache_dims_900, check_compress_sizes,
      check_head_bytes,
  };
  for (Check check : kChecks) {
    if (Failure f = check(a, *p); f.code) return f;
  }
  return {};
}

// ---- the layer above --------------------------------------------------------

Failure generated_layer(const Arguments& a) {
  if (!a.key || !a.key_cache || !a.slots || !a.value || !a.value_cache) {
    return {kAclnnNullptr, "a required tensor is null"};
  }
  if (a.key->data_type != a.key_cache->data_type ||
      a.value->data_type != a.value_cache->data_type ||
      !pair_is_registered(a.key->data_type, a.value->data_type) ||
      !index_types_agree(a)) {
    return {kAclnnInvalid, "no kernel is registered for these dtypes"};
  }
  return {};
}

// Ranks and dtypes of 9.1.0.
Failure handwritten_layer(const Arguments& a) {
  if (a.key->rank() != 3 && a.key->rank() != 4) {
    return {kAclnnInvalid, "key must have 3 or 4 dimensions"};
  }
  if (a.value && a.value->rank() != 0 && a.value->rank() != 3 &&
      a.value->rank() != 4) {
    return {kAclnnInvalid, "value must have 0, 3 or 4 dimensions"};
  }
  if (!is_kv_type(a.key->data_type) ||
      a.key->data_type != a.key_cache->data_type) {
    return {kAclnnInvalid, "key and key_cache dtypes"};
  }
  if (a.value && a.value_cache) {
    if (!is_kv_type(a.value->data_type) ||
        a.value->data_type != a.value_cache->data_type) {
      return {kAclnnInvalid, "value and value_cache dtypes"};
    }
    if (a.cache_mode != "PA_NZ" && a.key->data_type != a.value->data_type) {
      return {kAclnnInvalid, "key and value dtypes differ outside PA_NZ"};
    }
  }
  if (!index_types_agree(a)) return {kAclnnInvalid, "index dtypes"};
  return {};
}

bool dense(const TensorInfo* t) { return !t || t->contiguous(); }

bool last_axis_dense(const TensorInfo* t) {
  return !t || t->rank() == 0 || t->dims.back() == 1 || t->strides.back() == 1;
}

// What becomes of strided tensors. The kernels read the dense layout, apart
// from the block stride that Norm honours on 9.1.0.
void route_strides(const Arguments& a, ScatterPlan* p) {
  const TensorInfo* all[] = {a.key,      a.key_cache,       a.slots,
                             a.value,    a.value_cache,     a.compress_lens,
                             a.seq_lens, a.compress_offsets};
  bool strided = false;
  for (const TensorInfo* t : all) strided = strided || !dense(t);
  if (!strided) return;
  if (p->version >= kCann910) {
    bool may_pass = a.key->rank() == 3 &&
                    (a.scatter_mode.empty() || a.scatter_mode == "None");
    for (const TensorInfo* t : all) may_pass = may_pass && last_axis_dense(t);
    if (!may_pass) {
      p->make_dense = true;
      count("hidden_dense_copy");
      return;
    }
    auto block_strided = [](const TensorInfo* t) {
      if (dense(t)) return true;
      TensorInfo inner = *t;
      inner.dims.erase(inner.dims.begin());
      inner.strides.erase(inner.strides.begin());
      return inner.contiguous();
    };
    bool honoured = p->mode == ScatterMode::kNorm && dense(a.key) &&
                    dense(a.value) && dense(a.slots) &&
                    block_strided(a.key_cache) && block_strided(a.value_cache);
    if (honoured) return;
  }
  violation("non_contiguous", "aclnnScatterPaKvCache",
            "a strided tensor is handed to a kernel that reads it as dense");
}

// Bindings that pass 14 arguments to the 11-argument edition put a mode
// string where the library writes the workspace size.
bool looks_like_mode(const void* pointer) {
  static const char* const kNames[] = {"None", "Nct",  "Rope", "Alibi",
                                       "Omni", "NHSD", ""};
  for (const char* name : kNames) {
    if (pointer && !strcmp(static_cast<const char*>(pointer), name)) {
      return strcmp(name, "") != 0;
    }
  }
  return false;
}

int phase_one(const char* op, const aclTensor* key, const aclTensor* key_cache,
              const aclTensor* slots, const aclTensor* value,
              const aclTensor* value_cache, const aclTensor* compress_lens,
              const aclTensor* compress_offsets, const aclTensor* seq_lens,
              const char* cache_mode, const char* scatter_mode,
              const aclIntArray* strides, const aclIntArray* offsets,
              uint64_t* workspace_bytes, aclOpExecutor** executor,
              void* caller) {
  Plan plan(op, workspace_bytes, executor, caller);
  if (plan.early()) return plan.early();
  ScatterPlan p;
  p.version = settings().version;
  p.t.key = plan.tensor("key", key);
  p.t.key_cache = plan.tensor("key_cache", key_cache);
  p.t.slots = plan.tensor("slot_mapping", slots);
  p.t.value = plan.tensor("value", value);
  p.t.value_cache = plan.tensor("value_cache", value_cache);
  p.t.compress_lens = plan.tensor("compress_lens", compress_lens);
  p.t.compress_offsets = plan.tensor("compress_seq_offset", compress_offsets);
  p.t.seq_lens = plan.tensor("seq_lens", seq_lens);
  plan.text("cache_mode", cache_mode);
  plan.text("scatter_mode", scatter_mode);
  plan.ints("strides", strides);
  plan.ints("offsets", offsets);
  if (!plan.handles_ok()) {
    return plan.refuse(kAclnnInvalid, "a handle is not alive");
  }
  auto info = [&](int index) {
    return index < 0 ? nullptr : &plan.info(index);
  };
  Arguments a = {info(p.t.key),
                 info(p.t.key_cache),
                 info(p.t.slots),
                 info(p.t.value),
                 info(p.t.value_cache),
                 info(p.t.compress_lens),
                 info(p.t.compress_offsets),
                 info(p.t.seq_lens),
                 cache_mode ? cache_mode : "Norm",
                 scatter_mode ? scatter_mode : "None"};
  auto refuse = [&](const Failure& f) { return plan.refuse(f.code, f.reason); };
  if (!soc_is_a2_a3()) {
    return plan.refuse(kAclnnNoKernel,
                       std::string("no kernel for ") + soc_name());
  }
  if (p.version < kCann910) {
    if (Failure f = generated_layer(a); f.code) return refuse(f);
  } else {
    if (!a.key || !a.key_cache || !a.slots || (a.value && !a.value_cache)) {
      return plan.refuse(kAclnnInnerNull, "a required tensor is null");
    }
    bool empty = a.key->numel() == 0 || a.key_cache->numel() == 0;
    bool value_empty = !a.value || a.value->numel() == 0;
    if (empty && (value_empty || a.value->rank() == 0)) {
      return plan.accept([](const Call&) {});
    }
    if (Failure f = handwritten_layer(a); f.code) return refuse(f);
    if (!a.value || !a.value_cache) {
      violation("null_dereference", op,
                "tiling reads value_cache, which is null");
      return plan.refuse(kAclnnInnerNull, "value_cache is null");
    }
  }
  if (Failure f = run_tiling(a, &p); f.code) {
    if (p.version >= kCann910) f.code = kAclnnInnerNull;
    return refuse(f);
  }
  bool nct = p.mode == ScatterMode::kNct || p.mode == ScatterMode::kSisoNct;
  if (nct) {
    auto take = [&](const aclIntArray* array, int64_t* to, const char* name) {
      if (!array) return;
      if (array->values.size() < 2) {
        violation("out_of_bounds", op,
                  std::string(name) + " is read past its end");
      }
      for (size_t i = 0; i < array->values.size() && i < 2; ++i) {
        if (array->values[i] < 0 || array->values[i] > kMaxUint32) {
          violation("undefined", op,
                    std::string(name) + " does not fit 32 bits unsigned");
        }
        to[i] = static_cast<uint32_t>(array->values[i]);
      }
    };
    take(strides, p.strides, "strides");
    take(offsets, p.offsets, "offsets");
  }
  if (a.key->dims[0] == 0) {
    violation("undefined", op, "zero tokens: the outcome is not known");
  }
  bool no_int8_kernel =
      p.version < kCann900 &&
      (nct || p.mode == ScatterMode::kRope || p.mode == ScatterMode::kOmni);
  if (no_int8_kernel && a.key->data_type == kInt8) {
    plan.fail_in_phase2(kAclnnNoKernel);
  }
  route_strides(a, &p);
  return plan.accept([p](const Call& call) { run_scatter(p, call); });
}

}  // namespace

CANN_SIM_EXPORT int aclnnScatterPaKvCacheGetWorkspaceSize(
    const aclTensor* key, aclTensor* key_cache, const aclTensor* slots,
    const aclTensor* value, aclTensor* value_cache,
    const aclTensor* compress_lens, const aclTensor* compress_offsets,
    const aclTensor* seq_lens, char* cache_mode, char* scatter_mode,
    const aclIntArray* strides, const aclIntArray* offsets,
    uint64_t* workspace_bytes, aclOpExecutor** executor) {
  void* caller = __builtin_return_address(0);
  if (settings().version > kCann830Alpha3) {
    return phase_one("aclnnScatterPaKvCache", key, key_cache, slots, value,
                     value_cache, compress_lens, compress_offsets, seq_lens,
                     cache_mode, scatter_mode, strides, offsets,
                     workspace_bytes, executor, caller);
  }
  // The 11-argument edition: argument 10 is the workspace size, 11 the
  // executor. Arguments 12 to 14 are not there and must not be looked at.
  if (looks_like_mode(scatter_mode)) {
    violation("abi", "aclnnScatterPaKvCache",
              "called with 14 arguments; this edition has 11");
    return kAclnnInvalid;
  }
  return phase_one(
      "aclnnScatterPaKvCache", key, key_cache, slots, value, value_cache,
      compress_lens, compress_offsets, seq_lens, cache_mode, nullptr, nullptr,
      nullptr, reinterpret_cast<uint64_t*>(scatter_mode),
      reinterpret_cast<aclOpExecutor**>(const_cast<aclIntArray*>(strides)),
      caller);
}
ACLNN_PHASE2(aclnnScatterPaKvCache)
