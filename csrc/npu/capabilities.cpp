#include "capabilities.h"

#include <algorithm>
#include <limits>
#include <ostream>

namespace pacache::npu {
namespace {

constexpr const char* kScatter = "scatter_pa_kv_cache";
constexpr const char* kLoad = "paged_cache_load";
constexpr const char* kFirst = "8.3.RC1";

std::vector<Capability> make_table() {
  const std::vector<Soc> a2a3 = {Soc::kA2, Soc::kA3};
  const std::vector<Soc> only950 = {Soc::k950};
  const std::vector<at::ScalarType> copies = {at::kHalf, at::kBFloat16,
                                              at::kChar};
  const std::vector<at::ScalarType> means = {at::kHalf, at::kBFloat16};
  const std::vector<at::ScalarType> wide = {
      at::kFloat, at::kHalf,   at::kBFloat16, at::kChar,  at::kByte,
      at::kShort, at::kUInt16, at::kInt,      at::kUInt32};
  std::vector<Capability> table = {
      {kScatter, 1, "PA_NZ", a2a3, kFirst, copies,
       "value int8 only with key int8; dense caches; strided key and value "
       "are made dense"},
      {kScatter, 2, "None", a2a3, kFirst, copies,
       "key and value strided over tokens are passed as Nct; caches with a "
       "padded block stride from 9.1.0.pre, dense before"},
      {kScatter, 2, "Nct", a2a3, kFirst, copies,
       "equal strides and no int8 before 9.0.0-beta.2, otherwise the inputs "
       "are made dense; dense caches"},
      {kScatter, 4, "Alibi", a2a3, kFirst, copies,
       "head_size a multiple of 32; dense caches; as many slots as tokens"},
      {kScatter, 5, "Rope", a2a3, kFirst, means,
       "head_size a multiple of 32; dense caches; as many slots as tokens; "
       "no negative slot"},
      {kScatter, 5, "Omni", a2a3, kFirst, means,
       "head_size a multiple of 32; dense caches; as many slots as tokens"},
      {kScatter, 6, "None", a2a3, kFirst, copies,
       "32-byte tokens before 9.0.0-beta.2; dense cache"},
      {kScatter, 6, "Nct", a2a3, kFirst, copies,
       "32-byte tokens and no int8 view before 9.0.0-beta.2; dense cache"},
      {kScatter, 7, "NHSD", a2a3, "9.1.0-beta.1", copies,
       "32-byte heads, at most 4095 of them; one token's key and value at "
       "most 191 KiB; dense caches; no negative slot"},
      {kScatter, 2, "None", only950, "8.5.0", wide,
       "dense key, value and caches; negative slots from 9.0.0-beta.2"},
      {kScatter, 3, "None", only950, "8.5.0", wide,
       "without compress_seq_offsets (the device's tail behind a window is "
       "not what is documented); dense tensors"},
      {kLoad, 0, "Norm", a2a3, kFirst, copies,
       "tokens a multiple of 32 bytes; blocks below 2 GiB; dense tensors"},
      {kLoad, 0, "PA_NZ", a2a3, kFirst, copies,
       "value of 16 bits with key int8 from 8.5.0; block_size a multiple of "
       "16; tokens of at most 144 KiB; at most 10223 table columns; dense "
       "tensors"},
  };
  for (Capability& row : table) {
    row.oldest = parse_cann_version(row.since);
  }
  return table;
}

std::string place(const Product& product) {
  return c10::str(
      soc_family(product.soc), " (", product.soc_name, ") with CANN ",
      product.cann_text.empty() ? "of unknown version" : product.cann_text);
}

// What a call asks for, in an error's words, which are only put together when
// there is an error.
struct Scenario {
  const ScatterArgs& args;
};
std::ostream& operator<<(std::ostream& out, const Scenario& what) {
  return out << "scenario " << what.args.scenario << " ("
             << (what.args.kind == ScatterKind::kNz ? "cache_mode '"
                                                    : "scatter_mode '")
             << mode_of(what.args) << "')";
}
struct Layout {
  const LoadArgs& args;
};
std::ostream& operator<<(std::ostream& out, const Layout& what) {
  return out << "cache_mode '" << (what.args.nz ? "PA_NZ" : "Norm") << "'";
}

bool contains(const std::vector<at::ScalarType>& dtypes, at::ScalarType dtype) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

std::string dtype_list(const std::vector<at::ScalarType>& dtypes) {
  std::string text;
  for (const at::ScalarType dtype : dtypes) {
    text += (text.empty() ? "" : ", ") + dtype_name(dtype);
  }
  return text;
}

// The row for a call, or NotImplementedError.
template <typename What>
const Capability& require_row(const Product& product, const char* row_op,
                              int scenario, const char* mode, const char* op,
                              const What& what) {
  const Capability* row = find_capability(product, row_op, scenario, mode);
  TORCH_CHECK_NOT_IMPLEMENTED(row != nullptr, op, ": ", what,
                              " is not available on ", place(product));
  return *row;
}

template <typename What>
void check_dtype(const Product& product, const Capability& row, const char* op,
                 const char* name, at::ScalarType dtype, const What& what) {
  TORCH_CHECK_NOT_IMPLEMENTED(contains(row.dtypes, dtype), op, ": ", name,
                              " must be one of ", dtype_list(row.dtypes),
                              " in ", what, " on ", place(product), ", got ",
                              dtype_name(dtype));
}

template <typename What>
void require_dense(const Product& product, const CallNames& names,
                   const What& what, NamedTensor t) {
  const bool is_half =
      names.kv_layout != nullptr &&
      (t.name == names.key_cache || t.name == names.value_cache);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_half || t.tensor->is_contiguous(), names.op,
      ": kv_cache must hold a contiguous key cache and a contiguous value "
      "cache in ",
      what, " on ", place(product),
      " (the device reads and writes them as such, and they are never copied), "
      "got kv_layout '",
      names.kv_layout, "' with caches of shape ", t.tensor->sizes(),
      " and strides ", t.tensor->strides());
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.tensor->is_contiguous(), names.op, ": ", t.name,
      " must be contiguous in ", what, " on ", place(product),
      " (the device reads and writes it as such, and it is never copied), got "
      "shape ",
      t.tensor->sizes(), " and strides ", t.tensor->strides());
}

}  // namespace

