// libascendcl: descriptors and attributes of the old aclop path, and the
// functions that torch_npu wants to find but that do nothing here.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "aclop_descriptors.h"
#include "journal.h"
#include "settings.h"

using namespace cann_sim;

namespace {

using TensorDesc = AclopTensorDesc;
using DataBuffer = AclopDataBuffer;

struct OpAttr {
  int unused;
};

}  // namespace

CANN_SIM_EXPORT void* aclCreateTensorDesc(int data_type, int count,
                                          const int64_t* dims, int format) {
  return new TensorDesc{data_type, format,
                        std::vector<int64_t>(dims, dims + count), ""};
}
CANN_SIM_EXPORT void aclDestroyTensorDesc(const void* desc) {
  delete static_cast<const TensorDesc*>(desc);
}
CANN_SIM_EXPORT int aclGetTensorDescType(const void* desc) {
  return static_cast<const TensorDesc*>(desc)->data_type;
}
CANN_SIM_EXPORT int aclGetTensorDescFormat(const void* desc) {
  return static_cast<const TensorDesc*>(desc)->format;
}
CANN_SIM_EXPORT size_t aclGetTensorDescNumDims(const void* desc) {
  return static_cast<const TensorDesc*>(desc)->dims.size();
}
CANN_SIM_EXPORT int aclGetTensorDescDimV2(const void* desc, size_t index,
                                          int64_t* size) {
  *size = static_cast<const TensorDesc*>(desc)->dims.at(index);
  return kOk;
}
CANN_SIM_EXPORT void aclSetTensorDescName(void* desc, const char* name) {
  static_cast<TensorDesc*>(desc)->name = name ? name : "";
}
CANN_SIM_EXPORT int aclSetTensorFormat(void*, int) { return kOk; }
CANN_SIM_EXPORT int aclSetTensorShape(void*, int, const int64_t*) {
  return kOk;
}
CANN_SIM_EXPORT int aclSetTensorPlaceMent(void*, int) { return kOk; }
CANN_SIM_EXPORT int aclSetTensorConst(void*, void*, size_t) { return kOk; }
CANN_SIM_EXPORT void* aclCreateDataBuffer(void* data, size_t bytes) {
  return new DataBuffer{data, bytes};
}
CANN_SIM_EXPORT int aclDestroyDataBuffer(const void* buffer) {
  delete static_cast<const DataBuffer*>(buffer);
  return kOk;
}

CANN_SIM_EXPORT void* aclopCreateAttr() { return new OpAttr{}; }
CANN_SIM_EXPORT void aclopDestroyAttr(const void* attr) {
  delete static_cast<const OpAttr*>(attr);
}
CANN_SIM_EXPORT int aclopSetAttrBool(void*, const char*, uint8_t) {
  return kOk;
}
CANN_SIM_EXPORT int aclopSetAttrInt(void*, const char*, int64_t) { return kOk; }
CANN_SIM_EXPORT int aclopSetAttrFloat(void*, const char*, float) { return kOk; }
CANN_SIM_EXPORT int aclopSetAttrString(void*, const char*, const char*) {
  return kOk;
}
CANN_SIM_EXPORT int aclopSetAttrDataType(void*, const char*, int) {
  return kOk;
}
CANN_SIM_EXPORT int aclopSetAttrListBool(void*, const char*, int,
                                         const uint8_t*) {
  return kOk;
}
CANN_SIM_EXPORT int aclopSetAttrListInt(void*, const char*, int,
                                        const int64_t*) {
  return kOk;
}
CANN_SIM_EXPORT int aclopSetAttrListFloat(void*, const char*, int,
                                          const float*) {
  return kOk;
}
CANN_SIM_EXPORT int aclopSetAttrListListInt(void*, const char*, int, const int*,
                                            const int64_t* const*) {
  return kOk;
}

