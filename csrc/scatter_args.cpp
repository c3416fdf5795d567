#include "scatter_args.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <string>

#include "memory_rules.h"

namespace pacache {
namespace {

constexpr const char* kOp = "scatter_pa_kv_cache";
constexpr const char* kPackedOp = "scatter_pa_kv_cache_packed";
constexpr int64_t kMaxNzBlockSize = 65535;

// The scenario that the modes and the rank of key choose, and how an error
// names that choice.
struct Scenario {
  ScatterKind kind;
  int number;
  std::string with_mode;
};

Scenario choose_scenario(const ScatterInputs& in) {
  const bool nz = in.cache_mode == "PA_NZ";
  TORCH_CHECK_VALUE(nz || in.cache_mode == "Norm", kOp,
                    ": cache_mode must be 'Norm' or 'PA_NZ', got '",
                    in.cache_mode, "'");
  const std::string_view mode = in.scatter_mode;
  TORCH_CHECK_VALUE(
      mode == "None" || mode == "Nct" || mode == "Alibi" || mode == "Rope" ||
          mode == "Omni" || mode == "NHSD",
      kOp,
      ": scatter_mode must be 'None', 'Nct', 'Alibi', 'Rope', 'Omni' or "
      "'NHSD', got '",
      mode, "'");
  if (nz) {
    TORCH_CHECK_VALUE(
        mode == "None", kOp,
        ": scatter_mode must be 'None' with cache_mode 'PA_NZ', got '", mode,
        "'");
    return {ScatterKind::kNz, 1, "with cache_mode 'PA_NZ'"};
  }
  if (mode == "None" && in.key.dim() == 4) {
    const bool has_offsets = get(in.compress_seq_offsets) != nullptr;
    return {has_offsets ? ScatterKind::kRope : ScatterKind::kAlibi, 3,
            "with a 4-D key"};
  }
  if (mode == "None") {
    // The common call; its text fits the string's own buffer or is rare.
    return {ScatterKind::kNorm, 2, {}};
  }
  std::string with_mode = "with scatter_mode '" + std::string(mode) + "'";
  if (mode == "Nct") {
    return {ScatterKind::kNct, 2, std::move(with_mode)};
  }
  if (mode == "Alibi") {
    return {ScatterKind::kAlibi, 4, std::move(with_mode)};
  }
  if (mode == "Rope") {
    return {ScatterKind::kRope, 5, std::move(with_mode)};
  }
  if (mode == "Omni") {
    return {ScatterKind::kOmni, 5, std::move(with_mode)};
  }
  return {ScatterKind::kNhsd, 7, std::move(with_mode)};
}

void check_presence(const ScatterInputs& in, const Scenario& scenario) {
  const auto with_mode = [&scenario]() -> std::string {
    return scenario.with_mode.empty() ? "with scatter_mode 'None'"
                                      : scenario.with_mode;
  };
  const at::Tensor* value = get(in.value);
  const at::Tensor* value_cache = get(in.value_cache);
  TORCH_CHECK_VALUE((value == nullptr) == (value_cache == nullptr), kOp,
                    ": value and value_cache must be given together, got ",
                    value_cache == nullptr ? "value and no value_cache"
                                           : "value_cache and no value");
  TORCH_CHECK_VALUE(value != nullptr || scenario.number == 2, kOp,
                    ": value must be given ", with_mode(), ", got None");

  const auto check = [&](const char* name, const OptionalTensor& optional,
                         bool needed, bool taken) {
    const at::Tensor* t = get(optional);
    TORCH_CHECK_VALUE(t != nullptr || !needed, kOp, ": ", name,
                      " must be given ", with_mode(), ", got None");
    TORCH_CHECK_VALUE(t == nullptr || taken, kOp, ": ", name, " must be None ",
                      with_mode(), ", got a tensor of shape ", t->sizes());
  };
  const bool compressed = scenario.number >= 3 && scenario.number <= 5;
  const bool offsets_needed = scenario.number == 5;
  check("compress_lens", in.compress_lens, compressed, compressed);
  check("compress_seq_offsets", in.compress_seq_offsets, offsets_needed,
        offsets_needed || scenario.number == 3);
  check("seq_lens", in.seq_lens, compressed, compressed);

  const bool nct = scenario.kind == ScatterKind::kNct;
  TORCH_CHECK_VALUE(!nct || in.strides.has_value(), kOp,
                    ": strides must be given ", with_mode(), ", got None");
  const auto check_pair = [&](const char* name, at::OptionalIntArrayRef pair,
                              int64_t least) {
    if (!pair.has_value()) {
      return;
    }
    TORCH_CHECK_VALUE(nct, kOp, ": ", name, " must be None ", with_mode(),
                      ", got ", *pair);
    TORCH_CHECK_VALUE(pair->size() == 2, kOp, ": ", name,
                      " must have 2 elements (key, value), got ", *pair);
    for (const int64_t element : *pair) {
      TORCH_CHECK_VALUE(element >= least, kOp, ": ", name, " must be at least ",
                        least, " each, got ", *pair);
    }
  };
  check_pair("strides", in.strides, 1);
  check_pair("offsets", in.offsets, 0);
}

void check_dtypes(const ScatterInputs& in, ScatterKind kind) {
  const NamedTensor key{"key", &in.key};
  check_copy_dtype(kOp, key);
  check_same_dtype(kOp, {"key_cache", &in.key_cache}, key);
  if (const at::Tensor* v = get(in.value)) {
    const NamedTensor value{"value", v};
    check_copy_dtype(kOp, value);
    if (kind != ScatterKind::kNz) {
      check_same_dtype(kOp, value, key, " (only PA_NZ may mix)");
    }
    check_same_dtype(kOp, {"value_cache", get(in.value_cache)}, value);
  }
  check_index_dtype(kOp, {"slot_mapping", &in.slot_mapping});
  check_index_dtype(kOp, {"compress_lens", get(in.compress_lens)});
  check_index_dtype(kOp,
                    {"compress_seq_offsets", get(in.compress_seq_offsets)});
  check_index_dtype(kOp, {"seq_lens", get(in.seq_lens)});
  const at::ScalarType dtype = in.key.scalar_type();
  TORCH_CHECK_TYPE(
      kind != ScatterKind::kRope || dtype == at::kHalf ||
          dtype == at::kBFloat16 || dtype == at::kFloat,
      kOp,
      ": key must be float16, bfloat16 or float32 for the window mean of "
      "Rope, got ",
      dtype_name(dtype));
}

std::string bracketed(std::initializer_list<int64_t> sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

// Scenarios 1, 2, 6, 7: one row per slot.
void check_token_inputs(NamedTensor key, NamedTensor value, NamedTensor slots,
                        bool may_be_padded, ScatterArgs& args) {
  const char* op = args.names.op;
  check_shape(op, key, 3, {}, [&] {
    return std::string("[num_tokens, num_heads, head_size]") +
           (may_be_padded ? " or [batch, seq_len, num_heads, head_size]" : "");
  });
  check_shape(op, slots, 1, {}, [] { return "[num_tokens]"; });
  args.num_tokens = slots.tensor->size(0);
  args.num_heads = key.tensor->size(1);
  if (value.tensor != nullptr) {
    check_shape(op, value, 3, {{1, args.num_heads}}, [&] {
      return "[num_tokens, num_heads, head_size] with num_heads " +
             std::to_string(args.num_heads) + " as key";
    });
  }
  for (const NamedTensor t : {key, value}) {
    TORCH_CHECK_VALUE(
        t.tensor == nullptr || t.tensor->size(0) >= args.num_tokens, op, ": ",
        t.name, " must have at least the ", args.num_tokens,
        " tokens of slot_mapping, got ", t.tensor->sizes());
  }
}

void check_capacity(const ScatterArgs& args) {
  TORCH_CHECK_VALUE(args.num_slots() >= args.num_tokens, args.names.op,
                    ": slot_mapping must have at most num_blocks * block_size "
                    "= ",
                    args.num_slots(), " elements, got ", args.num_tokens);
}

// Scenario 3: padded sequences.
void check_padded_inputs(const ScatterInputs& in, ScatterArgs& args) {
  const int64_t batch = args.batch = in.key.size(0);
  args.seq_len = in.key.size(1);
  args.num_heads = in.key.size(2);
  args.num_tokens = batch * args.seq_len;
  check_shape(kOp, {"value", get(in.value)}, 4,
              {{0, batch}, {1, args.seq_len}, {2, args.num_heads}}, [&] {
                return "[batch, seq_len, num_heads, head_size] with batch " +
                       std::to_string(batch) + ", seq_len " +
                       std::to_string(args.seq_len) + " and num_heads " +
                       std::to_string(args.num_heads) + " as key";
              });
  check_shape(kOp, {"seq_lens", get(in.seq_lens)}, 1, {{0, batch}},
              [&] { return "[batch] = " + bracketed({batch}); });
  for (const NamedTensor t :
       {NamedTensor{"slot_mapping", &in.slot_mapping},
        NamedTensor{"compress_lens", get(in.compress_lens)}}) {
    check_shape(kOp, t, 2, {{0, batch}, {1, args.num_heads}}, [&] {
      return "[batch, num_heads] = " + bracketed({batch, args.num_heads});
    });
  }
}

// Scenarios 4, 5: sequences packed one behind the other.
void check_packed_inputs(const ScatterInputs& in, ScatterArgs& args) {
  check_shape(kOp, {"key", &in.key}, 3, {},
              [] { return "[num_tokens, num_heads, head_size]"; });
  args.num_tokens = in.key.size(0);
  args.num_heads = in.key.size(1);
  const int64_t head_size = in.key.size(2);
  check_shape(kOp, {"value", get(in.value)}, 3,
              {{0, args.num_tokens}, {1, args.num_heads}, {2, head_size}}, [&] {
                return bracketed({args.num_tokens, args.num_heads, head_size}) +
                       " as key";
              });
  check_shape(kOp, {"seq_lens", get(in.seq_lens)}, 1, {},
              [] { return "[batch]"; });
  args.batch = get(in.seq_lens)->size(0);
  const int64_t num_tasks = bounded_product(args.batch, args.num_heads);
  for (const NamedTensor t :
       {NamedTensor{"slot_mapping", &in.slot_mapping},
        NamedTensor{"compress_lens", get(in.compress_lens)}}) {
    check_shape(kOp, t, 1, {{0, num_tasks}}, [&] {
      return "[batch * num_heads] = " + bracketed({num_tasks});
    });
  }
}

void check_window_offsets(const ScatterInputs& in, const ScatterArgs& args) {
  if (const at::Tensor* t = get(in.compress_seq_offsets)) {
    const int64_t num_tasks = args.batch * args.num_heads;
    check_shape(kOp, {"compress_seq_offsets", t}, 1, {{0, num_tasks}}, [&] {
      return "[batch * num_heads] = " + bracketed({num_tasks});
    });
  }
}

// Which dimension of a cache is what.
struct CacheDims {
  int64_t position;
  int64_t head;  // -1: heads are not a dimension of their own
  int64_t unit;  // -1: a head is one contiguous run
};

// A cache against the tensor that is written into it.
CacheDims check_cache(ScatterKind kind, NamedTensor source, NamedTensor cache) {
  const int64_t num_heads = source.tensor->size(-2);
  const int64_t head_size = source.tensor->size(-1);
  const auto as_source = [&] { return std::string(" as ") + source.name; };
  CacheDims dims{1, 2, -1};
  if (kind == ScatterKind::kNz) {
    const int64_t unit = nz_unit(*source.tensor);
    TORCH_CHECK_VALUE(head_size % unit == 0, kOp, ": ", source.name,
                      " must have a head_size that is a multiple of ", unit,
                      " (32 bytes) with cache_mode 'PA_NZ', got ",
                      source.tensor->sizes());
    const int64_t units = head_size / unit;
    const auto text = [&] {
      return "[num_blocks, " + std::to_string(num_heads * units) +
             ", block_size, " + std::to_string(unit) + "] or [num_blocks, " +
             std::to_string(num_heads) + ", " + std::to_string(units) +
             ", block_size, " + std::to_string(unit) + "] for " + source.name +
             " " + c10::str(source.tensor->sizes());
    };
    if (cache.tensor->dim() == 5) {
      check_shape(kOp, cache, 5, {{1, num_heads}, {2, units}, {4, unit}}, text);
      dims = {3, 1, 2};
    } else {
      check_shape(kOp, cache, 4, {{1, num_heads * units}, {3, unit}}, text);
      dims = {2, -1, 1};
    }
  } else if (kind == ScatterKind::kNhsd) {
    check_shape(kOp, cache, 4, {{1, num_heads}, {3, head_size}}, [&] {
      return "[num_blocks, num_heads, block_size, head_size] with num_heads " +
             std::to_string(num_heads) + " and head_size " +
             std::to_string(head_size) + as_source();
    });
    dims = {2, 1, -1};
  } else if (kind == ScatterKind::kNorm || kind == ScatterKind::kNct) {
    check_shape(kOp, cache, 4, {{2, num_heads}, {3, head_size}}, [&] {
      return "[num_blocks, block_size, num_heads, head_size] with num_heads " +
             std::to_string(num_heads) + " and head_size " +
             std::to_string(head_size) + as_source();
    });
  } else {
    check_shape(kOp, cache, 4, {{2, 1}, {3, head_size}}, [&] {
      return "[num_blocks, block_size, 1, head_size] with head_size " +
             std::to_string(head_size) + as_source();
    });
  }
  const int64_t block_size = cache.tensor->size(dims.position);
  TORCH_CHECK_VALUE(block_size >= 1, kOp, ": ", cache.name,
                    " must have a block_size of at least 1, got ",
                    cache.tensor->sizes());
  TORCH_CHECK_VALUE(kind != ScatterKind::kNz || block_size <= kMaxNzBlockSize,
                    kOp, ": ", cache.name,
                    " must have a block_size of at most ", kMaxNzBlockSize,
                    " with cache_mode 'PA_NZ', got ", cache.tensor->sizes());
  return dims;
}

ScatterPlane make_plane(ScatterKind kind, const at::Tensor& source,
                        const at::Tensor& cache, CacheDims dims) {
  const int64_t itemsize = source.element_size();
  const int64_t rank = source.dim();
  ScatterPlane plane;
  // Nct's source has not been found to lie within its storage, which may be
  // nothing: no address is formed then.
  plane.src = source.storage().data() == nullptr
                  ? nullptr
                  : static_cast<const char*>(source.const_data_ptr());
  plane.dst = static_cast<char*>(cache.mutable_data_ptr());
  plane.dtype = source.scalar_type();
  plane.head_size = source.size(-1);
  plane.head_bytes = plane.head_size * itemsize;
  if (kind != ScatterKind::kNct) {  // whose strides are not the tensor's
    plane.src_batch_stride = rank == 4 ? byte_stride(source, 0) : 0;
    plane.src_token_stride = byte_stride(source, rank - 3);
    plane.src_head_stride = byte_stride(source, rank - 2);
  }
  plane.dst_block_stride = byte_stride(cache, 0);
  plane.dst_token_stride = byte_stride(cache, dims.position);
  if (dims.unit < 0) {
    plane.unit_bytes = plane.head_bytes;
    plane.dst_head_stride = byte_stride(cache, dims.head);
  } else {
    plane.unit_bytes = 32;
    plane.dst_unit_stride = byte_stride(cache, dims.unit);
    // In the 4-D form heads follow one another in the unit dimension.
    plane.dst_head_stride = dims.head < 0
                                ? plane.head_bytes / 32 * plane.dst_unit_stride
                                : byte_stride(cache, dims.head);
  }
  return plane;
}

// The half of a packed cache that begins `start` elements behind its first.
ScatterPlane packed_plane(const at::Tensor& source, const PackedCache& cache,
                          int64_t start) {
  const int64_t itemsize = source.element_size();
  ScatterPlane plane;
  plane.src = static_cast<const char*>(source.const_data_ptr());
  plane.dst =
      static_cast<char*>(cache.tensor->mutable_data_ptr()) + start * itemsize;
  plane.dtype = source.scalar_type();
  plane.head_size = source.size(2);
  plane.head_bytes = plane.head_size * itemsize;
  plane.unit_bytes = plane.head_bytes;
  plane.src_token_stride = byte_stride(source, 0);
  plane.src_head_stride = byte_stride(source, 1);
  plane.dst_block_stride = cache.byte_stride(0);
  plane.dst_token_stride = cache.byte_stride(1);
  plane.dst_head_stride = cache.byte_stride(2);
  return plane;
}

// Nct: the caller's strides take the place of the tensor's own. Gives the
// region that is read.
Region apply_nct(NamedTensor source, int64_t stride, int64_t offset,
                 int64_t num_tokens, ScatterPlane& plane) {
  const at::Tensor& t = *source.tensor;
  const int64_t itemsize = t.element_size();
  const int64_t width = t.size(1) * t.size(2);
  const int64_t capacity =
      static_cast<int64_t>(t.storage().nbytes()) / itemsize -
      t.storage_offset();
  Region region;
  region.name = source.name;
  region.storage_offset = t.storage_offset();
  if (num_tokens > 0 && width > 0) {
    int64_t end = 0;
    const bool within = !__builtin_mul_overflow(num_tokens - 1, stride, &end) &&
                        !__builtin_add_overflow(end, offset, &end) &&
                        !__builtin_add_overflow(end, width, &end) &&
                        end <= capacity;
    TORCH_CHECK_VALUE(within, kOp, ": strides must keep ", source.name,
                      " within the ", capacity,
                      " elements of its storage from its data pointer, got "
                      "stride ",
                      stride, " and offset ", offset, " for ", num_tokens,
                      " tokens of ", width, " elements");
    region.base = reinterpret_cast<uintptr_t>(plane.src) + offset * itemsize;
    region.run = width * itemsize;
    plane.src += offset * itemsize;
    // Of a single token the stride is not bounded: its bytes may overflow.
    if (num_tokens > 1) {
      plane.src_token_stride = stride * itemsize;
      region.dims.push_back({plane.src_token_stride, num_tokens});
    }
  }
  plane.src_head_stride = plane.head_bytes;
  return region;
}

}  // namespace

ScatterArgs check_scatter_args(const ScatterInputs& in) {
  const at::Tensor* value = get(in.value);
  const at::Tensor* value_cache = get(in.value_cache);
  const at::Tensor* compress_lens = get(in.compress_lens);
  const at::Tensor* compress_seq_offsets = get(in.compress_seq_offsets);
  const at::Tensor* seq_lens = get(in.seq_lens);
  const NamedTensor key_arg{"key", &in.key};
  const NamedTensor value_arg{"value", value};
  const NamedTensor key_cache_arg{"key_cache", &in.key_cache};
  const NamedTensor value_cache_arg{"value_cache", value_cache};
  const NamedTensor slots_arg{"slot_mapping", &in.slot_mapping};
  const NamedTensor lens_arg{"compress_lens", compress_lens};
  const NamedTensor offsets_arg{"compress_seq_offsets", compress_seq_offsets};
  const NamedTensor seq_lens_arg{"seq_lens", seq_lens};

  check_tensors(kOp, {key_arg, value_arg, key_cache_arg, value_cache_arg,
                      slots_arg, lens_arg, offsets_arg, seq_lens_arg});
  const Scenario scenario = choose_scenario(in);
  check_presence(in, scenario);
  check_dtypes(in, scenario.kind);

  ScatterArgs args;
  args.kind = scenario.kind;
  args.scenario =
      scenario.number == 2 && value == nullptr ? 6 : scenario.number;
  if (!args.is_compressed()) {
    check_token_inputs(key_arg, value_arg, slots_arg,
                       args.kind == ScatterKind::kNorm, args);
  } else if (args.scenario == 3) {
    check_padded_inputs(in, args);
  } else {
    check_packed_inputs(in, args);
  }
  check_window_offsets(in, args);

  const CacheDims key_dims = check_cache(args.kind, key_arg, key_cache_arg);
  args.num_blocks = in.key_cache.size(0);
  args.block_size = in.key_cache.size(key_dims.position);
  CacheDims value_dims = key_dims;
  if (value != nullptr) {
    value_dims = check_cache(args.kind, value_arg, value_cache_arg);
    TORCH_CHECK_VALUE(
        value_cache->size(0) == args.num_blocks &&
            value_cache->size(value_dims.position) == args.block_size,
        kOp, ": value_cache must have num_blocks ", args.num_blocks,
        " and block_size ", args.block_size, " as key_cache, got ",
        value_cache->sizes());
  }
  if (!args.is_compressed()) {
    check_capacity(args);
  }

  const bool nct = args.kind == ScatterKind::kNct;
  for (const NamedTensor t : {key_arg, value_arg}) {
    if (t.tensor != nullptr && !nct) {
      check_dense_last_dim(kOp, t);
    }
  }
  for (const NamedTensor t : {key_cache_arg, value_cache_arg}) {
    if (t.tensor != nullptr) {
      check_dense_last_dim(kOp, t);
    }
  }

  c10::SmallVector<NamedTensor, 8> read;
  if (!nct) {
    read.append({key_arg, value_arg});
  }
  read.append({key_cache_arg, value_cache_arg, slots_arg, lens_arg, offsets_arg,
               seq_lens_arg});
  for (const NamedTensor t : read) {
    if (t.tensor != nullptr) {
      check_within_storage(kOp, t);
    }
  }

  args.has_value = value != nullptr;
  args.key = make_plane(args.kind, in.key, in.key_cache, key_dims);
  if (args.has_value) {
    args.value = make_plane(args.kind, *value, *value_cache, value_dims);
  }
  c10::SmallVector<Region, 6> inputs;
  if (nct) {
    const at::IntArrayRef strides = *in.strides;
    const int64_t no_offsets[2] = {0, 0};
    const at::IntArrayRef offsets =
        in.offsets.has_value() ? *in.offsets : at::IntArrayRef(no_offsets);
    inputs.push_back(
        apply_nct(key_arg, strides[0], offsets[0], args.num_tokens, args.key));
    if (args.has_value) {
      inputs.push_back(apply_nct(value_arg, strides[1], offsets[1],
                                 args.num_tokens, args.value));
    }
  } else {
    inputs.push_back(region_of(key_arg));
    if (args.has_value) {
      inputs.push_back(region_of(value_arg));
    }
  }
  for (const NamedTensor t : {slots_arg, lens_arg, offsets_arg, seq_lens_arg}) {
    if (t.tensor != nullptr) {
      inputs.push_back(region_of(t));
    }
  }
  c10::SmallVector<Region, 2> caches;
  for (const NamedTensor t : {key_cache_arg, value_cache_arg}) {
    if (t.tensor != nullptr) {
      check_no_self_overlap(kOp, t);
      caches.push_back(region_of(t));
    }
  }
  check_disjoint(kOp, caches, inputs);

  args.slot_mapping = IndexView(in.slot_mapping);
  if (compress_lens != nullptr) {
    args.compress_lens = IndexView(*compress_lens);
  }
  if (compress_seq_offsets != nullptr) {
    args.compress_seq_offsets = IndexView(*compress_seq_offsets);
  }
  if (seq_lens != nullptr) {
    args.seq_lens = IndexView(*seq_lens);
  }
  return args;
}

PackedScatterArgs check_packed_scatter_args(const PackedScatterInputs& in) {
  const NamedTensor key{"key", &in.key};
  const NamedTensor value{"value", &in.value};
  const NamedTensor cache{"kv_cache", &in.kv_cache};
  const NamedTensor slots{"slot_mapping", &in.slot_mapping};
  check_tensors(kPackedOp, {key, value, cache, slots});
  const PackedLayout& layout = packed_layout(kPackedOp, in.kv_layout);
  check_copy_dtype(kPackedOp, key);
  check_same_dtype(kPackedOp, value, key);
  check_same_dtype(kPackedOp, cache, key);
  check_index_dtype(kPackedOp, slots);

  ScatterArgs args;
  args.names = {kPackedOp, cache.name, cache.name, layout.name};
  check_token_inputs(key, value, slots, /*may_be_padded=*/false, args);
  const PackedCache packed =
      check_packed_cache(kPackedOp, layout, key, value, in.kv_cache);
  args.num_blocks = packed.num_blocks();
  args.block_size = packed.block_size();
  check_capacity(args);
  for (const NamedTensor t : {key, value, cache}) {
    check_dense_last_dim(kPackedOp, t);
  }
  for (const NamedTensor t : {key, value, cache, slots}) {
    check_within_storage(kPackedOp, t);
  }
  check_halves_apart(kPackedOp, packed);
  check_disjoint(kPackedOp, {region_of(cache)},
                 {region_of(key), region_of(value), region_of(slots)});

  args.has_value = true;
  args.key = packed_plane(in.key, packed, 0);
  args.value = packed_plane(in.value, packed, packed.value_start);
  args.slot_mapping = IndexView(in.slot_mapping);
  return {args, packed};
}

int64_t rows_written(ScatterKind kind, const CompressedHead& head) {
  if (kind == ScatterKind::kAlibi) {
    return head.window;
  }
  if (is_uncompressed(head)) {
    return head.length;
  }
  return head.length - head.window + (kind == ScatterKind::kRope ? 1 : 0);
}

CompressedHead compressed_head(const ScatterArgs& args, int64_t task) {
  CompressedHead head;
  head.slot = args.slot_mapping[task];
  head.length = args.seq_lens[task / args.num_heads];
  head.window = args.compress_lens[task];
  head.offset =
      args.kind == ScatterKind::kAlibi ? -1 : args.compress_seq_offsets[task];
  head.first_token = 0;
  return head;
}

namespace {

// The largest slot decides; only a failing call looks for the first bad one.
template <typename Index>
bool all_below(const Index* slots, int64_t count, int64_t stride,
               int64_t limit) {
  Index largest = -1;
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, slots[i]);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, slots[i * stride]);
    }
  }
  return static_cast<int64_t>(largest) < limit;
}

