// scatter_pa_kv_cache and scatter_pa_kv_cache_packed on the NPU:
// aclnnScatterPaKvCache.
//
// The device is given what every supported CANN version handles right: dense
// caches, int32 indices (int64 slots where they are read as such), exactly the
// tokens that the slots name, and key and value either dense or as Nct views.
// What a version would get wrong is made dense (inputs) or refused (caches);
// capabilities.cpp has the list.

#include "../scatter_args.h"
#include "../written.h"

#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <limits>

#include "aclnn_call.h"
#include "capabilities.h"
#include "dense_inputs.h"
#include "task_queue.h"
#include "warmup.h"

namespace pacache::npu {
namespace {

constexpr const char* kOp = "scatter_pa_kv_cache";

using PhaseOne = int (*)(const aclTensor* key, aclTensor* key_cache,
                         const aclTensor* slot_mapping, const aclTensor* value,
                         aclTensor* value_cache, const aclTensor* compress_lens,
                         const aclTensor* compress_seq_offset,
                         const aclTensor* seq_lens, char* cache_mode,
                         char* scatter_mode, const aclIntArray* strides,
                         const aclIntArray* offsets, uint64_t* workspace_size,
                         aclOpExecutor** executor);

const AclnnFunctions& functions(const char* op) {
  static const AclnnFunctions found = AclnnFunctions::look_up(
      op, "aclnnScatterPaKvCache", "aclnnScatterPaKvCacheGetWorkspaceSize",
      "8.3.RC1");
  return found;
}

int phase_one(const AclnnCall& c, uint64_t* workspace_size,
              aclOpExecutor** executor) {
  const auto call = reinterpret_cast<PhaseOne>(functions(kOp).phase_one);
  return call(c.tensor_handle(0), c.tensor_handle(1), c.tensor_handle(2),
              c.tensor_handle(3), c.tensor_handle(4), c.tensor_handle(5),
              c.tensor_handle(6), c.tensor_handle(7), c.text_value(0),
              c.text_value(1), c.array_handle(0), c.array_handle(1),
              workspace_size, executor);
}

// Key or value as the device gets it. The tensor keeps a dense copy alive
// until the call has been queued.
struct Source {
  at::Tensor tensor;
  int64_t token_stride = 0;  // elements

  bool is_dense() const { return tensor.is_contiguous(); }
  void make_dense() {
    tensor = tensor.contiguous();
    token_stride = tensor.size(1) * tensor.size(2);
  }
};

struct Sources {
  Source key;
  Source value;  // undefined tensor in scenario 6
  bool nct = false;

