// libascendcl: streams, events, host callbacks and graph capture.
#include <unistd.h>

#include <cstdint>

#include "acl_codes.h"
#include "journal.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

using namespace cann_sim;

namespace {

constexpr int kStreamComplete = 0;
constexpr int kStreamNotReady = 1;
constexpr int kEventNotReady = 0;
constexpr int kEventComplete = 1;

int sync_stream(const char* api, void* handle) {
  Stream* stream = find_stream(handle, api);
  if (!stream) return kRtStreamContext;
  trace(format("\"api\": \"%s\", \"stream\": %d", api, stream_number(stream)));
  if (capturing(stream)) {
    violation("capture", api, "synchronising a stream that is captured");
    return kRtStreamContext;
  }
  synchronize(stream);
  return kOk;
}

int new_stream(const char* api, void** out, void* caller) {
  if (!out) return kInvalidParam;
  Stream* stream = create_stream(caller);
  *out = stream;
  trace(format("\"api\": \"%s\", \"stream\": %d", api, stream_number(stream)));
  return kOk;
}

int launch_host_function(const char* api, void* handle, void (*function)(void*),
                         void* argument) {
  Stream* stream = find_stream(handle, api);
  if (!stream) return kRtStreamContext;
  enqueue(stream, api,
          [function, argument](const Run&) { function(argument); });
  return kOk;
}

}  // namespace

CANN_SIM_EXPORT int aclrtCreateStream(void** out) {
  CANN_SIM_ENTER(aclrtCreateStream);
  return new_stream("aclrtCreateStream", out, __builtin_return_address(0));
}
CANN_SIM_EXPORT int aclrtCreateStreamWithConfig(void** out, uint32_t,
                                                uint32_t) {
  CANN_SIM_ENTER(aclrtCreateStreamWithConfig);
  return new_stream("aclrtCreateStreamWithConfig", out,
                    __builtin_return_address(0));
}
CANN_SIM_EXPORT int aclrtDestroyStream(void* stream) {
  CANN_SIM_ENTER(aclrtDestroyStream);
  return destroy_stream(stream) ? kOk : kRtStreamContext;
}
CANN_SIM_EXPORT int aclrtDestroyStreamForce(void* stream) {
  CANN_SIM_ENTER(aclrtDestroyStreamForce);
  return destroy_stream(stream) ? kOk : kRtStreamContext;
}
CANN_SIM_EXPORT int aclrtSynchronizeStream(void* stream) {
  CANN_SIM_ENTER(aclrtSynchronizeStream);
  return sync_stream("aclrtSynchronizeStream", stream);
}
CANN_SIM_EXPORT int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t) {
  CANN_SIM_ENTER(aclrtSynchronizeStreamWithTimeout);
  return sync_stream("aclrtSynchronizeStreamWithTimeout", stream);
}
CANN_SIM_EXPORT int aclrtStreamQuery(void* handle, int* status) {
  CANN_SIM_ENTER(aclrtStreamQuery);
  Stream* stream = find_stream(handle, "aclrtStreamQuery");
  if (!stream) return kRtStreamContext;
  *status = stream_is_idle(stream) ? kStreamComplete : kStreamNotReady;
  return kOk;
}
CANN_SIM_EXPORT int aclrtStreamGetId(void* handle, int32_t* id) {
  CANN_SIM_ENTER(aclrtStreamGetId);
  Stream* stream = find_stream(handle, "aclrtStreamGetId");
  if (!stream) return kRtStreamContext;
  *id = stream_number(stream);
  return kOk;
}
CANN_SIM_EXPORT int aclrtGetStreamOverflowSwitch(void*, uint32_t* flag) {
  CANN_SIM_ENTER(aclrtGetStreamOverflowSwitch);
  *flag = 0;
  return kOk;
}

// ---- events -------------------------------------------------------------

