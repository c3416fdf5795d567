// libascendcl: device and pinned host memory, copies and fills.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "acl_codes.h"
#include "journal.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

using namespace cann_sim;

namespace {

constexpr uint32_t kLocationHost = 0;
constexpr uint32_t kLocationDevice = 1;
constexpr uint32_t kLocationUnregistered = 2;

struct PointerAttributes {
  uint32_t device;
  uint32_t location;
  uint32_t page_size;
  uint32_t reserved[4];
};

// Sides that a copy kind demands: 'h', 'd' or '?' for source and target.
std::pair<char, char> sides(int kind) {
  switch (kind) {
    case 0:
      return {'h', 'h'};
    case 1:
    case 5:
      return {'h', 'd'};
    case 2:
      return {'d', 'h'};
    case 3:
    case 6:
    case 7:
      return {'d', 'd'};
    default:
      return {'?', '?'};
  }
}

bool side_fits(const void* pointer, char side, const char* api,
               const char* what) {
  if (side == '?') return true;
  if ((side == 'd') == is_device_pointer(pointer)) return true;
  violation(side == 'd' ? "host_pointer" : "device_pointer", api,
            std::string(what) + " " + hex(pointer) + " is " +
                (side == 'd' ? "host" : "device") +
                " memory, against the copy kind");
  return false;
}

uint8_t* side_view(void* pointer, size_t bytes, Access access, const Run& run,
                   const char* what) {
  if (!is_device_pointer(pointer)) return static_cast<uint8_t*>(pointer);
  Run any_device = run;
  any_device.device = -1;  // copies may cross devices
  return host_view(pointer, bytes, access, any_device, what);
}

void copy_now(void* to, const void* from, size_t bytes, const Run& run) {
  if (bytes == 0) return;
  uint8_t* source = side_view(const_cast<void*>(from), bytes, Access::kRead,
                              run, "copy source");
  uint8_t* target =
      side_view(to, bytes, Access::kWrite, run, "copy destination");
  if (source && target) memmove(target, source, bytes);
}

int checked_copy(void* to, size_t room, const void* from, size_t bytes,
                 int kind, const char* api) {
  if (bytes > room) return kInvalidParam;
  if (bytes && (!to || !from)) return kInvalidParam;
  std::pair<char, char> expected = sides(kind);
  bool fits = side_fits(from, expected.first, api, "source");
  fits = side_fits(to, expected.second, api, "destination") && fits;
  return fits ? kOk : kInvalidParam;
}

void trace_copy(const char* api, void* to, const void* from, size_t bytes,
                int kind, const Stream* stream) {
  if (!tracing()) return;
  trace(
      format("\"api\": \"%s\", \"to\": \"%s\", \"from\": \"%s\", "
             "\"bytes\": %zu, \"kind\": %d, \"stream\": %d",
             api, hex(to).c_str(), hex(from).c_str(), bytes, kind,
             stream ? stream_number(stream) : -1));
}

int fill(const char* api, void* pointer, size_t room, int value, size_t bytes,
         Stream* stream) {
  if (bytes > room) return kInvalidParam;
  auto run_fill = [=](const Run& run) {
    if (!bytes) return;
    uint8_t* target = side_view(pointer, bytes, Access::kWrite, run, "fill");
    if (target) memset(target, value, bytes);
  };
  if (stream) {
    enqueue(stream, api, run_fill);
  } else {
    run_fill(host_run(api));
  }
  return kOk;
}

}  // namespace

CANN_SIM_EXPORT int aclrtMalloc(void** out, size_t bytes, int) {
  CANN_SIM_ENTER(aclrtMalloc);
  if (!out || !bytes) return kInvalidParam;
  *out = device_malloc(current_device(), bytes, __builtin_return_address(0));
  trace(format("\"api\": \"aclrtMalloc\", \"bytes\": %zu, \"to\": \"%s\"",
               bytes, hex(*out).c_str()));
  return *out ? kOk : kRtMemoryAllocation;
}

CANN_SIM_EXPORT int aclrtMallocAlign32(void** out, size_t bytes, int policy) {
  CANN_SIM_ENTER(aclrtMallocAlign32);
  return aclrtMalloc(out, bytes, policy);
}

CANN_SIM_EXPORT int aclrtFree(void* pointer) {
  CANN_SIM_ENTER(aclrtFree);
  trace(format("\"api\": \"aclrtFree\", \"to\": \"%s\"", hex(pointer).c_str()));
  return device_free(pointer) ? kOk : kRtParamInvalid;
}

