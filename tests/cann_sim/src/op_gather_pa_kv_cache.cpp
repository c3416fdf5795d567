// aclnnGatherPaKvCache: the aclnn sibling of AtbPagedCacheLoad.
#include <cstring>
#include <string>

#include "acl_codes.h"
#include "journal.h"
#include "nn_paged_load.h"
#include "settings.h"

using namespace cann_sim;

namespace {

constexpr uint64_t kWorkspaceBytes = 16 << 20;
constexpr int64_t kMaxInt32 = 0x7FFFFFFF;

bool is_kv_type(int type) {
  return type == kHalf || type == kBfloat16 || type == kInt8;
}

struct Failure {
  int code = 0;
  const char* reason = "";
};

Failure check(const Plan& plan, const PagedLoad& p,
              const std::string& cache_mode) {
  const TensorInfo& kc = plan.info(p.key_cache);
  const TensorInfo& vc = plan.info(p.value_cache);
  const TensorInfo& tables = plan.info(p.tables);
  const TensorInfo& lengths = plan.info(p.lengths);
  const TensorInfo& key = plan.info(p.key);
  const TensorInfo& value = plan.info(p.value);
  if (!is_kv_type(kc.data_type) || kc.data_type != vc.data_type ||
      kc.data_type != key.data_type || kc.data_type != value.data_type) {
    return {kAclnnInvalid, "one dtype of float16, bfloat16, int8 for all"};
  }
  if (tables.data_type != kInt32 || lengths.data_type != kInt32 ||
      (p.starts >= 0 && plan.info(p.starts).data_type != kInt32)) {
    return {kAclnnInvalid, "index dtypes must be int32"};
  }
  if (cache_mode != "Norm" && cache_mode != "PA_NZ") {
    return {kAclnnTiling, "cache mode"};
  }
  int64_t out_rank = p.nz ? 2 : 3;
  if (kc.rank() != 4 || vc.rank() != 4 || tables.rank() != 2 ||
      lengths.rank() != 1 || key.rank() != out_rank ||
      value.rank() != out_rank ||
      (p.starts >= 0 && plan.info(p.starts).rank() != 1)) {
    return {kAclnnTiling, "ranks"};
  }
  int64_t batch = tables.dims[0];
  if (lengths.dims[0] != batch + (p.cumulative ? 1 : 0)) {
    return {kAclnnTiling, "seqLens length"};
  }
  if (p.starts >= 0 && plan.info(p.starts).dims[0] != batch) {
    return {kAclnnTiling, "seqOffset length"};
  }
  if (kc.dims[0] != vc.dims[0] || key.dims[0] != value.dims[0] ||
      kc.dims[p.nz ? 2 : 1] != vc.dims[p.nz ? 2 : 1]) {
    return {kAclnnTiling, "key and value sides differ"};
  }
  for (int i = 0; i < 2; ++i) {
    const TensorInfo& cache = i ? vc : kc;
    const TensorInfo& out = i ? value : key;
    bool fits =
        p.nz ? out.dims[1] == cache.dims[1] * cache.dims[3] &&
                   cache.dims[3] * cache.itemsize() == 32
             : out.dims[1] == cache.dims[2] && out.dims[2] == cache.dims[3];
    if (!fits) return {kAclnnTiling, "output widths"};
  }
  return {};
}

}  // namespace

CANN_SIM_EXPORT int aclnnGatherPaKvCacheGetWorkspaceSize(
    const aclTensor* key_cache, const aclTensor* value_cache,
    const aclTensor* tables, const aclTensor* lengths, aclTensor* key,
    aclTensor* value, const aclTensor* starts, char* cache_mode,
    bool cumulative, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  ACLNN_PHASE1(aclnnGatherPaKvCache);
  PagedLoad p;
  p.key_cache = plan.tensor("key_cache", key_cache);
  p.value_cache = plan.tensor("value_cache", value_cache);
  p.tables = plan.tensor("block_tables", tables);
  p.lengths = plan.tensor("seq_lens", lengths);
  p.key = plan.tensor("key", key);
  p.value = plan.tensor("value", value);
  p.starts = plan.tensor("seq_offset", starts);
  plan.text("cache_mode", cache_mode);
  plan.number("is_seq_lens_cumsum", cumulative);
  if (!plan.handles_ok()) {
    return plan.refuse(kAclnnInvalid, "a handle is not alive");
  }
  if (!key_cache || !value_cache || !tables || !lengths || !key || !value) {
    return plan.refuse(kAclnnNullptr, "a required tensor is null");
  }
  if (!soc_is_a2_a3()) return plan.refuse(kAclnnNoKernel, soc_name());
  std::string mode = cache_mode ? cache_mode : "Norm";
  p.nz = mode == "PA_NZ";
  p.cumulative = cumulative;
  Failure f = check(plan, p, mode);
  if (f.code) return plan.refuse(f.code, f.reason);
  for (int i : {p.key_cache, p.value_cache, p.tables, p.lengths, p.key, p.value,
                p.starts}) {
    if (i >= 0 && !plan.info(i).contiguous()) {
      violation("non_contiguous", "aclnnGatherPaKvCache",
                "a strided tensor is read as dense");
    }
  }
  if (!p.nz && plan.info(p.key_cache).numel() > kMaxInt32) {
    violation("undefined", "aclnnGatherPaKvCache",
              "more than 2^31 cache elements: the index arithmetic is int32");
  }
  return plan.accept([p](const Call& call) { run_paged_load(p, call); },
                     kWorkspaceBytes);
}
ACLNN_PHASE2(aclnnGatherPaKvCache)