void check_slots(const ScatterArgs& args) {
  const IndexView& slots = args.slot_mapping;
  const int64_t limit = args.num_slots();
  const bool valid =
      slots.size == 0 ||
      (slots.is_int64 ? all_below(static_cast<const int64_t*>(slots.data),
                                  slots.size, slots.stride_row, limit)
                      : all_below(static_cast<const int32_t*>(slots.data),
                                  slots.size, slots.stride_row, limit));
  if (valid) {
    return;
  }
  for (int64_t i = 0; i < slots.size; ++i) {
    TORCH_CHECK_INDEX(slots[i] < limit, args.names.op, ": slot_mapping[", i,
                      "] must be less than num_blocks * block_size = ", limit,
                      ", got ", slots[i]);
  }
}

// No stream prints 128 bits.
std::string decimal(unsigned __int128 number) {
  std::string digits;
  do {
    digits.insert(digits.begin(), static_cast<char>('0' + number % 10));
    number /= 10;
  } while (number != 0);
  return digits;
}

void check_seq_lens(const ScatterArgs& args) {
  const IndexView& lens = args.seq_lens;
  unsigned __int128 total = 0;  // of lengths that are not negative
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = lens[b];
    if (args.scenario == 3) {
      TORCH_CHECK_VALUE(length >= 0 && length <= args.seq_len, kOp,
                        ": seq_lens[", b, "] must be between 0 and seq_len ",
                        args.seq_len, ", got ", length);
      continue;
    }
    TORCH_CHECK_VALUE(length >= 0, kOp, ": seq_lens[", b,
                      "] must not be negative, got ", length);
    total += static_cast<uint64_t>(length);
  }
  TORCH_CHECK_VALUE(
      args.scenario == 3 || total == static_cast<uint64_t>(args.num_tokens),
      kOp, ": seq_lens must sum to the ", args.num_tokens,
      " tokens of key, got ", decimal(total));
}

