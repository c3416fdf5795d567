// libascendcl: start and end, devices, contexts, versions, limits.
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "acl_codes.h"
#include "journal.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

using namespace cann_sim;

namespace {

constexpr int kMaxDevices = 16;
constexpr int64_t kCubeCores = 20;
constexpr int64_t kVectorCores = 40;

// A context is the address of its slot: one per device, never freed.
char contexts[kMaxDevices];

struct PackageVersion {
  char version[128];
  char major[64];
  char minor[64];
  char release[64];
  char patch[64];
  char reserved[128];
};

bool device_exists(int device) {
  return device >= 0 && device < settings().devices;
}

int sync_device(const char* api) {
  trace(format("\"api\": \"%s\"", api));
  if (capturing_on(current_device())) {
    violation("capture", api, "synchronising a device under capture");
    return kRtStreamContext;
  }
  synchronize_device(current_device());
  return kOk;
}

// Field `index` of a dotted version, "" when there is none.
std::string part(const std::string& version, int index) {
  size_t begin = 0;
  for (; index > 0; --index) {
    size_t dot = version.find('.', begin);
    if (dot == std::string::npos) return "";
    begin = dot + 1;
  }
  return version.substr(begin, version.find('.', begin) - begin);
}

}  // namespace

CANN_SIM_EXPORT int aclInit(const char*) {
  CANN_SIM_ENTER(aclInit);
  return kOk;
}
CANN_SIM_EXPORT int aclFinalize() {
  CANN_SIM_ENTER(aclFinalize);
  return kOk;
}
CANN_SIM_EXPORT const char* aclGetRecentErrMsg() {
  enter("aclGetRecentErrMsg");
  return take_error();
}

CANN_SIM_EXPORT int aclsysGetCANNVersion(int, PackageVersion* out) {
  CANN_SIM_ENTER(aclsysGetCANNVersion);
  if (!out) return kInvalidParam;
  memset(out, 0, sizeof(*out));
  std::string version = version_text();
  strncpy(out->version, version.c_str(), sizeof(out->version) - 1);
  strncpy(out->major, part(version, 0).c_str(), 63);
  strncpy(out->minor, part(version, 1).c_str(), 63);
  strncpy(out->release, part(version, 2).c_str(), 63);
  strncpy(out->patch, part(version, 3).c_str(), 63);
  return kOk;
}

CANN_SIM_EXPORT int aclsysGetVersionStr(char*, char* out) {
  CANN_SIM_ENTER(aclsysGetVersionStr);
  if (!out) return kInvalidParam;
  strcpy(out, version_text());
  return kOk;
}

CANN_SIM_EXPORT const char* aclrtGetSocName() {
  enter("aclrtGetSocName");
  return soc_name();
}

CANN_SIM_EXPORT int aclrtGetDeviceCount(uint32_t* count) {
  CANN_SIM_ENTER(aclrtGetDeviceCount);
  *count = static_cast<uint32_t>(settings().devices.load());
  return kOk;
}

CANN_SIM_EXPORT int aclrtSetDevice(int32_t device) {
  CANN_SIM_ENTER(aclrtSetDevice);
  if (!device_exists(device)) return kRtInvalidDevice;
  set_current_device(device);
  return kOk;
}

CANN_SIM_EXPORT int aclrtGetDevice(int32_t* device) {
  CANN_SIM_ENTER(aclrtGetDevice);
  if (!device_is_set()) return kRtContextNull;
  *device = current_device();
  return kOk;
}

CANN_SIM_EXPORT int aclrtResetDevice(int32_t device) {
  CANN_SIM_ENTER(aclrtResetDevice);
  if (!device_exists(device)) return kRtInvalidDevice;
  synchronize_device(device);
  return kOk;
}

CANN_SIM_EXPORT int aclrtGetCurrentContext(void** context) {
  CANN_SIM_ENTER(aclrtGetCurrentContext);
  if (!device_is_set()) return kRtContextNull;
  *context = &contexts[current_device()];
  return kOk;
}

CANN_SIM_EXPORT int aclrtSetCurrentContext(void* context) {
  CANN_SIM_ENTER(aclrtSetCurrentContext);
  std::ptrdiff_t device = static_cast<char*>(context) - contexts;
  if (device < 0 || device >= kMaxDevices) return kRtParamInvalid;
  set_current_device(static_cast<int>(device));
  return kOk;
}

CANN_SIM_EXPORT int aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags,
                                            int32_t* active) {
  CANN_SIM_ENTER(aclrtGetPrimaryCtxState);
  if (flags) *flags = 0;
  if (active) *active = device_exists(device);
  return kOk;
}

