// The schemas of pacache: every one, and nothing else.

#include <torch/library.h>

TORCH_LIBRARY(pacache, m) {
  // Names the Python module that holds the fake kernels, so that a tracer
  // which misses them can say what to import.
  m.set_python_module("pacache_torch.fake");

  // Mutation is declared and nothing is returned: the form that torch.compile
  // can re-inplace without copying a cache.
  const std::vector<at::Tag> tags = {
      at::Tag::pt2_compliant_tag,
      at::Tag::needs_exact_strides,
  };

  m.def(
      "scatter_pa_kv_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, "
      "Tensor(b!)? value_cache, Tensor slot_mapping, *, "
      "Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
      "Tensor? seq_lens=None, str cache_mode=\"Norm\", "
      "str scatter_mode=\"None\", SymInt[]? strides=None, "
      "SymInt[]? offsets=None) -> ()",
      tags);

  m.def(
      "paged_cache_load(Tensor key_cache, Tensor value_cache, "
      "Tensor block_tables, Tensor context_lens, Tensor(a!) key, "
      "Tensor(b!) value, *, Tensor? seq_starts=None, "
      "str cache_mode=\"Norm\", bool is_seq_lens_cumsum=False) -> ()",
      tags);

  // For a cache that holds keys and values: whole, it is one mutable argument,
  // where its two halves would be two views of one storage.
  m.def(
      "scatter_pa_kv_cache_packed(Tensor key, Tensor value, "
      "Tensor(a!) kv_cache, Tensor slot_mapping, *, str kv_layout) -> ()",
      tags);

  m.def(
      "paged_cache_load_packed(Tensor kv_cache, Tensor block_tables, "
      "Tensor context_lens, Tensor(a!) key, Tensor(b!) value, *, "
      "str kv_layout, Tensor? seq_starts=None, "
      "bool is_seq_lens_cumsum=False) -> ()",
      tags);
}
