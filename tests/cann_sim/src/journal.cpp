#include "journal.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "journal_export.h"
#include "settings.h"
#include "stream.h"

namespace cann_sim {
namespace {

constexpr size_t kQuarantine = 65536;
constexpr size_t kTraceLimit = 20000;
constexpr size_t kViolationLimit = 2000;

struct Handle {
  std::string kind;
  std::string module;
  uint64_t serial = 0;
  bool adopted = false;
};

struct Retired {
  const void* handle;
  std::function<void()> free_it;
};

struct Failure {
  int code;
  int64_t calls_left;
};

struct Journal {
  std::mutex mutex;
  std::vector<std::string> violations;
  int64_t violation_count = 0;
  std::map<std::string, int64_t> counters;
  std::map<std::string, std::vector<Failure>> failures;
  std::deque<std::string> trace;
  int64_t trace_number = 0;
  FILE* trace_file = nullptr;
  std::unordered_map<const void*, Handle> live;
  std::unordered_map<const void*, std::string> retired_kinds;
  std::deque<Retired> retired;
  uint64_t serial = 0;

  Journal() {
    const char* path = getenv("CANN_SIM_TRACE");
    if (path && *path && strcmp(path, "0") && strcmp(path, "1")) {
      trace_file = fopen(path, "a");
    }
  }
};

Journal& journal() {
  static Journal* instance = new Journal;
  return *instance;
}

thread_local std::string recent_error;
thread_local std::string returned_error;

bool is_live(Journal& j, const char* kind, const void* handle) {
  auto it = j.live.find(handle);
  return it != j.live.end() && it->second.kind == kind;
}

// Text of the violation for a handle that is not live; kind in `out_kind`.
std::string describe_dead(Journal& j, const char* kind, const void* handle,
                          std::string* out_kind) {
  auto live = j.live.find(handle);
  if (live != j.live.end()) {
    *out_kind = "bad_handle";
    return hex(handle) + " is a " + live->second.kind + ", not a " + kind;
  }
  auto dead = j.retired_kinds.find(handle);
  if (dead != j.retired_kinds.end()) {
    *out_kind = "destroyed_handle";
    return dead->second + " " + hex(handle) + " was destroyed before";
  }
  *out_kind = "bad_handle";
  return hex(handle) + " was never a " + kind;
}

std::string violation_json(const std::string& kind, const std::string& op,
                           const std::string& text) {
  return "{\"kind\": " + quoted(kind) + ", \"op\": " + quoted(op) +
         ", \"text\": " + quoted(text) + "}";
}

std::string joined(const std::vector<std::string>& items) {
  std::string out = "[";
  for (size_t i = 0; i < items.size(); ++i) {
    out += (i ? ",\n" : "") + items[i];
  }
  return out + "]";
}

}  // namespace

void violation(const std::string& kind, const std::string& op,
               const std::string& text) {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  ++j.violation_count;
  ++j.counters["violation"];
  if (j.violations.size() < kViolationLimit) {
    j.violations.push_back(violation_json(kind, op, text));
  }
  static const bool loud = getenv("CANN_SIM_QUIET") == nullptr;
  if (loud && j.violation_count <= 50) {
    fprintf(stderr, "cann_sim: violation %s in %s: %s\n", kind.c_str(),
            op.c_str(), text.c_str());
  }
}

int enter(const std::string& api) { return enter(api.c_str()); }

int enter(const char* api) {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  ++j.counters[api];
  auto it = j.failures.find(api);
  if (it == j.failures.end()) return 0;
  for (size_t i = 0; i < it->second.size(); ++i) {
    if (--it->second[i].calls_left == 0) {
      int code = it->second[i].code;
      it->second.erase(it->second.begin() + i);
      recent_error = std::string("cann_sim: ") + api + " was made to fail";
      return code;
    }
  }
  return 0;
}

void count(const char* name) {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  ++j.counters[name];
}

bool tracing() { return settings().trace; }

void trace(const std::string& fields) {
  if (!tracing()) return;
  int device = current_device();
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  std::string line = format("{\"n\": %lld, \"thread\": %ld, \"device\": %d, ",
                            static_cast<long long>(j.trace_number++),
                            syscall(SYS_gettid), device) +
                     fields + "}";
  if (j.trace_file) {
    fprintf(j.trace_file, "%s\n", line.c_str());
    fflush(j.trace_file);
  }
  j.trace.push_back(std::move(line));
  if (j.trace.size() > kTraceLimit) j.trace.pop_front();
}

void set_error(const std::string& text) { recent_error = text; }

const char* take_error() {
  returned_error.swap(recent_error);
  recent_error.clear();
  return returned_error.c_str();
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20 || c >= 0x7F) {
      out += format("\\u%04x", c);
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string hex(const void* pointer) {
  return format("0x%llx", static_cast<unsigned long long>(
                              reinterpret_cast<uintptr_t>(pointer)));
}

std::string format(const char* pattern, ...) {
  va_list args;
  va_start(args, pattern);
  va_list copy;
  va_copy(copy, args);
  int size = vsnprintf(nullptr, 0, pattern, copy);
  va_end(copy);
  std::string out(size < 0 ? 0 : size, '\0');
  vsnprintf(&out[0], out.size() + 1, pattern, args);
  va_end(args);
  return out;
}

std::string module_of(const void* address) {
  Dl_info info = {};
  if (!address || !dladdr(address, &info) || !info.dli_fname) return "?";
  const char* slash = strrchr(info.dli_fname, '/');
  return slash ? slash + 1 : info.dli_fname;
}

void handle_created(const char* kind, const void* handle, void* caller) {
  std::string module = module_of(caller);
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  j.live[handle] = Handle{kind, module, ++j.serial, false};
  j.retired_kinds.erase(handle);
}

bool handle_known(const char* kind, const void* handle) {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  return is_live(j, kind, handle);
}

HandleState handle_state(const char* kind, const void* handle) {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  if (is_live(j, kind, handle)) return HandleState::kLive;
  auto dead = j.retired_kinds.find(handle);
  bool retired = dead != j.retired_kinds.end() && dead->second == kind;
  return retired ? HandleState::kRetired : HandleState::kUnknown;
}

bool handle_live(const char* kind, const void* handle, const std::string& op) {
  std::string bad_kind;
  std::string text;
  {
    Journal& j = journal();
    std::lock_guard<std::mutex> lock(j.mutex);
    if (is_live(j, kind, handle)) return true;
    text = describe_dead(j, kind, handle, &bad_kind);
  }
  violation(bad_kind, op, text);
  return false;
}

bool handle_retired(const char* kind, const void* handle, const std::string& op,
                    std::function<void()> free_it) {
  std::string bad_kind;
  std::string text;
  std::vector<Retired> out;
  {
    Journal& j = journal();
    std::lock_guard<std::mutex> lock(j.mutex);
    if (is_live(j, kind, handle)) {
      j.live.erase(handle);
      j.retired_kinds[handle] = kind;
      j.retired.push_back({handle, std::move(free_it)});
      while (j.retired.size() > kQuarantine) {
        out.push_back(std::move(j.retired.front()));
        j.retired_kinds.erase(out.back().handle);
        j.retired.pop_front();
      }
    } else {
      text = describe_dead(j, kind, handle, &bad_kind);
    }
  }
  for (Retired& old : out) old.free_it();
  if (text.empty()) return true;
  violation(bad_kind, op, text);
  return false;
}

void handle_adopted(const void* handle) {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  auto it = j.live.find(handle);
  if (it != j.live.end()) it->second.adopted = true;
}

// ---- what control.cpp hands out ------------------------------------------

std::string violations_json() {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  return joined(j.violations);
}

int64_t violation_total() {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  return j.violation_count;
}

std::string counters_json() {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  std::string out = "{";
  for (auto& item : j.counters) {
    out += (out.size() > 1 ? ", " : "") + quoted(item.first) +
           format(": %lld", static_cast<long long>(item.second));
  }
  return out + "}";
}

std::string trace_json() {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  return joined(std::vector<std::string>(j.trace.begin(), j.trace.end()));
}

std::string handles_json() {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  std::vector<std::string> out;
  for (auto& item : j.live) {
    out.push_back(format(
        "{\"kind\": %s, \"module\": %s, \"handle\": %s, "
        "\"serial\": %llu, \"adopted\": %s}",
        quoted(item.second.kind).c_str(), quoted(item.second.module).c_str(),
        quoted(hex(item.first)).c_str(),
        static_cast<unsigned long long>(item.second.serial),
        item.second.adopted ? "true" : "false"));
  }
  return joined(out);
}

void clear_journal() {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  j.violations.clear();
  j.violation_count = 0;
  j.counters.clear();
  j.trace.clear();
  j.failures.clear();
}

void clear_trace() {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  j.trace.clear();
}

void fail_call(const std::string& api, int code, int64_t nth) {
  Journal& j = journal();
  std::lock_guard<std::mutex> lock(j.mutex);
  j.failures[api].push_back({code, nth});
}

void record_leaks() {
  static const char* const kLeakKinds[] = {
      "aclTensor",    "aclTensorList", "aclScalar",    "aclScalarList",
      "aclIntArray",  "aclFloatArray", "aclBoolArray", "aclOpExecutor",
      "atb::Context", "atb::Operation"};
  std::map<std::string, int64_t> leaks;
  {
    Journal& j = journal();
    std::lock_guard<std::mutex> lock(j.mutex);
    for (auto& item : j.live) {
      for (const char* kind : kLeakKinds) {
        if (item.second.kind == kind && !item.second.adopted) {
          ++leaks[item.second.kind + " created by " + item.second.module];
        }
      }
    }
  }
  for (auto& item : leaks) {
    violation(
        "leak", "exit",
        format("%lld x ", static_cast<long long>(item.second)) + item.first);
  }
}

}  // namespace cann_sim