CANN_SIM_EXPORT int aclrtSynchronizeDevice() {
  CANN_SIM_ENTER(aclrtSynchronizeDevice);
  return sync_device("aclrtSynchronizeDevice");
}

CANN_SIM_EXPORT int aclrtSynchronizeDeviceWithTimeout(int32_t) {
  CANN_SIM_ENTER(aclrtSynchronizeDeviceWithTimeout);
  return sync_device("aclrtSynchronizeDeviceWithTimeout");
}

CANN_SIM_EXPORT int aclGetDeviceCapability(uint32_t, int info, int64_t* value) {
  CANN_SIM_ENTER(aclGetDeviceCapability);
  *value = info == 0 ? kCubeCores : info == 1 ? kVectorCores : 192 << 20;
  return kOk;
}

CANN_SIM_EXPORT int aclrtGetDeviceInfo(uint32_t, int attribute,
                                       int64_t* value) {
  CANN_SIM_ENTER(aclrtGetDeviceInfo);
  *value = attribute == 1 ? kCubeCores : kVectorCores;
  return kOk;
}

CANN_SIM_EXPORT int aclGetCannAttributeList(const int** list, size_t* count) {
  CANN_SIM_ENTER(aclGetCannAttributeList);
  static const int kAttributes[] = {0, 1, 2};
  *list = kAttributes;
  *count = 3;
  return kOk;
}

// Inf/nan mode and bfloat16: yes. Compilation at run time: no, or torch_npu
// would send every operator down the old aclop path.
CANN_SIM_EXPORT int aclGetCannAttribute(int attribute, int32_t* value) {
  CANN_SIM_ENTER(aclGetCannAttribute);
  constexpr int kJitCompile = 2;
  *value = attribute == kJitCompile ? 0 : 1;
  return kOk;
}

CANN_SIM_EXPORT int aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  CANN_SIM_ENTER(aclrtDeviceCanAccessPeer);
  *can = 1;
  return kOk;
}
CANN_SIM_EXPORT int aclrtDeviceEnablePeerAccess(int32_t, uint32_t) {
  CANN_SIM_ENTER(aclrtDeviceEnablePeerAccess);
  return kOk;
}
CANN_SIM_EXPORT int aclrtDeviceGetBareTgid(int32_t* pid) {
  CANN_SIM_ENTER(aclrtDeviceGetBareTgid);
  *pid = getpid();
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetLogicDevIdByUserDevId(int32_t user,
                                                  int32_t* logic) {
  CANN_SIM_ENTER(aclrtGetLogicDevIdByUserDevId);
  *logic = user;
  return kOk;
}

CANN_SIM_EXPORT int aclrtGetDeviceResLimit(int32_t, int type, uint32_t* value) {
  CANN_SIM_ENTER(aclrtGetDeviceResLimit);
  *value = static_cast<uint32_t>(type == 0 ? kCubeCores : kVectorCores);
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetStreamResLimit(void*, int type, uint32_t* value) {
  CANN_SIM_ENTER(aclrtGetStreamResLimit);
  *value = static_cast<uint32_t>(type == 0 ? kCubeCores : kVectorCores);
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetResInCurrentThread(int type, uint32_t* value) {
  CANN_SIM_ENTER(aclrtGetResInCurrentThread);
  *value = static_cast<uint32_t>(type == 0 ? kCubeCores : kVectorCores);
  return kOk;
}

CANN_SIM_EXPORT int aclrtGetLastError(int) {
  CANN_SIM_ENTER(aclrtGetLastError);
  return kOk;
}
CANN_SIM_EXPORT int aclrtPeekAtLastError(int) {
  CANN_SIM_ENTER(aclrtPeekAtLastError);
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetSysParamOpt(int, int64_t* value) {
  CANN_SIM_ENTER(aclrtGetSysParamOpt);
  *value = 0;
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetErrorVerbose(int32_t, void*) {
  CANN_SIM_ENTER(aclrtGetErrorVerbose);
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetDeviceUtilizationRate(int32_t, int32_t* info) {
  CANN_SIM_ENTER(aclrtGetDeviceUtilizationRate);
  for (int i = 0; i < 4; ++i) info[i] = 0;
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetMemUsageInfo(int32_t, void*, size_t,
                                         size_t* count) {
  CANN_SIM_ENTER(aclrtGetMemUsageInfo);
  *count = 0;
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetMemUceInfo(int32_t, void*, size_t, size_t* size) {
  CANN_SIM_ENTER(aclrtGetMemUceInfo);
  *size = 0;
  return kOk;
}
