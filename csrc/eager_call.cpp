// The operators for eager Python programs.
//
// torch.ops matches every call against a schema, which costs more than the
// call of a kernel for one token. The functions of pacache_torch/ops.py know
// their arguments already and hand them over by position; what is left is to
// unpack them and to call the dispatcher, so that everything below the
// dispatcher's front (modes, autograd, profiler, devices) is as with torch.ops.
//
// Each function takes every argument of its schema, in order, and answers
// whether it has made the call. Whatever is not a plain tensor, text or None,
// and whatever a mode of Python, functorch or a tracer may want to see, it
// leaves to torch.ops.

#include "eager_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "tensor_rules.h"

namespace pacache {
namespace {

// The operators: names and C++ signatures of ops.cpp.

struct Scatter {
  static constexpr const char* kName = "scatter_pa_kv_cache";
  using Signature = void(const at::Tensor&, const OptionalTensor&,
                         const at::Tensor&, const OptionalTensor&,
                         const at::Tensor&, const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&,
                         c10::string_view, c10::string_view,
                         at::OptionalIntArrayRef, at::OptionalIntArrayRef);
};

struct Load {
  static constexpr const char* kName = "paged_cache_load";
  using Signature = void(const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&,
                         const OptionalTensor&, c10::string_view, bool);
};

struct PackedScatter {
  static constexpr const char* kName = "scatter_pa_kv_cache_packed";
  using Signature = void(const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&,
                         c10::string_view);
};

struct PackedLoad {
  static constexpr const char* kName = "paged_cache_load_packed";
  using Signature = void(const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, c10::string_view,
                         const OptionalTensor&, bool);
};

// One argument: what its C++ value is, or nothing if it is not plain.
template <typename Parameter>
struct Argument;

template <>
struct Argument<const at::Tensor&> {
  explicit Argument(PyObject* object)
      : value(THPVariable_CheckExact(object) ? &THPVariable_Unpack(object)
                                             : nullptr) {}
  bool plain() const { return value != nullptr; }
  const at::Tensor& get() const { return *value; }
  const at::Tensor* value;
};

template <>
struct Argument<const OptionalTensor&> {
  explicit Argument(PyObject* object)
      : is_none(object == Py_None),
        value(!is_none && THPVariable_CheckExact(object)
                  ? OptionalTensor(THPVariable_Unpack(object))
                  : OptionalTensor()) {}
  bool plain() const { return is_none || value.has_value(); }
  const OptionalTensor& get() const { return value; }
  bool is_none;
  OptionalTensor value;
};

template <>
struct Argument<c10::string_view> {
  explicit Argument(PyObject* object) {
    if (PyUnicode_CheckExact(object)) {
      Py_ssize_t size = 0;
      if (const char* data = PyUnicode_AsUTF8AndSize(object, &size)) {
        value = std::string_view(data, size);
      } else {
        PyErr_Clear();  // a lone surrogate: torch.ops has its own words for it
      }
    }
  }
  bool plain() const { return value.has_value(); }
  std::string_view get() const { return *value; }
  std::optional<std::string_view> value;
};

template <>
struct Argument<bool> {
  explicit Argument(PyObject* object) : object(object) {}
  bool plain() const { return PyBool_Check(object); }
  bool get() const { return object == Py_True; }
  PyObject* object;
};

// Explicit strides and offsets are for torch.ops.
template <>
struct Argument<at::OptionalIntArrayRef> {
  explicit Argument(PyObject* object) : object(object) {}
  bool plain() const { return object == Py_None; }
  at::OptionalIntArrayRef get() const { return std::nullopt; }
  PyObject* object;
};

// Nobody stands between the program and the kernels.
bool no_mode_is_active() {
  // Inference mode takes keys away.
  return c10::default_included_set.has_all(
             c10::impl::tls_local_dispatch_key_set().included_) &&
         !at::impl::torch_function_mode_enabled();
}

template <typename Operator, typename Signature>
struct EagerCall;

template <typename Operator, typename... Parameters>
struct EagerCall<Operator, void(Parameters...)> {
  static PyObject* call(PyObject* /*module*/, PyObject* const* arguments,
                        Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_VALUE(count == sizeof...(Parameters), Operator::kName, ": ",
                      sizeof...(Parameters), " arguments, got ", count);
    return unpack_and_call(arguments, std::index_sequence_for<Parameters...>());
    END_HANDLE_TH_ERRORS
  }

 private:
  template <size_t... i>
  static PyObject* unpack_and_call(PyObject* const* arguments,
                                   std::index_sequence<i...>) {
    const std::tuple<Argument<Parameters>...> unpacked(arguments[i]...);
    if (!no_mode_is_active() || !(std::get<i>(unpacked).plain() && ...)) {
      Py_RETURN_FALSE;
    }
    static const auto handle =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow(
                (std::string("pacache::") + Operator::kName).c_str(), "")
            .template typed<void(Parameters...)>();
    {
      const pybind11::gil_scoped_release no_gil;
      // Autograd's fallback for operators without a backward boxes every
      // argument, to find tensors that require a gradient; the kernels refuse
      // those themselves.
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      handle.call(std::get<i>(unpacked).get()...);
    }
    Py_RETURN_TRUE;
  }
};

template <typename Operator>
PyMethodDef method(const char* name) {
  return {name,
          reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(
              &EagerCall<Operator, typename Operator::Signature>::call)),
          METH_FASTCALL,
          "Make the call if its arguments are plain, and say whether it was "
          "made."};
}

}  // namespace

void add_eager_calls(PyObject* module) {
  static PyMethodDef methods[] = {
      method<Scatter>("call_scatter_pa_kv_cache"),
      method<Load>("call_paged_cache_load"),
      method<PackedScatter>("call_scatter_pa_kv_cache_packed"),
      method<PackedLoad>("call_paged_cache_load_packed"),
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module, methods) != 0) {
    throw pybind11::error_already_set();
  }
}

}  // namespace pacache
