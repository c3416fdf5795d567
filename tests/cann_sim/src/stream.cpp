#include "stream.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "journal.h"
#include "settings.h"

namespace cann_sim {

// One lock and one condition for all streams: there are few threads, and the
// order of every step is then easy to argue about.
struct Queued {
  std::string op;
  Task task;
  std::shared_ptr<const Clock> clock;
  uint64_t sequence = 0;
};

struct Stream {
  int number = 0;
  int device = 0;
  std::deque<Queued> queue;
  uint64_t enqueued = 0;  // sequence of the newest task
  uint64_t done = 0;      // sequence of the last finished task
  uint64_t released = 0;  // lazy mode: tasks up to here may run
  bool stop = false;
  bool working = false;  // has its thread, which the first task starts
  Clock clock;           // what a task queued now is ordered after
  Graph* graph = nullptr;
};

// A mark is a point in a stream's queue.
struct Mark {
  Stream* stream = nullptr;
  uint64_t sequence = 0;
  Clock clock;
};

struct Event {
  bool recorded = false;
  Mark mark;
  Graph* graph = nullptr;  // recorded under capture
  uint64_t microseconds = 0;
  int64_t queries = 0;
};

struct Graph {
  struct Node {
    std::string op;
    Task task;
  };
  std::vector<Node> nodes;
  std::vector<Stream*> streams;
};

namespace {

constexpr int64_t kPatience = 1000;

struct Scheduler {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Stream*> streams;
  std::map<int, Stream*> default_streams;
  int next_number = 1;
  uint64_t host_sequence = 1;
  Clock host_clock;
};

Scheduler& scheduler() {
  static Scheduler* instance = new Scheduler;
  return *instance;
}

// -1 until the thread chose a device.
thread_local int thread_device = -1;

void merge(Clock* into, const Clock& from) {
  for (auto& item : from) {
    uint64_t& mine = (*into)[item.first];
    mine = std::max(mine, item.second);
  }
}

void release(Stream* s, uint64_t sequence) {
  if (s->released < sequence) {
    s->released = sequence;
    scheduler().changed.notify_all();
  }
}

void wait_for(std::unique_lock<std::mutex>* lock, Stream* s,
              uint64_t sequence) {
  release(s, sequence);
  scheduler().changed.wait(*lock, [&] { return s->done >= sequence; });
}

// The host has seen everything up to the mark.
void host_saw(const Clock& clock, int number, uint64_t sequence) {
  Scheduler& sched = scheduler();
  merge(&sched.host_clock, clock);
  uint64_t& seen = sched.host_clock[number];
  seen = std::max(seen, sequence);
}

void work(Stream* s) {
  Scheduler& sched = scheduler();
  std::unique_lock<std::mutex> lock(sched.mutex);
  thread_device = s->device;
  while (true) {
    sched.changed.wait(lock, [&] {
      bool may_run =
          !s->queue.empty() &&
          (!settings().lazy || s->queue.front().sequence <= s->released);
      return may_run || (s->stop && s->queue.empty());
    });
    if (s->queue.empty()) return;
    Queued next = std::move(s->queue.front());
    s->queue.pop_front();
    Run run;
    run.op = next.op;
    run.device = s->device;
    run.stream_number = s->number;
    run.sequence = next.sequence;
    run.clock = next.clock;
    lock.unlock();
    next.task(run);
    next.task = nullptr;
    lock.lock();
    s->done = next.sequence;
    sched.changed.notify_all();
  }
}

Stream* new_stream(int device) {
  Scheduler& sched = scheduler();
  Stream* s = new Stream;
  s->device = device;
  s->number = sched.next_number++;
  sched.streams.push_back(s);
  return s;
}

// Needs the lock. The clock that a task queued now gets.
uint64_t push(Stream* s, const std::string& op, Task task) {
  Scheduler& sched = scheduler();
  merge(&s->clock, sched.host_clock);
  s->clock[0] = sched.host_sequence;
  Queued q;
  q.op = op;
  q.task = std::move(task);
  q.sequence = ++s->enqueued;
  s->clock[s->number] = q.sequence;
  q.clock = std::make_shared<Clock>(s->clock);
  s->queue.push_back(std::move(q));
  if (!s->working) {
    s->working = true;
    std::thread(work, s).detach();
  }
  sched.changed.notify_all();
  return s->enqueued;
}

uint64_t now_microseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

int current_device() { return std::max(thread_device, 0); }
bool device_is_set() { return thread_device >= 0; }
void set_current_device(int device) { thread_device = device; }

Stream* create_stream(void* caller) {
  Stream* s;
  {
    std::lock_guard<std::mutex> lock(scheduler().mutex);
    s = new_stream(current_device());
  }
  handle_created("stream", s, caller);
  return s;
}

Stream* find_stream(void* handle, const std::string& op) {
  if (!handle) {
    Stream* s;
    {
      Scheduler& sched = scheduler();
      std::lock_guard<std::mutex> lock(sched.mutex);
      Stream*& slot = sched.default_streams[current_device()];
      if (slot) return slot;
      s = slot = new_stream(current_device());
    }
    handle_created("stream", s, nullptr);
    return s;
  }
  if (!handle_live("stream", handle, op)) return nullptr;
  return static_cast<Stream*>(handle);
}

bool destroy_stream(void* handle) {
  Stream* s = static_cast<Stream*>(handle);
  // The object stays: its number and counters may still be asked for.
  if (!handle_retired("stream", handle, "aclrtDestroyStream", [] {})) {
    return false;
  }
  Scheduler& sched = scheduler();
  std::unique_lock<std::mutex> lock(sched.mutex);
  wait_for(&lock, s, s->enqueued);
  s->stop = true;
  sched.streams.erase(
      std::remove(sched.streams.begin(), sched.streams.end(), s),
      sched.streams.end());
  sched.changed.notify_all();
  return true;
}

int stream_device(const Stream* stream) { return stream->device; }
int stream_number(const Stream* stream) { return stream->number; }

bool stream_is_idle(Stream* s) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  return s->done >= s->enqueued;
}

void enqueue(Stream* s, const std::string& op, Task task) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  if (s->graph) {
    s->graph->nodes.push_back({op, std::move(task)});
    return;
  }
  push(s, op, std::move(task));
}

