// pacache_torch._C: what was built. No operator lives here; loading the
// library registers them.

#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <map>
#include <string>

#include "npu_cause.h"

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
        "What this library was built with: torch, compiler, ...");
  m.def(
      "set_npu_cause",
      [](const std::string& cause) { pacache::npu_cause() = cause; },
      "Why there are no NPU kernels; part of the error of a call that needs "
      "them.");
}
