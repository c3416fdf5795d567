#include "copy_kernels.h"

#include <cstdlib>
#include <string_view>

namespace pacache::cpu {
namespace {

const CopyKernels& select() {
#if defined(__x86_64__)
  const char* variable = std::getenv("PACACHE_CPU_KERNELS");
  const std::string_view wanted = variable == nullptr ? "" : variable;
  if (wanted == kPortableKernels.name) {
    return kPortableKernels;
  }
  if (wanted != kAvx2Kernels.name && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512vl")) {
    return kAvx512Kernels;
  }
  if (__builtin_cpu_supports("avx2")) {
    return kAvx2Kernels;
  }
#endif
  return kPortableKernels;
}

}  // namespace

const CopyKernels& copy_kernels() {
  static const CopyKernels& chosen = select();
  return chosen;
}

}  // namespace pacache::cpu