const char* mode_of(const ScatterArgs& args) {
  if (args.scenario == 3) {
    return "None";
  }
  switch (args.kind) {
    case ScatterKind::kNz:
      return "PA_NZ";
    case ScatterKind::kNorm:
      return "None";
    case ScatterKind::kNct:
      return "Nct";
    case ScatterKind::kAlibi:
      return "Alibi";
    case ScatterKind::kRope:
      return "Rope";
    case ScatterKind::kOmni:
      return "Omni";
    default:
      return "NHSD";
  }
}

const CannVersion kFourteenArguments = parse_cann_version("8.3.RC1");
const CannVersion kRewrittenNd = parse_cann_version("9.0.0-beta.2");
const CannVersion kBlockStrides = parse_cann_version("9.1.0.pre");

const std::vector<Capability>& capability_table() {
  static const std::vector<Capability> table = make_table();
  return table;
}

const Capability* find_capability(const Product& product, std::string_view op,
                                  int scenario, std::string_view mode) {
  for (const Capability& row : capability_table()) {
    const bool has_soc = std::find(row.socs.begin(), row.socs.end(),
                                   product.soc) != row.socs.end();
    if (row.scenario == scenario && row.op == op && row.mode == mode &&
        has_soc && product.cann >= row.oldest) {
      return &row;
    }
  }
  return nullptr;
}

bool takes_int64_slots(const Product& product, const ScatterArgs& args) {
  if (product.soc != Soc::kA2 && product.soc != Soc::kA3) {
    return false;
  }
  const bool nd =
      args.kind == ScatterKind::kNorm || args.kind == ScatterKind::kNct;
  return args.kind == ScatterKind::kNz ||
         (nd && args.scenario != 3 && product.cann >= kRewrittenNd);
}