void check_compressed_heads(const ScatterArgs& args) {
  const int64_t num_slots = args.num_slots();
  for (int64_t task = 0; task < args.slot_mapping.size; ++task) {
    const CompressedHead head = compressed_head(args, task);
    if (head.slot < 0) {
      continue;
    }
    const int64_t b = task / args.num_heads;
    TORCH_CHECK_VALUE(head.window >= 0 && head.window <= head.length, kOp,
                      ": compress_lens[", args.compress_lens.position(task),
                      "] must be between 0 and seq_lens[", b,
                      "] = ", head.length, ", got ", head.window);
    TORCH_CHECK_VALUE(
        head.offset == -1 || head.offset == head.length ||
            (head.offset >= 0 && head.offset <= head.length - head.window),
        kOp, ": compress_seq_offsets[", task, "] must be -1, seq_lens[", b,
        "] = ", head.length, " or between 0 and seq_lens[", b,
        "] - compress_lens[", args.compress_lens.position(task),
        "] = ", head.length - head.window, ", got ", head.offset);
    const int64_t rows = rows_written(args.kind, head);
    TORCH_CHECK_INDEX(head.slot <= num_slots - rows, kOp, ": slot_mapping[",
                      args.slot_mapping.position(task),
                      "] must leave room for its ", rows,
                      " rows in num_blocks * block_size = ", num_slots,
                      " slots, got ", head.slot);
  }
}

}  // namespace

void check_scatter_values(const ScatterArgs& args) {
  if (!args.is_compressed()) {
    check_slots(args);
    return;
  }
  check_seq_lens(args);
  check_compressed_heads(args);
}

}  // namespace pacache
