// Streams and events: a worker thread per stream, tasks in order.
//
// In lazy mode a worker runs a task only when somebody waits for it: a
// stream, event or device synchronisation, or another stream's wait for an
// event behind it.
//
// Every task carries a vector clock of what it is ordered after; memory.h
// uses it to find accesses of two streams that nothing orders.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace cann_sim {

// stream number -> last task known to be done before. Number 0 is the host.
using Clock = std::map<int, uint64_t>;

struct Stream;

// Who runs: passed to every task and to every memory access.
struct Run {
  std::string op;
  int device = -1;  // -1: the host, which may touch every device
  int stream_number = 0;
  uint64_t sequence = 0;
  std::shared_ptr<const Clock> clock;
};

using Task = std::function<void(const Run&)>;

// Current device of the calling thread; 0 until it is set.
int current_device();
bool device_is_set();
void set_current_device(int device);

Stream* create_stream(void* caller);
// Null with a violation for a handle that is none. A null handle is the
// default stream of the current device.
Stream* find_stream(void* handle, const std::string& op);
bool destroy_stream(void* handle);
int stream_device(const Stream* stream);
int stream_number(const Stream* stream);
bool stream_is_idle(Stream* stream);

// Queues task. Under capture it is recorded in the graph instead.
void enqueue(Stream* stream, const std::string& op, Task task);

void synchronize(Stream* stream);
void synchronize_device(int device);

struct Event;
Event* create_event(void* caller);
Event* find_event(void* handle, const std::string& op);
bool destroy_event(void* handle);
void record_event(Event* event, Stream* stream);
void wait_event(Stream* stream, Event* event);
void synchronize_event(Event* event);
// Complete (or never recorded). In lazy mode an event that is asked for
// often enough gets its work released, as a device makes progress unasked.
bool query_event(Event* event);
uint64_t event_microseconds(Event* event);

// The host as an accessor: ordered after all that it waited for so far.
Run host_run(const std::string& op);

// Lets everything queued run; used when lazy mode is switched off.
void release_all();

// Tasks queued and not yet run, over all streams.
int64_t pending_tasks();

// ---- graph capture ------------------------------------------------------

struct Graph;
bool begin_capture(Stream* stream);
Graph* end_capture(Stream* stream);
Graph* capturing(Stream* stream);
// Whether any stream of the device is under capture.
bool capturing_on(int device);
void launch_graph(Graph* graph, Stream* stream);
void destroy_graph(Graph* graph);

}  // namespace cann_sim
