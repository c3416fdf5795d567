#include "call_error.h"

#include <c10/util/Exception.h>

#include "cann_library.h"

namespace pacache::npu {
namespace {

struct Status {
  int code;
  const char* name;
  const char* cause;
};

constexpr Status kAclnn[] = {
    {161001, "ACLNN_ERR_PARAM_NULLPTR",
     "a required argument was null; this build and the CANN library may "
     "disagree on the argument list"},
    {161002, "ACLNN_ERR_PARAM_INVALID",
     "the library does not take these dtypes, shapes or formats"},
    {361001, "ACLNN_ERR_RUNTIME_ERROR",
     "a runtime call failed: the device may be lost or out of memory"},
    {561000, "ACLNN_ERR_INNER", "an internal error of CANN"},
    {561001, "ACLNN_ERR_INNER_INFERSHAPE_ERROR",
     "the library could not infer the output shapes"},
    {561002, "ACLNN_ERR_INNER_TILING_ERROR",
     "the library refuses these shapes, modes or sizes"},
    {561003, "ACLNN_ERR_INNER_FIND_KERNEL_ERROR",
     "no kernel binary for this dtype on this chip: is the kernels package "
     "(opp) of this CANN version installed?"},
    {561101, "ACLNN_ERR_INNER_CREATE_EXECUTOR",
     "the library could not create an executor: out of host memory?"},
    {561103, "ACLNN_ERR_INNER_NULLPTR",
     "a null pointer inside CANN; some versions return it for a missing "
     "argument"},
    {107000, "ACL_ERROR_RT_PARAM_INVALID", "an invalid runtime argument"},
    {107002, "ACL_ERROR_RT_CONTEXT_NULL",
     "this thread has no device context: set the device first"},
    {107003, "ACL_ERROR_RT_STREAM_CONTEXT",
     "the stream belongs to another context"},
    {107020, "ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT",
     "the task is not supported here"},
    {107030, "ACL_ERROR_RT_STREAM_CAPTURE_UNSUPPORTED",
     "not allowed while a graph is captured: call pacache_torch.warmup() "
     "before the capture"},
    {207001, "ACL_ERROR_RT_MEMORY_ALLOCATION", "out of device memory"},
    {507000, "ACL_ERROR_RT_INTERNAL_ERROR", "an internal error of the runtime"},
    {507001, "ACL_ERROR_RT_TS_ERROR",
     "the task scheduler of the device failed"},
    {507011, "ACL_ERROR_RT_MODEL_EXECUTE", "the graph failed on the device"},
    {507014, "ACL_ERROR_RT_AICORE_TIMEOUT", "a kernel timed out"},
    {507015, "ACL_ERROR_RT_AICORE_EXCEPTION",
     "a kernel failed on the device: an index out of range? PACACHE_CHECK=1 "
     "checks every index before the call"},
    {507018, "ACL_ERROR_RT_AICPU_EXCEPTION", "a device CPU kernel failed"},
    {507034, "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT", "a vector kernel timed out"},
    {507035, "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
     "a vector kernel failed on the device: an index out of range? "
     "PACACHE_CHECK=1 checks every index before the call"},
};

constexpr Status kAtb[] = {
    {1, "ERROR_INVALID_PARAM",
     "flags, context or product that the operator does not take"},
    {2, "ERROR_INVALID_GRAPH", "an invalid graph"},
    {3, "ERROR_INTERNAL_ERROR", "an internal error of ATB"},
    {4, "ERROR_RT_FAIL", "a runtime or kernel-level shape check failed"},
    {5, "ERROR_INVALID_IN_TENSOR_NUM",
     "the number of inputs does not fit the cache layout"},
    {6, "ERROR_INVALID_TENSOR_DTYPE",
     "a dtype that the operator does not take"},
    {7, "ERROR_INVALID_TENSOR_FORMAT",
     "a format that the operator does not take"},
    {8, "ERROR_INVALID_TENSOR_DIM", "a shape that the operator does not take"},
    {9, "ERROR_INVALID_TENSOR_SIZE", "an empty or too large tensor"},
    {10, "ERROR_OPERATION_NULL_RUNNER", "the operation has no runner"},
    {11, "ERROR_GRAPH_INFERSHAPE_FUNC_FAIL", "shape inference failed"},
    {12, "ERROR_CANN_ERROR", "a call of CANN failed"},
    {13, "ERROR_INVALID_TENSOR_INI_MATCH",
     "this combination of dtypes and formats is not in ATB's table; mixed "
     "key and value dtypes need ATB 8.5 or later"},
    {14, "ERROR_INVALID_TENSOR_ADDR", "a null or misaligned address"},
    {15, "ERROR_INVALID_TENSOR_NUM", "a wrong number of tensors"},
    {16, "ERROR_INVALID_TENSOR_DIM_NUM", "a wrong rank"},
    {17, "ERROR_INVALID_SINGLE_OPERATION_PARAM", "invalid flags"},
    {18, "ERROR_GRAPH_NODE_RESHAPE_FUNC_FAIL", "a reshape failed"},
    {19, "ERROR_INVALID_GRAPH_NODE_CHUNK", "an invalid chunk"},
    {20, "ERROR_INVALID_CONTEXT_ADDR", "a null context"},
    {21, "ERROR_INVALID_STREAM", "a null stream"},
    {22, "ERROR_INVALID_WORKSPACE_SIZE", "a workspace of a wrong size"},
    {23, "ERROR_INVALID_WORKSPACE_ADDR", "a null workspace"},
    {24, "ERROR_INVALID_OPERATION_ADDR", "a null operation"},
    {25, "ERROR_HCCL_FAIL", "a call of HCCL failed"},
    {26, "ERROR_OUT_OF_DEVICE_MEMORY",
     "out of device memory; an ATB context alone takes about 96 MiB"},
    {27, "ERROR_OUT_OF_HOST_MEMORY", "out of host memory"},
    {28, "ERROR_COMM_EMPTY", "an empty communicator"},
    {29, "ERROR_COPY_HOST_MEMORY_FAIL", "a copy of host memory failed"},
};

template <size_t N>
std::string describe(const Status (&table)[N], int status) {
  for (const Status& entry : table) {
    if (entry.code == status) {
      return c10::str(status, " (", entry.name, ": ", entry.cause, ")");
    }
  }
  const char* family = status / 1000 == 107   ? "a runtime argument or state"
                       : status / 1000 == 207 ? "a runtime resource"
                       : status / 1000 == 507 ? "the device or its driver"
                                              : "not a documented code";
  return c10::str(status, " (", family, ")");
}

std::string recent_message() {
  using GetRecentErrMsg = const char* (*)();
  static const auto get =
      reinterpret_cast<GetRecentErrMsg>(find_runtime("aclGetRecentErrMsg"));
  const char* message = get == nullptr ? nullptr : get();
  return message == nullptr || message[0] == '\0' ? "(nothing)" : message;
}

[[noreturn]] void throw_call(const char* op, const char* function,
                             const std::string& status,
                             const std::string& arguments) {
  const std::string message = recent_message();
  TORCH_CHECK(false, op, ": ", function, " failed with ", status,
              "; called with ", arguments, "; CANN says: ", message);
  std::abort();  // TORCH_CHECK(false) has thrown
}

}  // namespace

std::string describe_aclnn_status(int status) {
  return describe(kAclnn, status);
}

std::string describe_atb_status(int status) { return describe(kAtb, status); }

void throw_aclnn(const char* op, const char* function, int status,
                 const std::string& arguments) {
  throw_call(op, function, describe_aclnn_status(status), arguments);
}

void throw_atb(const char* op, const char* function, int status,
               const std::string& arguments) {
  throw_call(op, function, describe_atb_status(status), arguments);
}

void throw_null(const char* op, const char* function,
                const std::string& arguments) {
  const std::string message = recent_message();
  TORCH_CHECK(false, op, ": ", function,
              " gave a null pointer (out of host memory?); called with ",
              arguments, "; CANN says: ", message);
  std::abort();  // TORCH_CHECK(false) has thrown
}

}  // namespace pacache::npu
