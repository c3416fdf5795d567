// ATB's ReshapeAndCache, which torch_npu's _npu_reshape_and_cache makes through
// the C++ interface: created from a parameter, set up and executed with packs
// of tensors.
#include <string>
#include <vector>

#include "acl_codes.h"
#include "atb_api.h"
#include "journal.h"
#include "memory.h"
#include "nn_scatter.h"
#include "settings.h"
#include "stream.h"

// Memory layouts that callers rely on.
namespace atb {

constexpr size_t kMaxDims = 8;
constexpr size_t kVectorSize = 64;

struct Dims {
  int64_t dims[kMaxDims];
  uint64_t count;
};

struct TensorDesc {
  int data_type;
  int format;
  Dims shape;
};

struct Tensor {
  TensorDesc desc;
  void* device_data;
  void* host_data;
  uint64_t bytes;
};

template <typename T>
class SVector {
 public:
  size_t size() const { return size_; }
  const T& operator[](size_t i) const { return heap_ ? heap_[i] : storage_[i]; }

 private:
  size_t capacity_;
  size_t size_;
  T storage_[kVectorSize + 1];
  T* heap_;
};

struct VariantPack {
  SVector<Tensor> inputs;
  SVector<Tensor> outputs;
};

class Utils {
 public:
  static uint64_t GetTensorSize(const Tensor& tensor);
};

namespace infer {
struct ReshapeAndCacheParam {
  enum Compress : int { kNone };
  enum Caches : int { kKeyAndValue, kKeyOnly, kKeyAndValueNz };
  int compress;
  int caches;
};
}  // namespace infer

}  // namespace atb

using namespace cann_sim;
using Param = atb::infer::ReshapeAndCacheParam;

namespace {

constexpr const char* kOp = "AtbReshapeAndCache";
constexpr const char* kSetup = "AtbReshapeAndCacheSetup";
constexpr int64_t kLine = 32;

TensorInfo info_of(const atb::Tensor& tensor) {
  TensorInfo t;
  const atb::Dims& shape = tensor.desc.shape;
  t.dims.assign(shape.dims, shape.dims + shape.count);
  t.strides.assign(t.dims.size(), 1);
  for (size_t i = t.dims.size(); i-- > 1;) {
    t.strides[i - 1] = t.strides[i] * t.dims[i];
  }
  t.data_type = tensor.desc.data_type;
  t.format = tensor.desc.format;
  t.storage_dims = {t.numel()};
  t.data = tensor.device_data ? tensor.device_data : tensor.host_data;
  return t;
}

// Key, key_cache and slots, and for both caches value and value_cache.
int check(const std::vector<TensorInfo>& t, const ScatterPlan& plan) {
  const TensorInfo& key = t[plan.t.key];
  const TensorInfo& slots = t[plan.t.slots];
  bool nz = plan.mode == ScatterMode::kNz;
  if (slots.rank() != 1) return kAtbInvalidTensorDimNum;
  if (slots.data_type != kInt32) return kAtbInvalidTensorIniMatch;
  for (auto [source, target] : {std::pair(plan.t.key, plan.t.key_cache),
                                std::pair(plan.t.value, plan.t.value_cache)}) {
    if (source < 0) continue;
    const TensorInfo& x = t[source];
    const TensorInfo& cache = t[target];
    if (x.rank() != 3 || cache.rank() != 4) return kAtbInvalidTensorDimNum;
    bool known = x.data_type == kHalf || x.data_type == kBfloat16 ||
                 x.data_type == kInt8;
    if (!known || x.data_type != cache.data_type || x.format != kNd ||
        cache.format != (nz ? kFractalNz : kNd)) {
      return kAtbInvalidTensorIniMatch;
    }
    bool fits = nz ? cache.dims[1] * cache.dims[3] == x.dims[1] * x.dims[2] &&
                         cache.dims[3] * cache.itemsize() == kLine &&
                         cache.dims[2] % 16 == 0
                   : cache.dims[2] == x.dims[1] && cache.dims[3] == x.dims[2];
    if (!fits || x.dims[0] != slots.dims[0] || x.dims[1] != key.dims[1]) {
      return kAtbInvalidTensorDim;
    }
  }
  for (const TensorInfo& one : t) {
    if (one.numel() == 0) return kAtbInvalidTensorSize;
    if (reinterpret_cast<uintptr_t>(one.first()) % kLine) {
      violation("misaligned", kOp,
                "a tensor does not start on a multiple of 32 bytes");
    }
  }
  return kAtbOk;
}

class ReshapeAndCacheOperation : public atb::Operation {
 public:
  explicit ReshapeAndCacheOperation(int caches) {
    bool key_only = caches == Param::kKeyOnly;
    plan_.mode = key_only                          ? ScatterMode::kSiso
                 : caches == Param::kKeyAndValueNz ? ScatterMode::kNz
                                                   : ScatterMode::kNorm;
    // ATB's kernels have none of the deviations of CANN's older ones.
    plan_.version = kCann910;
    plan_.t.key = 0;
    plan_.t.value = key_only ? -1 : 1;
    plan_.t.key_cache = key_only ? 1 : 2;
    plan_.t.value_cache = key_only ? -1 : 3;
    plan_.t.slots = key_only ? 2 : 4;
  }