CANN_SIM_EXPORT int aclrtCreateEventWithFlag(void** out, uint32_t) {
  CANN_SIM_ENTER(aclrtCreateEventWithFlag);
  *out = create_event(__builtin_return_address(0));
  return kOk;
}
CANN_SIM_EXPORT int aclrtCreateEventExWithFlag(void** out, uint32_t) {
  CANN_SIM_ENTER(aclrtCreateEventExWithFlag);
  *out = create_event(__builtin_return_address(0));
  return kOk;
}
CANN_SIM_EXPORT int aclrtDestroyEvent(void* event) {
  CANN_SIM_ENTER(aclrtDestroyEvent);
  return destroy_event(event) ? kOk : kRtParamInvalid;
}
CANN_SIM_EXPORT int aclrtRecordEvent(void* event_handle, void* handle) {
  CANN_SIM_ENTER(aclrtRecordEvent);
  Event* event = find_event(event_handle, "aclrtRecordEvent");
  Stream* stream = find_stream(handle, "aclrtRecordEvent");
  if (!event || !stream) return kRtParamInvalid;
  record_event(event, stream);
  return kOk;
}
CANN_SIM_EXPORT int aclrtResetEvent(void* event, void*) {
  CANN_SIM_ENTER(aclrtResetEvent);
  return find_event(event, "aclrtResetEvent") ? kOk : kRtParamInvalid;
}
CANN_SIM_EXPORT int aclrtStreamWaitEvent(void* handle, void* event_handle) {
  CANN_SIM_ENTER(aclrtStreamWaitEvent);
  Event* event = find_event(event_handle, "aclrtStreamWaitEvent");
  Stream* stream = find_stream(handle, "aclrtStreamWaitEvent");
  if (!event || !stream) return kRtParamInvalid;
  wait_event(stream, event);
  return kOk;
}
CANN_SIM_EXPORT int aclrtSynchronizeEvent(void* event_handle) {
  CANN_SIM_ENTER(aclrtSynchronizeEvent);
  Event* event = find_event(event_handle, "aclrtSynchronizeEvent");
  if (!event) return kRtParamInvalid;
  trace("\"api\": \"aclrtSynchronizeEvent\"");
  synchronize_event(event);
  return kOk;
}
CANN_SIM_EXPORT int aclrtQueryEventStatus(void* event_handle, int* status) {
  CANN_SIM_ENTER(aclrtQueryEventStatus);
  Event* event = find_event(event_handle, "aclrtQueryEventStatus");
  if (!event) return kRtParamInvalid;
  *status = query_event(event) ? kEventComplete : kEventNotReady;
  return kOk;
}
CANN_SIM_EXPORT int aclrtQueryEventWaitStatus(void* event_handle, int* status) {
  CANN_SIM_ENTER(aclrtQueryEventWaitStatus);
  Event* event = find_event(event_handle, "aclrtQueryEventWaitStatus");
  if (!event) return kRtParamInvalid;
  *status = query_event(event) ? 0 : 1;
  return kOk;
}
CANN_SIM_EXPORT int aclrtEventElapsedTime(float* milliseconds, void* begin,
                                          void* end) {
  CANN_SIM_ENTER(aclrtEventElapsedTime);
  Event* first = find_event(begin, "aclrtEventElapsedTime");
  Event* last = find_event(end, "aclrtEventElapsedTime");
  if (!first || !last) return kRtParamInvalid;
  *milliseconds =
      static_cast<float>((static_cast<double>(event_microseconds(last)) -
                          static_cast<double>(event_microseconds(first))) /
                         1000.0);
  return kOk;
}
CANN_SIM_EXPORT int aclrtEventGetTimestamp(void* event_handle,
                                           uint64_t* microseconds) {
  CANN_SIM_ENTER(aclrtEventGetTimestamp);
  Event* event = find_event(event_handle, "aclrtEventGetTimestamp");
  if (!event) return kRtParamInvalid;
  *microseconds = event_microseconds(event);
  return kOk;
}

// ---- host functions -----------------------------------------------------

