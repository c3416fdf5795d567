// What happens to tensors that no kernel of ours takes.
//
// Registered for every backend without a kernel of its own, so that such a
// call gets the operator's own sentence: sparse tensors and mixed devices are
// refused by the argument rules, an unknown device by name. An NPU tensor
// loads the NPU kernels, or gets the reason why there are none (torch_npu
// would otherwise copy everything to the CPU and back without a word).

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "load_args.h"
#include "npu_loader.h"
#include "scatter_args.h"

namespace pacache {

std::function<std::string()>& npu_loader() {
  static std::function<std::string()> loader;
  return loader;
}

namespace {

// Returns when kernels for the tensor's device have just been loaded.
void find_kernel_for(const char* op, const char* name, const at::Tensor& t) {
  std::string cause;
  if (t.device().is_privateuseone()) {
    cause = npu_loader() ? npu_loader()() : "pacache_torch is not imported";
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
        (std::string("pacache::") + op).c_str(), "");
    if (cause.empty() &&
        handle.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      return;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op, ": ", name,
      " must be on a device that has a kernel (cpu, npu), got ", t.device(),
      cause.empty() ? "" : "; the npu kernels are not loaded: ", cause);
}

void scatter_pa_kv_cache(
    const at::Tensor& key, const OptionalTensor& value,
    const at::Tensor& key_cache, const OptionalTensor& value_cache,
    const at::Tensor& slot_mapping, const OptionalTensor& compress_lens,
    const OptionalTensor& compress_seq_offsets, const OptionalTensor& seq_lens,
    c10::string_view cache_mode, c10::string_view scatter_mode,
    at::OptionalIntArrayRef strides, at::OptionalIntArrayRef offsets) {
  check_scatter_args({key, value, key_cache, value_cache, slot_mapping,
                      compress_lens, compress_seq_offsets, seq_lens, cache_mode,
                      scatter_mode, strides, offsets});
  find_kernel_for("scatter_pa_kv_cache", "key", key);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("pacache::scatter_pa_kv_cache", "")
      .typed<decltype(scatter_pa_kv_cache)>()
      .call(key, value, key_cache, value_cache, slot_mapping, compress_lens,
            compress_seq_offsets, seq_lens, cache_mode, scatter_mode, strides,
            offsets);
}

void paged_cache_load(const at::Tensor& key_cache,
                      const at::Tensor& value_cache,
                      const at::Tensor& block_tables,
                      const at::Tensor& context_lens, const at::Tensor& key,
                      const at::Tensor& value, const OptionalTensor& seq_starts,
                      c10::string_view cache_mode, bool is_seq_lens_cumsum) {
  check_load_args({key_cache, value_cache, block_tables, context_lens, key,
                   value, seq_starts, cache_mode, is_seq_lens_cumsum});
  find_kernel_for("paged_cache_load", "key_cache", key_cache);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("pacache::paged_cache_load", "")
      .typed<decltype(paged_cache_load)>()
      .call(key_cache, value_cache, block_tables, context_lens, key, value,
            seq_starts, cache_mode, is_seq_lens_cumsum);
}

void scatter_pa_kv_cache_packed(const at::Tensor& key, const at::Tensor& value,
                                const at::Tensor& kv_cache,
                                const at::Tensor& slot_mapping,
                                c10::string_view kv_layout) {
  check_packed_scatter_args({key, value, kv_cache, slot_mapping, kv_layout});
  find_kernel_for("scatter_pa_kv_cache_packed", "key", key);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("pacache::scatter_pa_kv_cache_packed", "")
      .typed<decltype(scatter_pa_kv_cache_packed)>()
      .call(key, value, kv_cache, slot_mapping, kv_layout);
}

void paged_cache_load_packed(const at::Tensor& kv_cache,
                             const at::Tensor& block_tables,
                             const at::Tensor& context_lens,
                             const at::Tensor& key, const at::Tensor& value,
                             c10::string_view kv_layout,
                             const OptionalTensor& seq_starts,
                             bool is_seq_lens_cumsum) {
  check_packed_load_args({kv_cache, block_tables, context_lens, key, value,
                          kv_layout, seq_starts, is_seq_lens_cumsum});
  find_kernel_for("paged_cache_load_packed", "kv_cache", kv_cache);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("pacache::paged_cache_load_packed", "")
      .typed<decltype(paged_cache_load_packed)>()
      .call(kv_cache, block_tables, context_lens, key, value, kv_layout,
            seq_starts, is_seq_lens_cumsum);
}

}  // namespace

TORCH_LIBRARY_IMPL(pacache, CompositeExplicitAutograd, m) {
  m.impl("scatter_pa_kv_cache", TORCH_FN(scatter_pa_kv_cache));
  m.impl("paged_cache_load", TORCH_FN(paged_cache_load));
  m.impl("scatter_pa_kv_cache_packed", TORCH_FN(scatter_pa_kv_cache_packed));
  m.impl("paged_cache_load_packed", TORCH_FN(paged_cache_load_packed));
}

}  // namespace pacache
