// Operators with the schemas of pacache that do nothing: what a call costs
// before anything of ours begins.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {

using OptionalTensor = std::optional<at::Tensor>;

void scatter_pa_kv_cache(const at::Tensor&, const OptionalTensor&,
                         const at::Tensor&, const OptionalTensor&,
                         const at::Tensor&, const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&,
                         c10::string_view, c10::string_view,
                         at::OptionalIntArrayRef, at::OptionalIntArrayRef) {}

void paged_cache_load(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const OptionalTensor&, c10::string_view, bool) {}

}  // namespace

TORCH_LIBRARY(pacache_empty, m) {
  m.def(
      "scatter_pa_kv_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, "
      "Tensor(b!)? value_cache, Tensor slot_mapping, *, "
      "Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
      "Tensor? seq_lens=None, str cache_mode=\"Norm\", "
      "str scatter_mode=\"None\", SymInt[]? strides=None, "
      "SymInt[]? offsets=None) -> ()");
  m.def(
      "paged_cache_load(Tensor key_cache, Tensor value_cache, "
      "Tensor block_tables, Tensor context_lens, Tensor(a!) key, "
      "Tensor(b!) value, *, Tensor? seq_starts=None, "
      "str cache_mode=\"Norm\", bool is_seq_lens_cumsum=False) -> ()");
}

TORCH_LIBRARY_IMPL(pacache_empty, CPU, m) {
  m.impl("scatter_pa_kv_cache", TORCH_FN(scatter_pa_kv_cache));
  m.impl("paged_cache_load", TORCH_FN(paged_cache_load));
}
