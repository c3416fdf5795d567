// Are the CPU kernels registered?

#pragma once

#include <cstdlib>
#include <string_view>

namespace pacache::cpu {

// PACACHE_FORCE_REFERENCE=1 leaves the place to pacache_torch.reference, which
// is then registered for CPU tensors under the same names.
inline bool kernels_enabled() {
  const char* forced = std::getenv("PACACHE_FORCE_REFERENCE");
  return forced == nullptr || std::string_view(forced) != "1";
}

}  // namespace pacache::cpu
