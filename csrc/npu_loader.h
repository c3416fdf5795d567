// Are the NPU kernels in this process, and if not, why?

#pragma once

#include <functional>
#include <string>

namespace pacache {

// Loads the NPU kernels when the first NPU tensor arrives (torch_npu may be
// imported after pacache_torch). Gives the cause when that fails, or "". Set
// by pacache_torch at import.
std::function<std::string()>& npu_loader();

}  // namespace pacache
