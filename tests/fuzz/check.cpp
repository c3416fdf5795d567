#include "check.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "call.h"
#include "expectation.h"

namespace pacache::testing {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Scatter = void(const at::Tensor&, const OptionalTensor&,
                     const at::Tensor&, const OptionalTensor&,
                     const at::Tensor&, const OptionalTensor&,
                     const OptionalTensor&, const OptionalTensor&,
                     c10::string_view, c10::string_view,
                     at::OptionalIntArrayRef, at::OptionalIntArrayRef);
using Load = void(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const OptionalTensor&, c10::string_view, bool);

using ScatterPacked = void(const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&,
                           c10::string_view);
using LoadPacked = void(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const at::Tensor&, const at::Tensor&, c10::string_view,
                        const OptionalTensor&, bool);

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

[[noreturn]] void fail(const char* what, const std::string& detail) {
  std::fprintf(stderr, "%s: %s\n", what, detail.c_str());
  std::abort();
}

// The tensors of a call over storages of their own.
class Tensors {
 public:
  explicit Tensors(const Call& call) {
    for (const auto& bytes : call.memory) {
      storages_.push_back(
          at::empty({static_cast<int64_t>(bytes.size())}, at::kByte));
      if (!bytes.empty()) {
        std::memcpy(storages_.back().mutable_data_ptr(), bytes.data(),
                    bytes.size());
      }
    }
    for (const Argument& t : call.arguments) {
      tensors_.push_back(make(t));
    }
  }

  const OptionalTensor& operator[](size_t i) const { return tensors_[i]; }

  const uint8_t* storage(size_t i) const {
    return static_cast<const uint8_t*>(storages_[i].const_data_ptr());
  }

 private:
  OptionalTensor make(const Argument& t) {
    switch (t.kind) {
      case Argument::kNone:
        return std::nullopt;
      case Argument::kSparse:
        return at::empty({2, 2},
                         at::TensorOptions(t.dtype).layout(at::kSparse));
      case Argument::kMeta:
        return at::empty({2, 2}, at::TensorOptions(t.dtype).device(at::kMeta));
      default:
        break;
    }
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storages_[t.storage].storage()),
        c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(t.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes, t.strides,
                                                        t.offset);
    if (t.kind == Argument::kRequiresGrad && at::isFloatingType(t.dtype)) {
      tensor.set_requires_grad(true);
    }
    return tensor;
  }

  std::vector<at::Tensor> storages_;
  std::vector<OptionalTensor> tensors_;
};

void make_packed_call(const Call& call, const Tensors& t) {
  if (call.is_load) {
    static const auto load =
        find<LoadPacked>("pacache::paged_cache_load_packed");
    load.call(*t[kKeyCache], *t[kBlockTables], *t[kContextLens], *t[kKey],
              *t[kValue], call.kv_layout, t[kSeqStarts], call.is_cumsum);
    return;
  }
  static const auto scatter =
      find<ScatterPacked>("pacache::scatter_pa_kv_cache_packed");
  scatter.call(*t[kKey], *t[kValue], *t[kKeyCache], *t[kSlotMapping],
               call.kv_layout);
}

void make_call(const Call& call, const Tensors& t) {
  if (!call.kv_layout.empty()) {
    make_packed_call(call, t);
    return;
  }
  if (call.is_load) {
    static const auto load = find<Load>("pacache::paged_cache_load");
    load.call(*t[kKeyCache], *t[kValueCache], *t[kBlockTables],
              *t[kContextLens], *t[kKey], *t[kValue], t[kSeqStarts],
              call.cache_mode, call.is_cumsum);
    return;
  }
  const auto list = [](const std::optional<std::vector<int64_t>>& given) {
    return given ? at::OptionalIntArrayRef(*given)
                 : at::OptionalIntArrayRef(std::nullopt);
  };
  static const auto scatter = find<Scatter>("pacache::scatter_pa_kv_cache");
  scatter.call(*t[kKey], t[kValue], *t[kKeyCache], t[kValueCache],
               *t[kSlotMapping], t[kCompressLens], t[kCompressSeqOffsets],
               t[kSeqLens], call.cache_mode, call.scatter_mode,
               list(call.strides), list(call.offsets));
}

// Does the operator take this argument at all?
bool is_passed(const Call& call, size_t i) {
  if (call.kv_layout.empty()) {
    return true;
  }
  return i != kValueCache && (call.is_load || i <= kSlotMapping);
}

// The schema has these; without one there is no call.
bool has_needed(const Call& call) {
  std::vector<size_t> needed{kKey, kKeyCache, kSlotMapping};
  if (!call.kv_layout.empty() || call.is_load) {
    needed.push_back(kValue);
  }
  if (call.is_load) {
    needed.push_back(kContextLens);
    if (call.kv_layout.empty()) {
      needed.push_back(kValueCache);
    }
  }
  for (const size_t i : needed) {
    if (call[i].kind == Argument::kNone) {
      return false;
    }
  }
  return true;
}

