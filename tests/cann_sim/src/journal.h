// What the simulator writes down: violations, API counters, the call trace,
// injected failures, and the handles that are alive.
//
// Everything here may be called from any thread. The state behind it is
// allocated once and never freed, so that worker threads that outlive main()
// can still use it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace cann_sim {

// Adds a violation. Kinds are listed in README.md; op may be empty.
void violation(const std::string& kind, const std::string& op,
               const std::string& text);

// Counts one call of api. Returns the injected error code when a test asked
// for this call to fail, else 0.
int enter(const char* api);
int enter(const std::string& api);

// Adds to a counter that is no API call (for example "sync" or "pta_hit").
void count(const char* name);

// Appends one JSON object, without braces, to the trace: thread, device and a
// running number are added.
void trace(const std::string& fields);
bool tracing();

// The message that aclGetRecentErrMsg returns next on this thread.
void set_error(const std::string& text);
const char* take_error();

std::string quoted(const std::string& text);
std::string hex(const void* pointer);

// printf into a std::string.
std::string format(const char* pattern, ...)
    __attribute__((format(printf, 1, 2)));

// ---- handles ----------------------------------------------------------

// The registry owns no object. It keeps the kind of every live handle, who
// created it (the shared library of `caller`), and a queue of retired ones:
// a retired object stays readable until kQuarantine others were retired, so
// that a use after destroy is reported instead of crashing.
void handle_created(const char* kind, const void* handle, void* caller);

// True when handle is a live object of kind. Otherwise records the violation
// destroyed_handle or bad_handle in the name of op.
bool handle_live(const char* kind, const void* handle, const std::string& op);

// As handle_live, without recording anything.
bool handle_known(const char* kind, const void* handle);

enum class HandleState { kUnknown, kLive, kRetired };
HandleState handle_state(const char* kind, const void* handle);

// Marks a live handle as destroyed and queues free_it. Returns false, with a
// violation, when it was not live.
bool handle_retired(const char* kind, const void* handle, const std::string& op,
                    std::function<void()> free_it);

// The handle is of a kind that callers keep on purpose: alive, it is no leak.
void handle_adopted(const void* handle);

// Name of the shared library that contains an address.
std::string module_of(const void* address);

}  // namespace cann_sim
