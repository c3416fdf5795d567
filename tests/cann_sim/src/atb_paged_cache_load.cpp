// AtbPagedCacheLoad: status codes in the order in which ATB finds them.
#include <cstdlib>
#include <string>

#include "acl_codes.h"
#include "atb_api.h"
#include "journal.h"
#include "memory.h"
#include "nn_executor.h"
#include "settings.h"
#include "stream.h"

using namespace cann_sim;

namespace {

constexpr const char* kOp = "AtbPagedCacheLoad";
constexpr const char* kSetup = "AtbPagedCacheLoadGetWorkspaceSize";

constexpr int64_t kMaxRank = 8;
constexpr int64_t kMaxTensorBytes = int64_t{256} << 30;
constexpr int64_t kMaxNzTokenBytes = 147456;
constexpr int64_t kMaxBlockBytes = 0x7FFFFFFF;
constexpr int64_t kMaxNzColumns = 10223;
constexpr int64_t kLine = 32;

enum Slot { kKeyCache, kValueCache, kTables, kLengths, kKey, kValue, kStarts };
constexpr const char* kNames[] = {"key_cache",    "value_cache", "block_tables",
                                  "context_lens", "key",         "value",
                                  "seq_starts"};

// A null tensor is packed as one without dimensions.
struct Packed {
  TensorInfo t[7];
  bool given[7] = {};
  int count = 6;
};

// Dimension i; 0 when the tensor has fewer, as in ATB's fixed-size array.
int64_t dim(const TensorInfo& t, int i) { return i < t.rank() ? t.dims[i] : 0; }

int64_t bytes_of(const TensorInfo& t) { return t.numel() * t.itemsize(); }

int check_sizes(const Packed& p) {
  for (int i = 0; i < p.count; ++i) {
    bool optional = i == kStarts;
    if (p.t[i].rank() == 0 && !optional) return kAtbInvalidTensorDim;
  }
  for (int i = 0; i < p.count; ++i) {
    if (!p.given[i]) continue;
    for (int64_t d : p.t[i].dims) {
      if (d <= 0) return kAtbInvalidTensorSize;
    }
    if (bytes_of(p.t[i]) > kMaxTensorBytes) return kAtbInvalidTensorSize;
  }
  return kAtbOk;
}

bool types_fit(const Packed& p, bool nz) {
  int k = p.t[kKeyCache].data_type;
  int v = p.t[kValueCache].data_type;
  bool is16 = k == kHalf || k == kBfloat16;
  bool pair = (k == v && (is16 || k == kInt8)) ||
              (nz && k == kInt8 && (v == kHalf || v == kBfloat16));
  if (!pair || p.t[kKey].data_type != k || p.t[kValue].data_type != v) {
    return false;
  }
  for (int i : {kTables, kLengths, kStarts}) {
    if (i < p.count && p.given[i] && p.t[i].data_type != kInt32) return false;
  }
  for (int i = 0; i < p.count; ++i) {
    if (!p.given[i]) continue;
    bool cache = i == kKeyCache || i == kValueCache;
    int wanted = cache && nz ? kFractalNz : kNd;
    if (p.t[i].format != wanted) return false;
  }
  return true;
}

int check_shapes(const Packed& p, bool nz, bool cumulative) {
  const TensorInfo& kc = p.t[kKeyCache];
  const TensorInfo& vc = p.t[kValueCache];
  const TensorInfo& key = p.t[kKey];
  const TensorInfo& value = p.t[kValue];
  const TensorInfo& tables = p.t[kTables];
  // Widths, before any rank.
  for (int i = 0; i < 2; ++i) {
    const TensorInfo& cache = i ? vc : kc;
    const TensorInfo& out = i ? value : key;
    bool fits =
        nz ? dim(out, 1) == dim(cache, 1) * dim(cache, 3)
           : dim(out, 1) == dim(cache, 2) && dim(out, 2) == dim(cache, 3);
    if (!fits) return kAtbInvalidTensorDim;
  }
  int block_axis = nz ? 2 : 1;
  int64_t block_size = dim(kc, block_axis);
  if (dim(kc, 0) != dim(vc, 0) || dim(key, 0) != dim(value, 0) ||
      block_size != dim(vc, block_axis) || block_size <= 0) {
    return kAtbInvalidTensorDim;
  }
  if (!nz && dim(kc, 2) != dim(vc, 2)) return kAtbInvalidTensorDim;
  if (nz && block_size % 16) return kAtbInvalidTensorDim;
  int64_t batch = dim(tables, 0);
  if (dim(p.t[kLengths], 0) != batch + (cumulative ? 1 : 0)) {
    return kAtbInvalidTensorDim;
  }
  int out_rank = nz ? 2 : 3;
  if (kc.rank() != 4 || vc.rank() != 4 || tables.rank() != 2 ||
      p.t[kLengths].rank() != 1 || key.rank() != out_rank ||
      value.rank() != out_rank || (!nz && p.t[kStarts].rank() != 1)) {
    return kAtbInvalidTensorDimNum;
  }
  for (const TensorInfo* cache : {&kc, &vc}) {
    if (nz) {
      int64_t token = cache->dims[1] * cache->dims[3] * cache->itemsize();
      if (cache->dims[3] * cache->itemsize() != kLine ||
          token > kMaxNzTokenBytes) {
        return kAtbInvalidTensorDim;
      }
    } else if (cache->dims[2] * cache->dims[3] * cache->itemsize() % kLine) {
      return kAtbInvalidTensorDim;
    }
  }
  if (!nz && p.t[kStarts].dims[0] != batch) return kAtbInvalidTensorDim;
  return kAtbOk;
}

// Limits that ATB does not look at and kernels break on.
void record_hazards(const Packed& p, bool nz) {
  auto bad = [](const char* kind, const std::string& text) {
    violation(kind, kOp, text);
  };
  for (int i = 0; i < p.count; ++i) {
    const TensorInfo& t = p.t[i];
    if (!p.given[i]) continue;
    if (!t.contiguous()) {
      bad("non_contiguous", std::string(kNames[i]) + ": ATB ignores strides");
    }
    if (reinterpret_cast<uintptr_t>(t.first()) % kLine) {
      bad("misaligned",
          std::string(kNames[i]) + " does not start on a multiple of 32 bytes");
    }
  }
  for (int i : {kKeyCache, kValueCache}) {
    const TensorInfo& t = p.t[i];
    if (bytes_of(t) / t.dims[0] > kMaxBlockBytes) {
      bad("undefined", std::string(kNames[i]) + ": a block beyond 2^31 bytes");
    }
    if (nz && t.dims[2] - 1 > 0xFFFF) {
      bad("undefined", std::string(kNames[i]) + ": NZ block size beyond 2^16");
    }
  }
  if (nz && p.t[kTables].dims[1] > kMaxNzColumns) {
    bad("undefined", "more block table columns than fit on the chip");
  }
}

void write_trace(const Packed& p, bool all, int cfg, bool cumulative,
                 bool has_starts, bool reused, int code, void* caller) {
  if (!tracing()) return;
  std::string fields =
      std::string("\"api\": \"") + kSetup +
      "\", \"code\": " + std::to_string(code) +
      ", \"module\": " + quoted(module_of(caller)) +
      ", \"kv_cache_cfg\": " + std::to_string(cfg) +
      ", \"cumsum\": " + (cumulative ? "true" : "false") +
      ", \"has_seq_starts\": " + (has_starts ? "true" : "false") +
      ", \"reused\": " + (reused ? "true" : "false");
  for (int i = 0; all && i < 7; ++i) {
    fields += std::string(", \"") + kNames[i] +
              "\": " + (p.given[i] ? tensor_json(p.t[i], true) : "null");
  }
  trace(fields);
}

}  // namespace