  bool has_value() const { return value.tensor.defined(); }
  void make_dense() {
    key.make_dense();
    if (has_value()) {
      value.make_dense();
    }
    nct = false;
  }
};

// The rows that are read, as a view: without padding tokens, and with Nct's
// strides and offsets applied (they were checked against the storage).
at::Tensor rows_read(const at::Tensor& t, const ScatterArgs& args,
                     const at::OptionalIntArrayRef& strides,
                     const at::OptionalIntArrayRef& offsets, size_t which) {
  if (args.kind != ScatterKind::kNct) {
    return t.size(0) == args.num_tokens ? t : t.narrow(0, 0, args.num_tokens);
  }
  const int64_t offset = offsets.has_value() ? (*offsets)[which] : 0;
  return t.as_strided({args.num_tokens, t.size(1), t.size(2)},
                      {(*strides)[which], t.size(2), 1},
                      t.storage_offset() + offset);
}

// Nct describes rows whose heads are dense, a fixed number of elements apart.
bool expressible_as_nct(const at::Tensor& t) {
  return (t.size(2) <= 1 || t.stride(2) == 1) &&
         (t.size(1) <= 1 || t.stride(1) == t.size(2)) && t.stride(0) >= 1 &&
         t.stride(0) <= std::numeric_limits<uint32_t>::max();
}

// Scenario 2 and 6: dense, or views in the one form that the device takes.
void choose_nct(Sources& sources, const Product& product) {
  const bool rewritten = product.cann >= kRewrittenNd;
  const auto prepare = [](Source& source) {
    if (source.is_dense() || !expressible_as_nct(source.tensor)) {
      source.make_dense();
    } else {
      source.token_stride = source.tensor.stride(0);
    }
  };
  prepare(sources.key);
  bool equal = true;
  bool dense = sources.key.is_dense();
  if (sources.has_value()) {
    prepare(sources.value);
    equal = sources.key.token_stride == sources.value.token_stride;
    dense = dense && sources.value.is_dense();
  }
  if (dense) {
    return;
  }
  const bool device_takes_it =
      product.soc != Soc::k950 &&
      (rewritten || (equal && sources.key.tensor.scalar_type() != at::kChar));
  if (device_takes_it) {
    sources.nct = true;
  } else {
    sources.make_dense();
  }
}

// Dense but for a longer distance between blocks.
bool only_blocks_padded(const at::Tensor& cache) {
  return cache.stride(3) == 1 && cache.stride(2) == cache.size(3) &&
         cache.stride(1) == cache.size(2) * cache.size(3) &&
         cache.stride(0) >= cache.size(1) * cache.stride(1);
}

TensorDescriptor describe_source(const Source& source, bool nct) {
  const at::Tensor& t = source.tensor;
  if (!nct) {
    return TensorDescriptor(t);
  }
  // Described as dense: the kernel applies the stride itself, and a first
  // phase that sees a strided tensor would make it dense before that.
  TensorDescriptor descriptor = dense_descriptor(
      const_cast<void*>(t.const_data_ptr()), t.scalar_type(), t.sizes());
  descriptor.extent =
      (t.size(0) - 1) * source.token_stride + t.size(1) * t.size(2);
  return descriptor;
}

// A 0-dim tensor, CANN's form of "no value". Never read or written; it gets a
// live address because it must have one.
TensorDescriptor no_value(const at::Tensor& like) {
  return dense_descriptor(const_cast<void*>(like.const_data_ptr()),
                          like.scalar_type(), {});
}

struct Indices {
  at::Tensor slot_mapping;
  at::Tensor compress_lens;
  at::Tensor compress_seq_offsets;
  at::Tensor seq_lens;
};

// The compressed kernels do not skip negative slots. A head that must be
// skipped is given a window that writes nothing instead: Alibi keeps the last
// 0 tokens; Omni drops a window that is the whole sequence. (Rope would still
// write the mean; its negative slots are a documented precondition.)
void skip_negative_heads(const ScatterArgs& args, Indices& indices) {
  if (args.kind == ScatterKind::kRope) {
    return;
  }
  const at::Tensor skip = indices.slot_mapping.lt(0);
  indices.slot_mapping = indices.slot_mapping.clamp_min(0);
  if (args.kind == ScatterKind::kAlibi) {
    indices.compress_lens = indices.compress_lens.masked_fill(skip, 0);
    return;
  }
  const at::Tensor lengths = indices.seq_lens.unsqueeze(1)
                                 .expand({args.batch, args.num_heads})
                                 .reshape({-1});
  indices.compress_lens = at::where(skip, lengths, indices.compress_lens);
  indices.compress_seq_offsets =
      indices.compress_seq_offsets.masked_fill(skip, 0);
}

// The checks that the CPU always makes, on copies of the index tensors.
void check_values(const ScatterArgs& args, const ScatterInputs& in) {
  ScatterArgs host = args;
  const at::Tensor slots = on_host(in.slot_mapping);
  host.slot_mapping = IndexView(slots);
  at::Tensor lens;
  at::Tensor offsets;
  at::Tensor seq_lens;
  if (const at::Tensor* t = get(in.compress_lens)) {
    host.compress_lens = IndexView(lens = on_host(*t));
  }
  if (const at::Tensor* t = get(in.compress_seq_offsets)) {
    host.compress_seq_offsets = IndexView(offsets = on_host(*t));
  }
  if (const at::Tensor* t = get(in.seq_lens)) {
    host.seq_lens = IndexView(seq_lens = on_host(*t));
  }
  check_scatter_values(host);
  if (args.kind != ScatterKind::kRope && args.kind != ScatterKind::kNhsd) {
    return;
  }
  for (int64_t i = 0; i < host.slot_mapping.size; ++i) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        host.slot_mapping[i] >= 0, args.names.op, ": slot_mapping[",
        host.slot_mapping.position(i), "] must not be negative in scenario ",
        args.scenario, " on ", in.key.device(),
        " (the device kernel does not skip it), got ", host.slot_mapping[i]);
  }
}