void synchronize(Stream* s) {
  count("sync");
  std::unique_lock<std::mutex> lock(scheduler().mutex);
  uint64_t target = s->enqueued;
  Clock clock = s->clock;
  wait_for(&lock, s, target);
  host_saw(clock, s->number, target);
}

void synchronize_device(int device) {
  count("sync");
  Scheduler& sched = scheduler();
  std::unique_lock<std::mutex> lock(sched.mutex);
  std::vector<Stream*> all = sched.streams;
  for (Stream* s : all) {
    if (s->device != device) continue;
    uint64_t target = s->enqueued;
    Clock clock = s->clock;
    wait_for(&lock, s, target);
    host_saw(clock, s->number, target);
  }
}

Event* create_event(void* caller) {
  Event* e = new Event;
  handle_created("event", e, caller);
  return e;
}

Event* find_event(void* handle, const std::string& op) {
  if (!handle_live("event", handle, op)) return nullptr;
  return static_cast<Event*>(handle);
}

bool destroy_event(void* handle) {
  // Kept for good: a queued record may still write its time. Events are few.
  return handle_retired("event", handle, "aclrtDestroyEvent", [] {});
}

void record_event(Event* e, Stream* s) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  e->recorded = true;
  e->queries = 0;
  e->graph = s->graph;
  if (s->graph) return;
  uint64_t sequence = push(s, "event record", [e](const Run&) {
    e->microseconds = now_microseconds();
  });
  e->mark.stream = s;
  e->mark.sequence = sequence;
  e->mark.clock = s->clock;
}

void wait_event(Stream* s, Event* e) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  if (!e->recorded) return;
  if (e->graph) {
    // Waiting for a captured event draws the stream into the capture; the
    // graph is one line of nodes, which keeps every order.
    if (!s->graph) {
      s->graph = e->graph;
      e->graph->streams.push_back(s);
    }
    return;
  }
  if (s->graph) return;
  Mark mark = e->mark;
  push(s, "event wait", [mark](const Run&) {
    std::unique_lock<std::mutex> wait_lock(scheduler().mutex);
    wait_for(&wait_lock, mark.stream, mark.sequence);
  });
  merge(&s->clock, mark.clock);
}

void synchronize_event(Event* e) {
  count("sync");
  std::unique_lock<std::mutex> lock(scheduler().mutex);
  if (!e->recorded || e->graph) return;
  Mark mark = e->mark;
  wait_for(&lock, mark.stream, mark.sequence);
  host_saw(mark.clock, mark.stream->number, mark.sequence);
}

bool query_event(Event* e) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  if (!e->recorded || e->graph) return true;
  if (e->mark.stream->done >= e->mark.sequence) {
    host_saw(e->mark.clock, e->mark.stream->number, e->mark.sequence);
    return true;
  }
  if (++e->queries > kPatience) release(e->mark.stream, e->mark.sequence);
  return false;
}

uint64_t event_microseconds(Event* e) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  return e->microseconds;
}

Run host_run(const std::string& op) {
  Scheduler& sched = scheduler();
  std::lock_guard<std::mutex> lock(sched.mutex);
  Run run;
  run.op = op;
  run.sequence = ++sched.host_sequence;
  sched.host_clock[0] = run.sequence;
  run.clock = std::make_shared<Clock>(sched.host_clock);
  return run;
}

void release_all() {
  Scheduler& sched = scheduler();
  std::lock_guard<std::mutex> lock(sched.mutex);
  for (Stream* s : sched.streams) release(s, s->enqueued);
  sched.changed.notify_all();
}

int64_t pending_tasks() {
  Scheduler& sched = scheduler();
  std::lock_guard<std::mutex> lock(sched.mutex);
  int64_t out = 0;
  for (Stream* s : sched.streams) out += s->enqueued - s->done;
  return out;
}

bool begin_capture(Stream* s) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  if (s->graph) return false;
  s->graph = new Graph;
  s->graph->streams.push_back(s);
  return true;
}

Graph* end_capture(Stream* s) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  Graph* graph = s->graph;
  if (!graph) return nullptr;
  for (Stream* member : graph->streams) member->graph = nullptr;
  return graph;
}

Graph* capturing(Stream* s) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  return s->graph;
}

bool capturing_on(int device) {
  Scheduler& sched = scheduler();
  std::lock_guard<std::mutex> lock(sched.mutex);
  for (Stream* s : sched.streams) {
    if (s->device == device && s->graph) return true;
  }
  return false;
}

void launch_graph(Graph* graph, Stream* s) {
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  for (const Graph::Node& node : graph->nodes) push(s, node.op, node.task);
}

void destroy_graph(Graph* graph) { delete graph; }

}  // namespace cann_sim