CANN_SIM_EXPORT int AtbPagedCacheLoadGetWorkspaceSize(
    const aclTensor* key_cache, const aclTensor* value_cache,
    const aclTensor* tables, const aclTensor* lengths, const aclTensor* key,
    const aclTensor* value, const aclTensor* starts, int8_t cfg,
    bool cumulative, bool has_starts, uint64_t* workspace_bytes,
    atb::Operation** op, atb::Context* context) {
  void* caller = __builtin_return_address(0);
  int injected = enter(kSetup);
  spin(settings().phase1_us);
  Packed p;
  bool reused = op && *op;
  auto finish = [&](int code) {
    write_trace(p, true, cfg, cumulative, has_starts, reused, code, caller);
    return code;
  };
  const aclTensor* all[] = {key_cache, value_cache, tables, lengths,
                            key,       value,       starts};
  for (int i = 0; i < 7; ++i) {
    if (!all[i]) continue;
    if (!handle_live("aclTensor", all[i], kSetup)) {
      return finish(kAtbInvalidParam);
    }
    p.t[i] = all[i]->info;
    p.given[i] = true;
  }
  if (op && !*op) {
    if (!soc_is_a2_a3() || (cfg != 0 && cfg != 1) ||
        (cfg == 0 && (cumulative || has_starts))) {
      return finish(kAtbInvalidParam);
    }
    auto* made = new PagedCacheLoadOperation;
    made->nz = cfg == 0;
    made->cumulative = cumulative;
    *op = made;
    handle_created(kOperationKind, *op, caller);
  }
  // A failing Setup leaves the new operation in *op, as in ATB.
  if (injected) return finish(injected);
  for (const TensorInfo& t : p.t) {
    if (t.rank() > kMaxRank) return finish(kAtbInvalidTensorDim);
  }
  if (!op) return finish(kAtbInvalidOperationAddr);
  if (!context) return finish(kAtbInvalidParam);
  if (!handle_live(kContextKind, context, kSetup) ||
      !handle_live(kOperationKind, *op, kSetup)) {
    return finish(kAtbInvalidParam);
  }
  static_cast<SimContext*>(context)->check_use(kSetup);
  auto* operation = static_cast<PagedCacheLoadOperation*>(*op);
  operation->ready = false;
  if (operation->thread != std::this_thread::get_id()) {
    violation("operation_thread", kSetup,
              "an operation is set up by another thread than before");
  }
  bool nz = operation->nz;
  p.count = has_starts ? 7 : 6;
  if (p.count != (nz ? 6 : 7)) return finish(kAtbInvalidInTensorNum);
  if (int code = check_sizes(p)) return finish(code);
  // Without ATB_HOME_PATH the operator table is not there to compare with.
  if (getenv("ATB_HOME_PATH") && !types_fit(p, nz)) {
    return finish(kAtbInvalidTensorIniMatch);
  }
  if (int code = check_shapes(p, nz, operation->cumulative)) {
    return finish(code);
  }
  record_hazards(p, nz);
  operation->tensors.assign(p.t, p.t + p.count);
  operation->context = context;
  operation->workspace_bytes = settings().atb_workspace_bytes;
  operation->ready = true;
  if (!workspace_bytes) {
    violation("null_dereference", kSetup, "workspaceSize is null");
    return finish(kAtbInvalidParam);
  }
  *workspace_bytes = operation->workspace_bytes;
  return finish(kAtbOk);
}

