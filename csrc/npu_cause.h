// Why are there no NPU kernels in this process?

#pragma once

#include <string>

namespace pacache {

// Set once at import by pacache_torch, empty when the NPU kernels are there.
std::string& npu_cause();

}  // namespace pacache