CANN_SIM_EXPORT int aclrtLaunchHostFunc(void* stream, void (*function)(void*),
                                        void* argument) {
  CANN_SIM_ENTER(aclrtLaunchHostFunc);
  return launch_host_function("aclrtLaunchHostFunc", stream, function,
                              argument);
}
CANN_SIM_EXPORT int aclrtLaunchCallback(void (*function)(void*), void* argument,
                                        int, void* stream) {
  CANN_SIM_ENTER(aclrtLaunchCallback);
  return launch_host_function("aclrtLaunchCallback", stream, function,
                              argument);
}
CANN_SIM_EXPORT int aclrtSubscribeReport(uint64_t, void*) {
  CANN_SIM_ENTER(aclrtSubscribeReport);
  return kOk;
}
CANN_SIM_EXPORT int aclrtUnSubscribeReport(uint64_t, void*) {
  CANN_SIM_ENTER(aclrtUnSubscribeReport);
  return kOk;
}
CANN_SIM_EXPORT int aclrtProcessReport(int32_t timeout) {
  CANN_SIM_ENTER(aclrtProcessReport);
  usleep(1000 * (timeout > 0 && timeout < 100 ? timeout : 100));
  return kRtReportTimeout;
}

// ---- graph capture ------------------------------------------------------

CANN_SIM_EXPORT int aclmdlRICaptureBegin(void* handle, int) {
  CANN_SIM_ENTER(aclmdlRICaptureBegin);
  Stream* stream = find_stream(handle, "aclmdlRICaptureBegin");
  if (!stream || !begin_capture(stream)) return kRtParamInvalid;
  trace(format("\"api\": \"aclmdlRICaptureBegin\", \"stream\": %d",
               stream_number(stream)));
  return kOk;
}
CANN_SIM_EXPORT int aclmdlRICaptureEnd(void* handle, void** model) {
  CANN_SIM_ENTER(aclmdlRICaptureEnd);
  Stream* stream = find_stream(handle, "aclmdlRICaptureEnd");
  Graph* graph = stream ? end_capture(stream) : nullptr;
  if (!graph) return kRtParamInvalid;
  handle_created("graph", graph, __builtin_return_address(0));
  *model = graph;
  return kOk;
}
CANN_SIM_EXPORT int aclmdlRICaptureGetInfo(void* handle, int* status,
                                           void** model) {
  CANN_SIM_ENTER(aclmdlRICaptureGetInfo);
  Stream* stream = find_stream(handle, "aclmdlRICaptureGetInfo");
  if (!stream) return kRtParamInvalid;
  Graph* graph = capturing(stream);
  if (status) *status = graph ? 1 : 0;
  if (model) *model = graph;
  return kOk;
}
CANN_SIM_EXPORT int aclmdlRICaptureThreadExchangeMode(int*) {
  CANN_SIM_ENTER(aclmdlRICaptureThreadExchangeMode);
  return kOk;
}
CANN_SIM_EXPORT int aclmdlRIExecuteAsync(void* model, void* handle) {
  CANN_SIM_ENTER(aclmdlRIExecuteAsync);
  Stream* stream = find_stream(handle, "aclmdlRIExecuteAsync");
  if (!stream || !handle_live("graph", model, "aclmdlRIExecuteAsync")) {
    return kRtParamInvalid;
  }
  launch_graph(static_cast<Graph*>(model), stream);
  return kOk;
}
CANN_SIM_EXPORT int aclmdlRIDestroy(void* model) {
  CANN_SIM_ENTER(aclmdlRIDestroy);
  bool fine = handle_retired("graph", model, "aclmdlRIDestroy", [model] {
    destroy_graph(static_cast<Graph*>(model));
  });
  return fine ? kOk : kRtParamInvalid;
}
CANN_SIM_EXPORT int aclmdlRIGetId(void*, uint32_t* id) {
  CANN_SIM_ENTER(aclmdlRIGetId);
  *id = 1;
  return kOk;
}
