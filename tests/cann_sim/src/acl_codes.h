// Return codes of AscendCL and aclnn, as numbers of the public headers.
#pragma once

namespace cann_sim {

constexpr int kOk = 0;
constexpr int kInvalidParam = 100000;
constexpr int kApiNotSupported = 200001;
constexpr int kRtInvalidDevice = 107001;
constexpr int kRtContextNull = 107002;
constexpr int kRtStreamContext = 107003;
constexpr int kRtReportTimeout = 107012;
constexpr int kRtParamInvalid = 107000;
constexpr int kRtFeatureNotSupported = 207000;
constexpr int kRtMemoryAllocation = 207001;

constexpr int kAclnnNullptr = 161001;
constexpr int kAclnnInvalid = 161002;
constexpr int kAclnnRuntime = 361001;
constexpr int kAclnnInner = 561000;
constexpr int kAclnnTiling = 561002;
constexpr int kAclnnNoKernel = 561003;
constexpr int kAclnnInnerNull = 561103;

// acl data types and formats that the simulator knows.
enum DataType {
  kFloat = 0,
  kHalf = 1,
  kInt8 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kInt64 = 9,
  kUint64 = 10,
  kDouble = 11,
  kBool = 12,
  kComplex64 = 16,
  kComplex128 = 17,
  kBfloat16 = 27,
};

enum Format {
  kNchw = 0,
  kNd = 2,
  kFractalNz = 29,
};

}  // namespace cann_sim

// An exported C function of a simulated library.
#define CANN_SIM_EXPORT extern "C" __attribute__((visibility("default")))

// Counts the call; returns an injected failure.
#define CANN_SIM_ENTER(api)                                \
  do {                                                     \
    if (int code_ = ::cann_sim::enter(#api)) return code_; \
  } while (0)