  std::string GetName() const override { return "ReshapeAndCacheOperation"; }
  uint32_t GetInputNum() const override { return plan_.t.slots + 1; }
  uint32_t GetOutputNum() const override { return plan_.key_only() ? 1 : 2; }

  atb::Status Setup(const atb::VariantPack& pack, uint64_t& workspace_bytes,
                    atb::Context* context) override {
    if (int code = enter(kSetup)) return code;
    spin(settings().phase1_us);
    workspace_bytes = 0;
    if (!usable(kSetup, context)) return kAtbInvalidParam;
    if (pack.inputs.size() != GetInputNum() ||
        pack.outputs.size() != GetOutputNum()) {
      return kAtbInvalidInTensorNum;
    }
    std::vector<TensorInfo> tensors;
    for (size_t i = 0; i < pack.inputs.size(); ++i) {
      tensors.push_back(info_of(pack.inputs[i]));
    }
    return check(tensors, plan_);
  }

  atb::Status Execute(const atb::VariantPack& pack, uint8_t*, uint64_t,
                      atb::Context* context) override {
    if (int code = enter(kOp)) return code;
    spin(settings().phase2_us);
    if (!usable(kOp, context)) return kAtbInvalidParam;
    Stream* stream = find_stream(context->GetExecuteStream(), kOp);
    if (!stream) return kAtbInvalidParam;
    std::vector<TensorInfo> tensors;
    for (size_t i = 0; i < pack.inputs.size(); ++i) {
      tensors.push_back(info_of(pack.inputs[i]));
    }
    ScatterPlan plan = plan_;
    void* tiling = static_cast<SimContext*>(context)->memory();
    enqueue(stream, kOp, [=](const Run& run) {
      if (!SimContext::check_memory(run, tiling)) return;
      run_scatter(plan, Call{run, tensors, nullptr, 0});
    });
    return kAtbOk;
  }

 private:
  bool usable(const char* op, atb::Context* context) const {
    if (!context) {
      violation("null_dereference", op, "the context is null");
      return false;
    }
    if (!handle_live(kOperationKind, this, op) ||
        !handle_live(kContextKind, context, op)) {
      return false;
    }
    static_cast<SimContext*>(context)->check_use(op);
    return true;
  }

  ScatterPlan plan_;
};

}  // namespace

namespace atb {

__attribute__((visibility("default"))) uint64_t
Utils::GetTensorSize(const Tensor& tensor) {
  TensorInfo t = info_of(tensor);
  return t.numel() * t.itemsize();
}

template <typename P>
Status CreateOperation(const P& param, Operation** operation);

template <>
__attribute__((visibility("default"))) Status
CreateOperation<infer::ReshapeAndCacheParam>(
    const infer::ReshapeAndCacheParam& param, Operation** operation) {
  if (int code = enter("atb::CreateOperation")) return code;
  if (!operation || !soc_is_a2_a3() || param.compress != Param::kNone ||
      param.caches < Param::kKeyAndValue ||
      param.caches > Param::kKeyAndValueNz) {
    return kAtbInvalidParam;
  }
  *operation = new ReshapeAndCacheOperation(param.caches);
  handle_created(kOperationKind, *operation, __builtin_return_address(0));
  return kAtbOk;
}

}  // namespace atb