void require_callable(const char* op, const Product& product) {
  TORCH_CHECK(product.cann.is_known(), op,
              ": the CANN version must be known before its functions are "
              "called (their argument lists differ), and torch_npu found '",
              product.cann_text,
              "'; set PACACHE_CANN_VERSION, for example to 8.5.0");
  TORCH_CHECK_NOT_IMPLEMENTED(
      product.cann >= kFourteenArguments, op, ": needs CANN ", kFirst,
      " or later (older releases have the same function names with other "
      "arguments), got ",
      place(product));
}

void check_scatter_supported(const Product& product, const ScatterArgs& args) {
  require_callable(args.names.op, product);
  const char* mode = mode_of(args);
  const Scenario what{args};
  const Capability& row =
      require_row(product, kScatter, args.scenario, mode, args.names.op, what);
  check_dtype(product, row, args.names.op, "key", args.key.dtype, what);
  if (args.has_value) {
    check_dtype(product, row, args.names.op, "value", args.value.dtype, what);
  }
  const auto unsupported = [&](const char* name, const char* rule,
                               const auto&... found) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, args.names.op, ": ", name, " ", rule,
                                " in ", what, " on ", place(product), ", got ",
                                found...);
  };
  if (args.num_slots() > std::numeric_limits<int32_t>::max()) {
    unsupported(args.names.key_cache, "must have fewer than 2^31 slots",
                args.num_slots());
  }
  const bool rewritten = product.cann >= kRewrittenNd;
  switch (args.kind) {
    case ScatterKind::kNz:
      if (args.value.dtype == at::kChar && args.key.dtype != at::kChar) {
        unsupported("value", "may be int8 only when key is", "key ",
                    dtype_name(args.key.dtype));
      }
      break;
    case ScatterKind::kNorm:
    case ScatterKind::kNct:
      if (args.scenario == 6 && !rewritten &&
          args.num_heads * args.key.head_bytes % 32 != 0) {
        unsupported("key",
                    "must have tokens of a multiple of 32 bytes (the rest of "
                    "a token would be lost)",
                    args.num_heads * args.key.head_bytes, " bytes");
      }
      break;
    case ScatterKind::kNhsd:
      for (const ScatterPlane* plane : {&args.key, &args.value}) {
        const char* name = plane == &args.key ? "key" : "value";
        if (plane->head_bytes % 32 != 0) {
          unsupported(name, "must have heads of a multiple of 32 bytes",
                      plane->head_bytes, " bytes");
        }
        if (args.block_size * plane->head_size >
            std::numeric_limits<uint32_t>::max()) {
          unsupported(name, "must have block_size * head_size below 2^32",
                      args.block_size * plane->head_size);
        }
      }
      if (args.num_heads > 4095) {
        unsupported("key", "must have at most 4095 heads", args.num_heads);
      }
      if (args.num_heads * (args.key.head_bytes + args.value.head_bytes) >
          196608 - 1024) {
        unsupported(
            "key",
            "and value together must have tokens of at most 195584 "
            "bytes",
            args.num_heads * (args.key.head_bytes + args.value.head_bytes));
      }
      break;
    default:
      if (args.scenario == 3) {
        if (args.kind == ScatterKind::kRope) {
          unsupported("compress_seq_offsets",
                      "must be None (the device loses the tail behind a "
                      "window)",
                      "a tensor");
        }
        break;
      }
      if (args.key.head_size % 32 != 0) {
        unsupported("key", "must have a head_size that is a multiple of 32",
                    args.key.head_size);
      }
      if (args.num_slots() < args.num_tokens) {
        unsupported("key_cache", "must have as many slots as key has tokens",
                    args.num_slots(), " slots and ", args.num_tokens,
                    " tokens");
      }
      break;
  }
}

