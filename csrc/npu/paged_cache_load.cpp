// paged_cache_load and paged_cache_load_packed on the NPU: AtbPagedCacheLoad,
// or its aclnn sibling aclnnGatherPaKvCache where ATB is missing.
//
// Neither checks an index, and both read and write tensors as dense ones, so
// what they would get wrong is refused here (capabilities.cpp).

#include "../load_args.h"
#include "../written.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <vector>

#include "aclnn_call.h"
#include "atb_context.h"
#include "call_error.h"
#include "cann_library.h"
#include "capabilities.h"
#include "dense_inputs.h"
#include "stream_memory.h"
#include "task_queue.h"
#include "warmup.h"
#include "workspace.h"

namespace pacache::npu {
namespace {

constexpr const char* kOp = "paged_cache_load";
constexpr const char* kSibling = "aclnnGatherPaKvCache";
constexpr const char* kSiblingPhaseOne = "aclnnGatherPaKvCacheGetWorkspaceSize";

// Tensors in the form that both device operators take.
struct DeviceTensors {
  at::Tensor key_cache;
  at::Tensor value_cache;
  at::Tensor block_tables;
  at::Tensor context_lens;
  at::Tensor key;
  at::Tensor value;
  at::Tensor seq_starts;  // undefined for none
};

// At least `batch` zeros, to be held until the call is queued. Made once per
// device and stream, and grown when needed; those of a capture that finds none
// come from the graph's pool. Nobody writes to them and none are freed, so that
// graphs may go on reading them, and no call has to ask CANN whether it is
// being captured.
at::Tensor zero_starts(int64_t batch, const at::Device& device, void* stream) {
  static auto* all = new StreamMemory;
  at::Tensor kept = all->find(device, stream, batch);
  if (kept.defined()) {
    return kept;
  }
  const auto options = at::TensorOptions().dtype(at::kInt).device(device);
  if (is_capturing(stream)) {
    return at::zeros({batch}, options);
  }
  int64_t size = 256;  // doubled, for what is never freed to stay small
  while (size < batch) {
    size *= 2;
  }
  kept = at::zeros({size}, options);
  static auto* outgrown = new std::vector<at::Tensor>;
  static auto* mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  outgrown->push_back(all->keep(device, stream, kept));
  return kept;
}

// One ATB call as it travels to the queue's thread.
struct AtbCall {
  const char* op = kOp;  // of ours, for error texts
  std::array<TensorDescriptor, 7> tensors;
  int8_t kv_cache_cfg = 0;
  bool is_cumsum = false;
  c10::Device device{c10::DeviceType::PrivateUse1};
  void* stream = nullptr;

  bool has_starts() const { return tensors[6].present; }