// A wrong call is refused by an error of the operators' own.
void check_error(const Call& call, const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const std::string op =
      std::string(call.is_load ? "paged_cache_load" : "scatter_pa_kv_cache") +
      (call.kv_layout.empty() ? ": " : "_packed: ");
  const bool own = text.rfind(op, 0) == 0 &&
                   text.find(" must ") != std::string::npos &&
                   text.find(", got ") != std::string::npos;
  const bool typed =
      dynamic_cast<const c10::ValueError*>(&error) != nullptr ||
      dynamic_cast<const c10::TypeError*>(&error) != nullptr ||
      dynamic_cast<const c10::IndexError*>(&error) != nullptr ||
      dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr ||
      text.find("require grad") != std::string::npos;
  if (!own || !typed) {
    fail("an error that is not documented", text);
  }
}

void check_memory(const char* what, const Tensors& tensors, Memory expected,
                  const std::vector<Expectation::Mean>& means) {
  for (const auto& [storage, byte, dtype] : means) {
    const uint8_t* found = tensors.storage(storage) + byte;
    uint8_t* wanted = expected[storage].data() + byte;
    if (is_nan(found, dtype) && is_nan(wanted, dtype)) {
      std::memcpy(wanted, found, c10::elementSize(dtype));
    }
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    for (size_t byte = 0; byte < expected[i].size(); ++byte) {
      if (tensors.storage(i)[byte] != expected[i][byte]) {
        fail(what, "byte " + std::to_string(byte) + " of storage " +
                       std::to_string(i));
      }
    }
  }
}

// May elements of a written tensor lie on one another? The operators look for
// strides of 0 only, as torch does; what such a tensor holds then is open.
bool may_overlap_itself(const Argument& t) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t dim = 0; dim < t.sizes.size(); ++dim) {
    if (t.sizes[dim] == 0) {
      return false;
    }
    if (t.sizes[dim] > 1) {
      dims.emplace_back(t.strides[dim], t.sizes[dim]);
    }
  }
  std::sort(dims.begin(), dims.end());
  __int128 reach = 0;  // of the dimensions inside
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) {
      return true;
    }
    reach += static_cast<__int128>(stride) * (size - 1);
  }
  return false;
}

Outcome check_call(const Call& call, const Expectation& expected) {
  std::optional<Tensors> tensors;
  try {
    tensors.emplace(call);
  } catch (const c10::Error&) {
    return Outcome::kNoCall;  // torch has no such tensor
  }
  try {
    make_call(call, *tensors);
  } catch (const c10::Error& error) {
    check_error(call, error);
    check_memory("written by a call that was refused", *tensors, call.memory,
                 {});
    return Outcome::kRefused;
  }
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const bool other =
        call[i].kind == Argument::kSparse || call[i].kind == Argument::kMeta;
    if (other && is_passed(call, i)) {
      fail("taken", std::string(call[i].name) + " of another kind");
    }
  }
  if (!expected.fits) {
    fail("taken", "a call that reaches out of its tensors");
  }
  for (const size_t i :
       {call.is_load ? kKey : kKeyCache, call.is_load ? kValue : kValueCache}) {
    if (call[i].kind != Argument::kNone && may_overlap_itself(call[i])) {
      return Outcome::kDone;
    }
  }
  check_memory("not what was to be written", *tensors, expected.memory,
               expected.means);
  return Outcome::kDone;
}

}  // namespace

void prepare() {
  at::globalContext().setDeterministicAlgorithms(false, false);
  // Most of the time of a call that is refused would be its backtrace.
  c10::SetStackTraceFetcher([]() -> c10::Backtrace { return nullptr; });
}

Outcome check(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  const Call call = read_call(bytes);
  if (!has_needed(call)) {
    return Outcome::kNoCall;
  }
  const Expectation expected = expect(call);
  if (expected.too_long) {
    return Outcome::kNoCall;
  }
  division() = {call.shares, false};
  at::globalContext().setDeterministicAlgorithms(
      call.deterministic || expected.repeated, false);
  return check_call(call, expected);
}

Outcome check_on_threads(const uint8_t* data, size_t size, bool deterministic) {
  Bytes bytes(data, size);
  const Call call = read_call(bytes);
  if (!has_needed(call)) {
    return Outcome::kNoCall;
  }
  const Expectation expected = expect(call);
  if (expected.too_long || (expected.repeated && !deterministic)) {
    return Outcome::kNoCall;
  }
  division() = {call.shares, true};
  return check_call(call, expected);
}

}  // namespace pacache::testing