CANN_SIM_EXPORT int aclSetCompileopt(int, const char*) {
  CANN_SIM_ENTER(aclSetCompileopt);
  return kOk;
}
CANN_SIM_EXPORT size_t aclGetCompileoptSize(int) { return 16; }
CANN_SIM_EXPORT int aclGetCompileopt(int, char* value, size_t length) {
  CANN_SIM_ENTER(aclGetCompileopt);
  snprintf(value, length, "disable");
  return kOk;
}

// What torch_npu logs; shown with CANN_SIM_LOG=1.
CANN_SIM_EXPORT void aclAppLog(int level, const char*, const char* file,
                               uint32_t line, const char* pattern, ...) {
  static const bool shown = getenv("CANN_SIM_LOG") != nullptr;
  if (!shown) return;
  va_list args;
  va_start(args, pattern);
  fprintf(stderr, "[log %d %s:%u] ", level, file, line);
  vfprintf(stderr, pattern, args);
  fputc('\n', stderr);
  va_end(args);
}

// ---- accepted and without effect -----------------------------------------

#define ACCEPTED(api)         \
  CANN_SIM_EXPORT int api() { \
    CANN_SIM_ENTER(api);      \
    return kOk;               \
  }

ACCEPTED(aclmdlInitDump)
ACCEPTED(aclmdlSetDump)
ACCEPTED(aclmdlFinalizeDump)
ACCEPTED(aclopStartDumpArgs)
ACCEPTED(aclopStopDumpArgs)
ACCEPTED(aclrtSetDeviceSatMode)
ACCEPTED(aclrtSetOpExecuteTimeOut)
ACCEPTED(aclrtSetOpWaitTimeout)
ACCEPTED(aclrtSetStreamFailureMode)
ACCEPTED(aclrtSetStreamOverflowSwitch)
ACCEPTED(aclrtSetStreamAttribute)
ACCEPTED(aclrtSetSysParamOpt)
ACCEPTED(aclrtCtxSetSysParamOpt)
ACCEPTED(aclrtSetDeviceResLimit)
ACCEPTED(aclrtResetDeviceResLimit)
ACCEPTED(aclrtSetStreamResLimit)
ACCEPTED(aclrtResetStreamResLimit)
ACCEPTED(aclrtUseStreamResInCurrentThread)
ACCEPTED(aclrtUnuseStreamResInCurrentThread)
ACCEPTED(aclrtCmoAsync)
ACCEPTED(aclprofInit)
ACCEPTED(aclprofFinalize)
ACCEPTED(aclprofStart)
ACCEPTED(aclprofStop)
ACCEPTED(aclprofSetConfig)
ACCEPTED(aclprofDestroyConfig)
ACCEPTED(aclprofMarkEx)
ACCEPTED(MsprofRegisterCallback)
ACCEPTED(MsprofReportAdditionalInfo)
ACCEPTED(MsprofReportApi)
ACCEPTED(MsprofReportCompactInfo)

CANN_SIM_EXPORT uint64_t MsprofGetHashId(const char*, size_t) { return 1; }
CANN_SIM_EXPORT uint64_t MsprofSysCycleTime() { return 0; }

CANN_SIM_EXPORT int aclrtSetOpExecuteTimeOutV2(uint64_t timeout,
                                               uint64_t* actual) {
  CANN_SIM_ENTER(aclrtSetOpExecuteTimeOutV2);
  if (actual) *actual = timeout;
  return kOk;
}

// ---- refused ---------------------------------------------------------------

#define REFUSED(api)                                  \
  CANN_SIM_EXPORT int api() {                         \
    CANN_SIM_ENTER(api);                              \
    set_error("cann_sim: " #api " is not simulated"); \
    return kRtFeatureNotSupported;                    \
  }

REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtMallocPhysical)
REFUSED(aclrtFreePhysical)
REFUSED(aclrtMapMem)
REFUSED(aclrtUnmapMem)
REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtReleaseMemAddress)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtDeviceTaskAbort)
REFUSED(aclrtMemUceRepair)
REFUSED(aclrtRepairError)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)