CANN_SIM_EXPORT int aclrtMallocHost(void** out, size_t bytes) {
  CANN_SIM_ENTER(aclrtMallocHost);
  if (!out || !bytes) return kInvalidParam;
  if (posix_memalign(out, 64, bytes)) return kRtMemoryAllocation;
  handle_created("pinned host memory", *out, __builtin_return_address(0));
  handle_adopted(*out);  // callers pool it: alive is not leaked
  return kOk;
}

CANN_SIM_EXPORT int aclrtMallocHostWithCfg(void** out, uint64_t bytes, void*) {
  CANN_SIM_ENTER(aclrtMallocHostWithCfg);
  return aclrtMallocHost(out, bytes);
}

CANN_SIM_EXPORT int aclrtFreeHost(void* pointer) {
  CANN_SIM_ENTER(aclrtFreeHost);
  bool fine = handle_retired("pinned host memory", pointer, "aclrtFreeHost",
                             [pointer] { free(pointer); });
  return fine ? kOk : kRtParamInvalid;
}

CANN_SIM_EXPORT int aclrtGetMemInfo(int, size_t* free_bytes, size_t* total) {
  CANN_SIM_ENTER(aclrtGetMemInfo);
  int64_t all = settings().memory_bytes;
  *total = all;
  *free_bytes = all - memory_use(current_device()).live_bytes;
  return kOk;
}

CANN_SIM_EXPORT int aclrtPointerGetAttributes(const void* pointer,
                                              PointerAttributes* out) {
  CANN_SIM_ENTER(aclrtPointerGetAttributes);
  memset(out, 0, sizeof(*out));
  int device = device_of(pointer);
  bool pinned = handle_known("pinned host memory", pointer);
  out->device = device < 0 ? 0 : device;
  out->location = device >= 0 ? kLocationDevice
                  : pinned    ? kLocationHost
                              : kLocationUnregistered;
  return kOk;
}

CANN_SIM_EXPORT int aclrtMemcpy(void* to, size_t room, const void* from,
                                size_t bytes, int kind) {
  CANN_SIM_ENTER(aclrtMemcpy);
  count("sync");
  trace_copy("aclrtMemcpy", to, from, bytes, kind, nullptr);
  if (capturing_on(current_device())) {
    violation("capture", "aclrtMemcpy", "a blocking copy under capture");
  }
  int code = checked_copy(to, room, from, bytes, kind, "aclrtMemcpy");
  if (!code) copy_now(to, from, bytes, host_run("aclrtMemcpy"));
  return code;
}

CANN_SIM_EXPORT int aclrtMemcpyAsync(void* to, size_t room, const void* from,
                                     size_t bytes, int kind, void* handle) {
  CANN_SIM_ENTER(aclrtMemcpyAsync);
  Stream* stream = find_stream(handle, "aclrtMemcpyAsync");
  if (!stream) return kRtStreamContext;
  trace_copy("aclrtMemcpyAsync", to, from, bytes, kind, stream);
  int code = checked_copy(to, room, from, bytes, kind, "aclrtMemcpyAsync");
  if (code) return code;
  if (!is_device_pointer(from) && !handle_known("pinned host memory", from)) {
    // Pageable memory is read before the call returns.
    std::string bytes_now(static_cast<const char*>(from), bytes);
    enqueue(stream, "aclrtMemcpyAsync",
            [to, bytes_now = std::move(bytes_now)](const Run& run) {
              copy_now(to, bytes_now.data(), bytes_now.size(), run);
            });
    return kOk;
  }
  enqueue(stream, "aclrtMemcpyAsync", [to, from, bytes](const Run& run) {
    copy_now(to, from, bytes, run);
  });
  return kOk;
}

CANN_SIM_EXPORT int aclrtMemcpyAsyncWithCondition(void* to, size_t room,
                                                  const void* from,
                                                  size_t bytes, int kind,
                                                  void* handle) {
  CANN_SIM_ENTER(aclrtMemcpyAsyncWithCondition);
  return aclrtMemcpyAsync(to, room, from, bytes, kind, handle);
}

CANN_SIM_EXPORT int aclrtMemset(void* pointer, size_t room, int32_t value,
                                size_t bytes) {
  CANN_SIM_ENTER(aclrtMemset);
  count("sync");
  return fill("aclrtMemset", pointer, room, value, bytes, nullptr);
}

CANN_SIM_EXPORT int aclrtMemsetAsync(void* pointer, size_t room, int32_t value,
                                     size_t bytes, void* handle) {
  CANN_SIM_ENTER(aclrtMemsetAsync);
  Stream* stream = find_stream(handle, "aclrtMemsetAsync");
  if (!stream) return kRtStreamContext;
  return fill("aclrtMemsetAsync", pointer, room, value, bytes, stream);
}
