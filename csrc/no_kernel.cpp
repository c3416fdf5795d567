// What happens to tensors that no kernel of ours takes.
//
// Registered for every backend without a kernel of its own, so that such a
// call gets the operator's own sentence: sparse tensors and mixed devices are
// refused by the argument rules, an unknown device by name, and an NPU tensor
// with the reason why the NPU kernels are missing (torch_npu would otherwise
// copy everything to the CPU and back without a word).

#include <torch/library.h>

#include "load_args.h"
#include "npu_cause.h"
#include "scatter_args.h"

namespace pacache {

std::string& npu_cause() {
  static std::string cause;
  return cause;
}

namespace {

[[noreturn]] void refuse(const char* op, const char* name,
                         const at::Tensor& t) {
  const bool npu = t.device().is_privateuseone();
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op, ": ", name, " must be on a device that has a kernel (cpu",
      npu && !npu_cause().empty() ? "" : ", npu", "), got ", t.device(),
      npu && !npu_cause().empty() ? "; the npu kernels are not there: " : "",
      npu ? npu_cause() : std::string());
  // TORCH_CHECK(false) has thrown.
  std::abort();
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
  refuse("scatter_pa_kv_cache", "key", key);
}

void paged_cache_load(const at::Tensor& key_cache,
                      const at::Tensor& value_cache,
                      const at::Tensor& block_tables,
                      const at::Tensor& context_lens, const at::Tensor& key,
                      const at::Tensor& value, const OptionalTensor& seq_starts,
                      c10::string_view cache_mode, bool is_seq_lens_cumsum) {
  check_load_args({key_cache, value_cache, block_tables, context_lens, key,
                   value, seq_starts, cache_mode, is_seq_lens_cumsum});
  refuse("paged_cache_load", "key_cache", key_cache);
}

}  // namespace

TORCH_LIBRARY_IMPL(pacache, CompositeExplicitAutograd, m) {
  m.impl("scatter_pa_kv_cache", TORCH_FN(scatter_pa_kv_cache));
  m.impl("paged_cache_load", TORCH_FN(paged_cache_load));
}

}  // namespace pacache