CANN_SIM_EXPORT int AtbPagedCacheLoad(void* workspace, uint64_t workspace_bytes,
                                      atb::Operation* op,
                                      atb::Context* context) {
  int injected = enter(kOp);
  spin(settings().phase2_us);
  Stream* stream = nullptr;
  auto finish = [&](int code) {
    trace(format(
        "\"api\": \"%s\", \"code\": %d, \"stream\": %d, "
        "\"workspace\": \"%s\", \"workspace_bytes\": %llu",
        kOp, code, stream ? stream_number(stream) : -1, hex(workspace).c_str(),
        static_cast<unsigned long long>(workspace_bytes)));
    return code;
  };
  if (injected) return finish(injected);
  if (!op) return finish(kAtbInvalidOperationAddr);
  if (!handle_live(kOperationKind, op, kOp)) return finish(kAtbInvalidParam);
  if (!context) {
    violation("null_dereference", kOp, "the context is null");
    return finish(kAtbInvalidParam);
  }
  if (!handle_live(kContextKind, context, kOp)) {
    return finish(kAtbInvalidParam);
  }
  auto* operation = static_cast<PagedCacheLoadOperation*>(op);
  static_cast<SimContext*>(context)->check_use(kOp);
  if (operation->thread != std::this_thread::get_id()) {
    violation("operation_thread", kOp,
              "an operation is executed by another thread than set it up");
  }
  if (!operation->ready) return finish(kAtbInvalidParam);
  void* handle = context->GetExecuteStream();
  if (!handle) return finish(kAtbInvalidParam);
  if (operation->context != context) return finish(kAtbInvalidParam);
  if (workspace_bytes < operation->workspace_bytes ||
      (operation->workspace_bytes && !workspace)) {
    return finish(kAtbInvalidParam);
  }
  stream = find_stream(handle, kOp);
  if (!stream) return finish(kAtbInvalidParam);
  PagedLoad load;
  load.nz = operation->nz;
  load.cumulative = operation->cumulative;
  if (operation->tensors.size() == 7) load.starts = kStarts;
  std::vector<TensorInfo> tensors = operation->tensors;
  uint64_t needed = operation->workspace_bytes;
  void* tiling = static_cast<SimContext*>(context)->memory();
  enqueue(stream, kOp, [=](const Run& run) {
    if (!SimContext::check_memory(run, tiling)) return;
    if (needed &&
        !host_view(workspace, needed, Access::kWrite, run, "workspace")) {
      return;
    }
    run_paged_load(load, Call{run, tensors, workspace, needed});
  });
  return finish(kAtbOk);
}