  std::string describe() const {
    static constexpr const char* kNames[] = {
        "key_cache", "value_cache", "block_tables", "context_lens",
        "key",       "value",       "seq_starts"};
    std::string text;
    for (size_t i = 0; i < tensors.size(); ++i) {
      text += c10::str(i == 0 ? "" : ", ", kNames[i], " ",
                       tensors[i].present
                           ? c10::str(acl_dtype_name(tensors[i].dtype), " ",
                                      at::IntArrayRef(tensors[i].sizes))
                           : std::string("null"));
    }
    return c10::str(text, ", kvCacheCfg ", static_cast<int>(kv_cache_cfg),
                    ", isSeqLensCumsumType ", is_cumsum, ", hasSeqStarts ",
                    has_starts());
  }
};

// On the queue's thread: set up and execute back to back, since an operation
// remembers its tensors.
void run_atb(const AtbCall& call) {
  const c10::DeviceGuard guard(call.device);
  const AtbFunctions& atb = atb_functions(call.op);
  atb::Context* context = atb_context(call.op, call.device.index());
  int32_t status = context->SetExecuteStream(call.stream);
  if (status != 0) {
    throw_atb(call.op, "atb::Context::SetExecuteStream", status,
              call.describe());
  }
  std::array<TensorHandle, 7> handles;
  for (size_t i = 0; i < handles.size(); ++i) {
    handles[i] = make_tensor(call.op, call.tensors[i]);
  }
  atb::Operation** operation =
      atb_operation(call.device.index(), call.kv_cache_cfg, call.is_cumsum);
  uint64_t workspace_size = 0;
  status = atb.phase_one(
      handles[0].get(), handles[1].get(), handles[2].get(), handles[3].get(),
      handles[4].get(), handles[5].get(), handles[6].get(), call.kv_cache_cfg,
      call.is_cumsum, call.has_starts(), &workspace_size, operation, context);
  if (status != 0) {
    drop_operation(operation);
    throw_atb(call.op, "AtbPagedCacheLoadGetWorkspaceSize", status,
              call.describe());
  }
  // Known only here. The operator as read asks for none.
  const at::Tensor memory = workspace_on_queue(workspace_size, call.stream);
  status = atb.phase_two(data_of(memory), workspace_size, *operation, context);
  if (status != 0) {
    drop_operation(operation);
    throw_atb(call.op, "AtbPagedCacheLoad", status, call.describe());
  }
}

void load_with_atb(const LoadArgs& args, const DeviceTensors& tensors) {
  // A missing function is the caller's error, not the queue's.
  atb_functions(args.names.op);
  auto call = std::make_shared<AtbCall>();
  call->op = args.names.op;
  call->kv_cache_cfg = args.nz ? 0 : 1;
  call->is_cumsum = args.is_cumsum;
  call->device = tensors.key.device();
  call->stream = current_stream(call->device);
  call->tensors = {TensorDescriptor(tensors.key_cache),
                   TensorDescriptor(tensors.value_cache),
                   TensorDescriptor(tensors.block_tables),
                   TensorDescriptor(tensors.context_lens),
                   TensorDescriptor(tensors.key),
                   TensorDescriptor(tensors.value),
                   TensorDescriptor(tensors.seq_starts)};
  at::Tensor zeros;
  if (args.nz) {
    // A dense tensor whose last dimension is one unit is FRACTAL_NZ as it
    // lies when block_size is a multiple of 16, which has been checked.
    call->tensors[0].format = kFormatFractalNz;
    call->tensors[1].format = kFormatFractalNz;
  } else if (!tensors.seq_starts.defined()) {
    // The C API refuses ND without them.
    zeros = zero_starts(args.batch, call->device, call->stream);
    call->tensors[6] =
        dense_descriptor(zeros.data_ptr(), at::kInt, {args.batch});
  }
  static const std::string function = "AtbPagedCacheLoad";
  enqueue(call->op, function, call->device, [call]() -> int {
    run_atb(*call);
    return 0;
  });
}

using SiblingPhaseOne = int (*)(const aclTensor* key_cache,
                                const aclTensor* value_cache,
                                const aclTensor* block_tables,
                                const aclTensor* seq_lens, aclTensor* key,
                                aclTensor* value, const aclTensor* seq_offset,
                                char* cache_mode, bool is_seq_lens_cumsum,
                                uint64_t* workspace_size,
                                aclOpExecutor** executor);

const AclnnFunctions& sibling_functions(const char* op) {
  static const AclnnFunctions found =
      AclnnFunctions::look_up(op, kSibling, kSiblingPhaseOne, "8.5.0");
  return found;
}

int sibling_phase_one(const AclnnCall& c, uint64_t* workspace_size,
                      aclOpExecutor** executor) {
  const auto call =
      reinterpret_cast<SiblingPhaseOne>(sibling_functions(kOp).phase_one);
  return call(c.tensor_handle(0), c.tensor_handle(1), c.tensor_handle(2),
              c.tensor_handle(3), c.tensor_handle(4), c.tensor_handle(5),
              c.tensor_handle(6), c.text_value(0), c.number_value(0) != 0,
              workspace_size, executor);
}

void load_with_sibling(const LoadArgs& args, const DeviceTensors& tensors) {
  auto call = std::make_shared<AclnnCall>(args.names.op,
                                          sibling_functions(args.names.op));
  call->tensor("key_cache", TensorDescriptor(tensors.key_cache))
      .tensor("value_cache", TensorDescriptor(tensors.value_cache))
      .tensor("block_tables", TensorDescriptor(tensors.block_tables))
      .tensor("context_lens", TensorDescriptor(tensors.context_lens))
      .tensor("key", TensorDescriptor(tensors.key))
      .tensor("value", TensorDescriptor(tensors.value))
      .tensor("seq_starts", TensorDescriptor(tensors.seq_starts))
      .text("cache_mode", args.nz ? "PA_NZ" : "Norm")
      .number("is_seq_lens_cumsum", args.is_cumsum ? 1 : 0);
  AclnnCall::run(std::move(call), tensors.key.device(), sibling_phase_one);
}

// The checks that the CPU always makes, on copies of the index tensors.
void check_values(const LoadArgs& args, const LoadInputs& in) {
  LoadArgs host = args;
  const at::Tensor tables = on_host(in.block_tables);
  const at::Tensor lens = on_host(in.context_lens);
  host.block_tables = IndexView(tables);
  host.context_lens = IndexView(lens);
  at::Tensor starts;
  if (const at::Tensor* t = get(in.seq_starts)) {
    host.seq_starts = IndexView(starts = on_host(*t));
  }
  check_load_values(host);
}

void load(const LoadArgs& args, const LoadInputs& in) {
  const auto& [key_cache, value_cache, block_tables, context_lens, key, value,
               seq_starts, cache_mode, is_seq_lens_cumsum] = in;
  require_not_forked(args.names.op);
  const Product& here = product();
  check_load_supported(here, args, key_cache.scalar_type(),
                       value_cache.scalar_type());
  for (const NamedTensor t :
       {NamedTensor{args.names.key_cache, &key_cache},
        NamedTensor{args.names.value_cache, &value_cache},
        NamedTensor{"key", &key}, NamedTensor{"value", &value}}) {
    require_dense(here, args, t);
  }
  // Here: ATB's path looks its first function of CANN up on the queue's thread.
  [[maybe_unused]] static const bool absolute = [&args] {
    refuse_relative_search(args.names.op);
    return true;
  }();
  const bool sibling = load_backend() == LoadBackend::kSibling;
  if (sibling) {
    check_sibling_supported(here, args, key_cache, value_cache);
  }
  const c10::DeviceGuard guard(key.device());
  if (check_values_enabled()) {
    check_values(args, in);
  }
  const bool has_keys = key.numel() > 0;
  const bool has_values = value.numel() > 0;
  if (args.num_rows == 0 || args.batch == 0 || args.num_columns == 0 ||
      (!has_keys && !has_values)) {
    return;  // ATB refuses empty tensors
  }
  require_both_or_none(here, args.names.op, has_keys, has_values);

  const auto rows = [&](const at::Tensor& out) {
    return args.nz && out.dim() == 3 ? out.flatten(1, 2) : out;
  };
  DeviceTensors tensors;
  tensors.key_cache = args.nz ? as_4d_nz(key_cache) : key_cache;
  tensors.value_cache = args.nz ? as_4d_nz(value_cache) : value_cache;
  tensors.block_tables = as_aligned_int32(block_tables);
  tensors.context_lens = as_aligned_int32(context_lens);
  tensors.key = rows(key);
  tensors.value = rows(value);
  tensors.seq_starts = as_aligned_int32(seq_starts);
  if (sibling) {
    load_with_sibling(args, tensors);
  } else {
    load_with_atb(args, tensors);
  }
}

void paged_cache_load(const at::Tensor& key_cache,
                      const at::Tensor& value_cache,
                      const at::Tensor& block_tables,
                      const at::Tensor& context_lens, const at::Tensor& key,
                      const at::Tensor& value, const OptionalTensor& seq_starts,
                      c10::string_view cache_mode, bool is_seq_lens_cumsum) {
  const LoadInputs in = {key_cache,    value_cache, block_tables,
                         context_lens, key,         value,
                         seq_starts,   cache_mode,  is_seq_lens_cumsum};
  load(check_load_args(in), in);
  mark_written(key);
  mark_written(value);
}

// The halves of the cache go down as two views of it.
void paged_cache_load_packed(const at::Tensor& kv_cache,
                             const at::Tensor& block_tables,
                             const at::Tensor& context_lens,
                             const at::Tensor& key, const at::Tensor& value,
                             c10::string_view kv_layout,
                             const OptionalTensor& seq_starts,
                             bool is_seq_lens_cumsum) {
  const auto [args, cache] =
      check_packed_load_args({kv_cache, block_tables, context_lens, key, value,
                              kv_layout, seq_starts, is_seq_lens_cumsum});
  load(args,
       {cache.key_cache(), cache.value_cache(), block_tables, context_lens, key,
        value, seq_starts, "Norm", is_seq_lens_cumsum});
  mark_written(key);
  mark_written(value);
}

}  // namespace

LoadBackend load_backend() {
  static const LoadBackend chosen = [] {
    const char* value = std::getenv("PACACHE_LOAD_BACKEND");
    const std::string_view wanted = value == nullptr ? "auto" : value;
    TORCH_CHECK_VALUE(
        wanted == "auto" || wanted == "atb" || wanted == "aclnn", kOp,
        ": PACACHE_LOAD_BACKEND must be auto, atb or aclnn, got ", wanted);
    if (wanted == "aclnn") {
      return LoadBackend::kSibling;
    }
    if (wanted == "atb" || atb_available()) {
      return LoadBackend::kAtb;
    }
    // Without either, ATB's error says what is missing.
    return find_op_api(kSiblingPhaseOne) != nullptr &&
                   find_op_api(kSibling) != nullptr
               ? LoadBackend::kSibling
               : LoadBackend::kAtb;
  }();
  return chosen;
}

void warm_up_load(const c10::Device& device) {
  require_not_forked("warmup");
  if (load_backend() == LoadBackend::kSibling) {
    sibling_functions(kOp);
    return;
  }
  atb_functions(kOp);
  // The context must be made by the thread that will use it.
  enqueue(kOp, "PacacheWarmup", device, [device]() -> int {
    const c10::DeviceGuard guard(device);
    atb_context(kOp, device.index());
    return 0;
  });
  zero_starts(1, device, current_stream(device));
}

TORCH_LIBRARY_IMPL(pacache, PrivateUse1, m) {
  m.impl("paged_cache_load", TORCH_FN(paged_cache_load));
  m.impl("paged_cache_load_packed", TORCH_FN(paged_cache_load_packed));
}

}  // namespace pacache::npu
