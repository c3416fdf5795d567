// pacache_torch._C: what was built. No operator lives here; loading the
// library registers them.

#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <map>
#include <string>

#include "cpu/copy_kernels.h"
#include "eager_call.h"
#include "npu_loader.h"

namespace {

std::map<std::string, std::string> build_info() {
  return {
      {"torch", TORCH_VERSION},
#if defined(__clang__)
      {"compiler", "clang " __clang_version__},
#elif defined(__GNUC__)
      {"compiler", "gcc " __VERSION__},
#else
      {"compiler", "unknown"},
#endif
      {"cpu_kernels", pacache::cpu::copy_kernels().name},
      {"cxx_standard", std::to_string(__cplusplus)},
#if defined(_OPENMP)
      {"openmp", std::to_string(_OPENMP)},
#else
      {"openmp", "off"},
#endif
#if defined(__x86_64__)
      {"architecture", "x86-64"},
#elif defined(__aarch64__)
      {"architecture", "aarch64"},
#else
      {"architecture", "other"},
#endif
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The operators of pacache: schemas and CPU kernels.";
  m.def("build_info", &build_info,
        "What this library was built with (torch, compiler, ...) and which "
        "copy kernels this processor gets.");
  m.def(
      "set_npu_loader",
      [](pybind11::function loader) {
        // Never destroyed: an operator may run after the interpreter's end.
        auto* kept = new pybind11::function(std::move(loader));
        pacache::npu_loader() = [kept]() {
          const pybind11::gil_scoped_acquire gil;
          return (*kept)().cast<std::string>();
        };
      },
      "What loads the NPU kernels at the first NPU tensor; gives a cause or "
      "an empty text.");
  pacache::add_eager_calls(m.ptr());
}
