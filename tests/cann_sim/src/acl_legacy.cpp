// libascendcl: descriptors and attributes of the old aclop path, and the
// functions that torch_npu wants to find but that do nothing here.
//
// An operator for which torch_npu finds no aclnn function goes to
// aclopCompileAndExecute. The simulator has no aclop kernels: it says which
// operator was asked for and fails.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "journal.h"
#include "settings.h"

using namespace cann_sim;

namespace {

struct TensorDesc {
  int data_type;
  int format;
  std::vector<int64_t> dims;
  std::string name;
};

struct DataBuffer {
  void* data;
  size_t bytes;
};

struct OpAttr {
  int unused;
};

int missing_operator(const char* name) {
  violation("missing_operator", name,
            "the simulated CANN has no operator of this name (neither aclnn "
            "nor aclop); add it to tests/cann_sim/src");
  set_error(std::string("cann_sim: operator ") + name + " is not simulated");
  return 500002;
}

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
CANN_SIM_EXPORT int aclopSetAttrInt(void*, const char*, int64_t) {
  return kOk;
}
CANN_SIM_EXPORT int aclopSetAttrFloat(void*, const char*, float) {
  return kOk;
}
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
CANN_SIM_EXPORT int aclopSetAttrListListInt(void*, const char*, int,
                                            const int*,
                                            const int64_t* const*) {
  return kOk;
}

CANN_SIM_EXPORT int aclopCompileAndExecute(const char* name, int, const void*,
                                           const void*, int, const void*,
                                           void*, const void*, int, int,
                                           const char*, void*) {
  CANN_SIM_ENTER(aclopCompileAndExecute);
  return missing_operator(name);
}
CANN_SIM_EXPORT int aclopCompileAndExecuteV2(const char* name, int, void*,
                                             void*, int, void*, void*, void*,
                                             int, int, const char*, void*) {
  CANN_SIM_ENTER(aclopCompileAndExecuteV2);
  return missing_operator(name);
}

CANN_SIM_EXPORT int aclSetCompileopt(int, const char*) {
  CANN_SIM_ENTER(aclSetCompileopt);
  return kOk;
}
CANN_SIM_EXPORT size_t aclGetCompileoptSize(int) { return 16; }
CANN_SIM_EXPORT int aclGetCompileopt(int, char* value, size_t length) {
  CANN_SIM_ENTER(aclGetCompileopt);
  snprintf(value, length, "0");
  return kOk;
}

CANN_SIM_EXPORT void aclAppLog(int, const char*, const char*, uint32_t,
                               const char*, ...) {}

// ---- accepted and without effect -----------------------------------------

#define ACCEPTED(api)                   \
  CANN_SIM_EXPORT int api() {           \
    CANN_SIM_ENTER(api);                \
    return kOk;                         \
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

#define REFUSED(api)                                                     \
  CANN_SIM_EXPORT int api() {                                            \
    CANN_SIM_ENTER(api);                                                 \
    set_error("cann_sim: " #api " is not simulated");                    \
    return kRtFeatureNotSupported;                                       \
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