// CANN's names of the modes; the functions take char*, and read only.
const char* cache_mode_text(const ScatterArgs& args) {
  return args.kind == ScatterKind::kNz ? "PA_NZ" : "Norm";
}

// Tokens are laid down by slot in NZ too; None and Nct say how they are read.
const char* scatter_mode_text(const ScatterArgs& args, bool nct) {
  const bool by_layout = args.kind == ScatterKind::kNorm ||
                         args.kind == ScatterKind::kNct ||
                         args.kind == ScatterKind::kNz;
  return by_layout ? (nct ? "Nct" : "None") : mode_of(args);
}

void launch(const ScatterArgs& args, const Sources& sources,
            const at::Tensor& key_cache, const OptionalTensor& value_cache,
            const Indices& indices) {
  const char* cache_mode = cache_mode_text(args);
  const char* scatter_mode = scatter_mode_text(args, sources.nct);
  std::array<int64_t, 2> strides = {1, 1};
  if (sources.nct) {
    strides = {sources.key.token_stride, sources.has_value()
                                             ? sources.value.token_stride
                                             : sources.key.token_stride};
  }
  const std::array<int64_t, 2> offsets = {0, 0};
  const bool nz = args.kind == ScatterKind::kNz;
  const auto describe_cache = [nz](const at::Tensor& cache) {
    return TensorDescriptor(nz ? as_4d_nz(cache) : cache);
  };

  auto call =
      std::make_shared<AclnnCall>(args.names.op, functions(args.names.op));
  call->tensor("key", describe_source(sources.key, sources.nct))
      .tensor("key_cache", describe_cache(key_cache))
      .tensor("slot_mapping", TensorDescriptor(indices.slot_mapping));
  if (sources.has_value()) {
    call->tensor("value", describe_source(sources.value, sources.nct))
        .tensor("value_cache", describe_cache(*value_cache));
  } else {
    call->tensor("value", no_value(sources.key.tensor))
        .tensor("value_cache", no_value(key_cache));
  }
  call->tensor("compress_lens", TensorDescriptor(indices.compress_lens))
      .tensor("compress_seq_offsets",
              TensorDescriptor(indices.compress_seq_offsets))
      .tensor("seq_lens", TensorDescriptor(indices.seq_lens))
      .text("cache_mode", cache_mode)
      .text("scatter_mode", scatter_mode)
      .ints("strides", strides)
      .ints("offsets", offsets);

  AclnnCall::run(std::move(call), key_cache.device(), phase_one);
}

