// What can which chip do with which CANN?
//
// One table. It was made by reading the operators' sources and documents;
// nothing in it has been run on hardware.

#pragma once

#include <string_view>
#include <vector>

#include "../load_args.h"
#include "../scatter_args.h"
#include "product.h"

namespace pacache::npu {

// One row: a scenario of scatter_pa_kv_cache, or a layout of paged_cache_load,
// on a chip family from a version on.
struct Capability {
  const char* op;
  int scenario;      // 0 for paged_cache_load
  const char* mode;  // scatter_mode, or cache_mode where that says it
  std::vector<Soc> socs;
  const char* since;  // oldest CANN version
  std::vector<at::ScalarType> dtypes;
  const char* limits;       // in words, for the user
  CannVersion oldest = {};  // `since`, to compare with
};

const std::vector<Capability>& capability_table();

// The mode by which the table names a call: cache_mode in NZ, else
// scatter_mode.
const char* mode_of(const ScatterArgs& args);

// The row that covers a call on a product, or null.
const Capability* find_capability(const Product& product, std::string_view op,
                                  int scenario, std::string_view mode);

// NotImplementedError, naming product, version and scenario, when the device
// cannot do what the arguments ask for. Made before any CANN call.
void check_scatter_supported(const Product& product, const ScatterArgs& args);
void check_load_supported(const Product& product, const LoadArgs& args,
                          at::ScalarType key_dtype, at::ScalarType value_dtype);

// As check_load_supported, for what only ATB's operator takes and
// aclnnGatherPaKvCache does not.
void check_sibling_supported(const Product& product, const LoadArgs& args,
                             const at::Tensor& key_cache,
                             const at::Tensor& value_cache);

// NotImplementedError, as above, unless a cache or an output is dense.
void require_dense(const Product& product, const ScatterArgs& args,
                   NamedTensor t);
void require_dense(const Product& product, const LoadArgs& args, NamedTensor t);

// NotImplementedError, as above, when only one of key and value has elements:
// an operator of CANN takes both or is not called at all.
void require_both_or_none(const Product& product, const char* op, bool has_keys,
                          bool has_values);

// Does the device read int64 slots as what they are? Other kernels take every
// index for int32 words, whatever its dtype.
bool takes_int64_slots(const Product& product, const ScatterArgs& args);

// The versions at which the device code changed.
// 14 arguments; alphas before it take 11 under the same name.
extern const CannVersion kFourteenArguments;
// Rewritten ND kernels: Nct honours the value's stride and takes int8,
// key-only copies unaligned tokens, 64-bit slots.
extern const CannVersion kRewrittenNd;
// Hand-written first phase: caches with a padded block stride.
extern const CannVersion kBlockStrides;

// Is the process's CANN at least this? RuntimeError when it is too old for the
// 14 arguments or cannot be told.
void require_callable(const char* op, const Product& product);

}  // namespace pacache::npu