void check_load_supported(const Product& product, const LoadArgs& args,
                          at::ScalarType key_dtype,
                          at::ScalarType value_dtype) {
  const CallNames& names = args.names;
  require_callable(names.op, product);
  const char* mode = args.nz ? "PA_NZ" : "Norm";
  const Layout what{args};
  const Capability& row = require_row(product, kLoad, 0, mode, names.op, what);
  check_dtype(product, row, names.op, names.key_cache, key_dtype, what);
  check_dtype(product, row, names.op, names.value_cache, value_dtype, what);
  const auto unsupported = [&](const char* name, const char* rule,
                               const auto&... found) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, names.op, ": ", name, " ", rule, " in ",
                                what, " on ", place(product), ", got ",
                                found...);
  };
  if (key_dtype != value_dtype) {
    if (key_dtype != at::kChar) {
      unsupported("value_cache", "may differ in dtype only from an int8 key",
                  dtype_name(value_dtype));
    }
    if (!(product.cann >= parse_cann_version("8.5.0"))) {
      unsupported("value_cache", "may differ in dtype only from CANN 8.5.0 on",
                  dtype_name(value_dtype));
    }
  }
  if (args.num_blocks > std::numeric_limits<int32_t>::max()) {
    unsupported(names.key_cache, "must have fewer than 2^31 blocks",
                args.num_blocks);
  }
  if (args.nz && args.block_size % 16 != 0) {
    unsupported("key_cache", "must have a block_size that is a multiple of 16",
                args.block_size);
  }
  if (args.nz && args.block_size > 65536) {
    unsupported("key_cache", "must have a block_size of at most 65536",
                args.block_size);
  }
  if (args.nz && args.num_columns > 10223) {
    unsupported("block_tables", "must have at most 10223 columns",
                args.num_columns);
  }
  for (const LoadPlane* plane : {&args.key, &args.value}) {
    const char* name = plane == &args.key ? names.key_cache : names.value_cache;
    const int64_t token_bytes = plane->num_heads * plane->head_bytes;
    if (!args.nz && token_bytes % 32 != 0) {
      unsupported(name, "must have tokens of a multiple of 32 bytes",
                  token_bytes, " bytes");
    }
    if (args.nz && token_bytes > 147456) {
      unsupported(name, "must have tokens of at most 147456 bytes", token_bytes,
                  " bytes");
    }
    if (args.block_size * token_bytes > std::numeric_limits<int32_t>::max()) {
      unsupported(name, "must have blocks of fewer than 2^31 bytes",
                  args.block_size * token_bytes, " bytes");
    }
    // Device kernels move 32-byte lines.
    if (reinterpret_cast<uintptr_t>(plane->src) % 32 != 0 ||
        reinterpret_cast<uintptr_t>(plane->dst) % 32 != 0) {
      unsupported(name, "and its output must begin at a multiple of 32 bytes",
                  "another address");
    }
  }
}

void check_sibling_supported(const Product& product, const LoadArgs& args,
                             const at::Tensor& key_cache,
                             const at::Tensor& value_cache) {
  const auto check = [&](bool taken, const char* name, const char* rule,
                         const auto& found) {
    TORCH_CHECK_NOT_IMPLEMENTED(taken, args.names.op, ": ", name, " ", rule,
                                " with aclnnGatherPaKvCache in ", Layout{args},
                                " on ", place(product),
                                " (ATB's operator takes it), got ", found);
  };
  check(key_cache.scalar_type() == value_cache.scalar_type(), "value_cache",
        "must have the dtype of key_cache",
        dtype_name(value_cache.scalar_type()));
  for (const NamedTensor cache :
       {NamedTensor{args.names.key_cache, &key_cache},
        NamedTensor{args.names.value_cache, &value_cache}}) {
    check(cache.tensor->numel() <= std::numeric_limits<int32_t>::max(),
          cache.name, "must have fewer than 2^31 elements",
          cache.tensor->numel());
  }
}

void require_dense(const Product& product, const ScatterArgs& args,
                   NamedTensor t) {
  require_dense(product, args.names, Scenario{args}, t);
}

void require_both_or_none(const Product& product, const char* op, bool has_keys,
                          bool has_values) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_keys == has_values, op, ": ", has_keys ? "value" : "key",
      " must have elements as ", has_keys ? "key" : "value", " on ",
      place(product), ", got a head_size of 0");
}

void require_dense(const Product& product, const LoadArgs& args,
                   NamedTensor t) {
  require_dense(product, args.names, Layout{args}, t);
}

}  // namespace pacache::npu