void scatter(const ScatterArgs& args, const ScatterInputs& in) {
  const auto& [key, value, key_cache, value_cache, slot_mapping, compress_lens,
               compress_seq_offsets, seq_lens, cache_mode, scatter_mode,
               strides, offsets] = in;
  require_not_forked(args.names.op);
  const Product& here = product();
  check_scatter_supported(here, args);

  // Caches are written where they lie or not at all.
  const at::Tensor* values = get(value);
  bool block_strides = false;
  for (const NamedTensor cache :
       {NamedTensor{args.names.key_cache, &key_cache},
        NamedTensor{args.names.value_cache, get(value_cache)}}) {
    if (cache.tensor == nullptr || cache.tensor->is_contiguous()) {
      continue;
    }
    const bool taken = args.kind == ScatterKind::kNorm && args.scenario == 2 &&
                       here.soc != Soc::k950 && here.cann >= kBlockStrides &&
                       only_blocks_padded(*cache.tensor);
    if (!taken) {
      require_dense(here, args, cache);
    }
    block_strides = true;
  }

  const c10::DeviceGuard guard(key.device());
  if (check_values_enabled()) {
    check_values(args, in);
  }
  if (args.num_tokens == 0 || args.slot_mapping.size == 0) {
    return;
  }
  const bool has_keys = args.key.head_bytes > 0;
  const bool has_values = args.has_value && args.value.head_bytes > 0;
  if (!has_keys && !has_values) {
    return;
  }
  require_both_or_none(here, args.names.op, has_keys,
                       has_values || !args.has_value);

  Sources sources;
  if (args.is_compressed()) {
    sources.key.tensor = key.contiguous();
    sources.value.tensor = values->contiguous();
  } else {
    sources.key.tensor = rows_read(key, args, strides, offsets, 0);
    if (values != nullptr) {
      sources.value.tensor = rows_read(*values, args, strides, offsets, 1);
    }
    const bool may_be_strided =
        (args.kind == ScatterKind::kNorm || args.kind == ScatterKind::kNct) &&
        !block_strides;
    if (may_be_strided) {
      choose_nct(sources, here);
    } else {
      sources.make_dense();
    }
  }

  Indices indices{takes_int64_slots(here, args) ? slot_mapping.contiguous()
                                                : as_int32_slots(slot_mapping),
                  as_int32(compress_lens), as_int32(compress_seq_offsets),
                  as_int32(seq_lens)};
  if (args.is_compressed() && args.scenario != 3) {
    skip_negative_heads(args, indices);
  }
  launch(args, sources, key_cache, value_cache, indices);
}

void scatter_pa_kv_cache(
    const at::Tensor& key, const OptionalTensor& value,
    const at::Tensor& key_cache, const OptionalTensor& value_cache,
    const at::Tensor& slot_mapping, const OptionalTensor& compress_lens,
    const OptionalTensor& compress_seq_offsets, const OptionalTensor& seq_lens,
    c10::string_view cache_mode, c10::string_view scatter_mode,
    at::OptionalIntArrayRef strides, at::OptionalIntArrayRef offsets) {
  const ScatterInputs in = {key,
                            value,
                            key_cache,
                            value_cache,
                            slot_mapping,
                            compress_lens,
                            compress_seq_offsets,
                            seq_lens,
                            cache_mode,
                            scatter_mode,
                            strides,
                            offsets};
  scatter(check_scatter_args(in), in);
  mark_written(key_cache);
  mark_written(value_cache);
}

// The halves of the cache go down as two views of it.
void scatter_pa_kv_cache_packed(const at::Tensor& key, const at::Tensor& value,
                                const at::Tensor& kv_cache,
                                const at::Tensor& slot_mapping,
                                c10::string_view kv_layout) {
  const auto [args, cache] = check_packed_scatter_args(
      {key, value, kv_cache, slot_mapping, kv_layout});
  const OptionalTensor values = value;
  const OptionalTensor value_cache = cache.value_cache();
  const OptionalTensor none;
  scatter(args, {key, values, cache.key_cache(), value_cache, slot_mapping,
                 none, none, none, "Norm", "None", std::nullopt, std::nullopt});
  mark_written(kv_cache);
}

}  // namespace

void warm_up_scatter() { functions(kOp); }

TORCH_LIBRARY_IMPL(pacache, PrivateUse1, m) {
  m.impl("scatter_pa_kv_cache", TORCH_FN(scatter_pa_kv_cache));
  m.impl("scatter_pa_kv_cache_packed", TORCH_FN(scatter_pa_kv_cache_packed));
}

}  // namespace pacache::npu
