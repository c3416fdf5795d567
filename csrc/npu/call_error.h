// What does a failed CANN or ATB call say to the user?

#pragma once

#include <string>

namespace pacache::npu {

// "561002 (ACLNN_ERR_INNER_TILING_ERROR: ...likely cause)"
std::string describe_aclnn_status(int status);
std::string describe_atb_status(int status);

// RuntimeError "<op>: <function> failed with <status>; called with
// <arguments>; CANN says: ...". Must be called on the thread of the failing
// call, right after it: CANN keeps its message per thread.
[[noreturn]] void throw_aclnn(const char* op, const char* function, int status,
                              const std::string& arguments);
[[noreturn]] void throw_atb(const char* op, const char* function, int status,
                            const std::string& arguments);

// A constructor of CANN that gave a null pointer.
[[noreturn]] void throw_null(const char* op, const char* function,
                             const std::string& arguments);

}  // namespace pacache::npu
