// The operators for eager Python programs.
//
// torch.ops matches every call against a schema, which costs more than the
// call of a kernel for one token. The functions of pacache_torch/ops.py know
// their arguments already and hand them over by position; what is left is to
// unpack them and to call the dispatcher, so that everything below the
// dispatcher's front (modes, autograd, profiler, devices) is as with torch.ops.
//
// Each function answers whether it has made the call. Whatever is not a plain
// tensor, text or None, and whatever a mode of Python, functorch or a tracer
// may want to see, it leaves to torch.ops.

#include "eager_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "tensor_rules.h"

namespace pacache {
namespace {

using Scatter = void(const at::Tensor&, const OptionalTensor&,
                     const at::Tensor&, const OptionalTensor&,
                     const at::Tensor&, const OptionalTensor&,
                     const OptionalTensor&, const OptionalTensor&,
                     c10::string_view, c10::string_view,
                     at::OptionalIntArrayRef, at::OptionalIntArrayRef);
using Load = void(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const OptionalTensor&, c10::string_view, bool);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

// Nobody stands between the program and the kernels.
bool no_mode_is_active() {
  return c10::impl::tls_local_dispatch_key_set().included_ ==
             c10::default_included_set &&
         !at::impl::torch_function_mode_enabled();
}

// For the call of an operator when no mode is active. Autograd's fallback for
// operators without a backward boxes every argument, to find tensors that
// require a gradient; the kernels refuse those themselves.
struct StraightToKernels {
  const pybind11::gil_scoped_release no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

bool is_tensor(PyObject* object) { return THPVariable_CheckExact(object); }

bool is_tensor_or_none(PyObject* object) {
  return object == Py_None || is_tensor(object);
}

OptionalTensor optional_tensor(PyObject* object) {
  return object == Py_None ? OptionalTensor()
                           : OptionalTensor(THPVariable_Unpack(object));
}

std::optional<std::string_view> text(PyObject* object) {
  if (!PyUnicode_CheckExact(object)) {
    return std::nullopt;
  }
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) {
    PyErr_Clear();  // a lone surrogate: torch.ops has its own words for it
    return std::nullopt;
  }
  return std::string_view(data, size);
}

// key, value, key_cache, value_cache, slot_mapping, compress_lens,
// compress_seq_offsets, seq_lens, cache_mode, scatter_mode
PyObject* call_scatter(PyObject* /*module*/, PyObject* const* arguments,
                       Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_VALUE(count == 10, "call_scatter: 10 arguments, got ", count);
  const auto cache_mode = text(arguments[8]);
  const auto scatter_mode = text(arguments[9]);
  if (!is_tensor(arguments[0]) || !is_tensor_or_none(arguments[1]) ||
      !is_tensor(arguments[2]) || !is_tensor_or_none(arguments[3]) ||
      !is_tensor(arguments[4]) ||
      !std::all_of(arguments + 5, arguments + 8, &is_tensor_or_none) ||
      !cache_mode || !scatter_mode || !no_mode_is_active()) {
    Py_RETURN_FALSE;
  }
  static const auto scatter =
      find_operator<Scatter>("pacache::scatter_pa_kv_cache");
  const OptionalTensor value = optional_tensor(arguments[1]);
  const OptionalTensor value_cache = optional_tensor(arguments[3]);
  const OptionalTensor compress_lens = optional_tensor(arguments[5]);
  const OptionalTensor compress_seq_offsets = optional_tensor(arguments[6]);
  const OptionalTensor seq_lens = optional_tensor(arguments[7]);
  {
    const StraightToKernels guard;
    scatter.call(THPVariable_Unpack(arguments[0]), value,
                 THPVariable_Unpack(arguments[2]), value_cache,
                 THPVariable_Unpack(arguments[4]), compress_lens,
                 compress_seq_offsets, seq_lens, *cache_mode, *scatter_mode,
                 std::nullopt, std::nullopt);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// key_cache, value_cache, block_tables, context_lens, key, value, seq_starts,
// cache_mode, is_seq_lens_cumsum
PyObject* call_load(PyObject* /*module*/, PyObject* const* arguments,
                    Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_VALUE(count == 9, "call_load: 9 arguments, got ", count);
  const auto cache_mode = text(arguments[7]);
  if (!std::all_of(arguments, arguments + 6, &is_tensor) ||
      !is_tensor_or_none(arguments[6]) || !cache_mode ||
      !PyBool_Check(arguments[8]) || !no_mode_is_active()) {
    Py_RETURN_FALSE;
  }
  static const auto load = find_operator<Load>("pacache::paged_cache_load");
  const OptionalTensor seq_starts = optional_tensor(arguments[6]);
  {
    const StraightToKernels guard;
    load.call(
        THPVariable_Unpack(arguments[0]), THPVariable_Unpack(arguments[1]),
        THPVariable_Unpack(arguments[2]), THPVariable_Unpack(arguments[3]),
        THPVariable_Unpack(arguments[4]), THPVariable_Unpack(arguments[5]),
        seq_starts, *cache_mode, arguments[8] == Py_True);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  return {name,
          reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)),
          METH_FASTCALL,
          "Make the call if its arguments are plain, and say whether it was "
          "made."};
}

}  // namespace

void add_eager_calls(PyObject* module) {
  static PyMethodDef methods[] = {
      method<call_scatter>("call_scatter_pa_kv_cache"),
      method<call_load>("call_paged_cache_load"),
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module, methods) != 0) {
    throw pybind11::error_already_set();
  }
}

}  // namespace pacache
