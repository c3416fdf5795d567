// The plain C interface that tests reach through ctypes; control.py is its
// typed face.
#include "acl_codes.h"
#include "journal.h"
#include "journal_export.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

using namespace cann_sim;

namespace {

// Owned by the caller until cann_sim_free.
char* handed_out(const std::string& text) { return strdup(text.c_str()); }

}  // namespace

CANN_SIM_EXPORT void cann_sim_free(char* text) { free(text); }
CANN_SIM_EXPORT char* cann_sim_violations() {
  return handed_out(violations_json());
}
CANN_SIM_EXPORT int64_t cann_sim_violation_count() { return violation_total(); }
CANN_SIM_EXPORT char* cann_sim_counters() {
  return handed_out(counters_json());
}
CANN_SIM_EXPORT char* cann_sim_trace() { return handed_out(trace_json()); }
CANN_SIM_EXPORT char* cann_sim_live_objects() {
  return handed_out(handles_json());
}
CANN_SIM_EXPORT void cann_sim_clear() { clear_journal(); }
CANN_SIM_EXPORT void cann_sim_clear_trace() { clear_trace(); }
CANN_SIM_EXPORT void cann_sim_fail_next(const char* api, int code,
                                        int64_t nth) {
  fail_call(api, code, nth);
}
CANN_SIM_EXPORT void cann_sim_set_lazy(int lazy) {
  settings().lazy = lazy != 0;
  if (!lazy) release_all();
}
CANN_SIM_EXPORT void cann_sim_set_races(int on) { settings().races = on != 0; }
CANN_SIM_EXPORT void cann_sim_set_trace(int on) { settings().trace = on != 0; }
CANN_SIM_EXPORT void cann_sim_set_phase_cost(int64_t phase1, int64_t phase2) {
  settings().phase1_us = phase1;
  settings().phase2_us = phase2;
}
CANN_SIM_EXPORT int cann_sim_set_version(const char* version) {
  return set_version_text(version) ? 0 : 1;
}
CANN_SIM_EXPORT const char* cann_sim_version() { return version_text(); }
CANN_SIM_EXPORT void cann_sim_set_soc(const char* soc) { set_soc_name(soc); }
CANN_SIM_EXPORT int64_t cann_sim_pending() { return pending_tasks(); }
CANN_SIM_EXPORT char* cann_sim_device_memory(int device) {
  MemoryUse use = memory_use(device);
  return handed_out(format(
      "{\"live_bytes\": %lld, \"live_blocks\": %lld, \"peak_bytes\": %lld, "
      "\"mallocs\": %lld, \"frees\": %lld}",
      static_cast<long long>(use.live_bytes),
      static_cast<long long>(use.live_blocks),
      static_cast<long long>(use.peak_bytes),
      static_cast<long long>(use.mallocs), static_cast<long long>(use.frees)));
}
// Copies device memory out without being an accessor.
CANN_SIM_EXPORT int cann_sim_peek(const void* pointer, void* to, size_t bytes) {
  uint8_t* view = peek(pointer, bytes);
  if (!view) return 1;
  memcpy(to, view, bytes);
  return 0;
}

namespace {

// Runs after the libraries that depend on this one were torn down.
__attribute__((destructor)) void report_at_exit() {
  if (!getenv("CANN_SIM_NO_LEAK_CHECK")) record_leaks();
  const char* path = getenv("CANN_SIM_REPORT");
  if (path && *path) {
    if (FILE* file = fopen(path, "w")) {
      std::string text = "{\"violations\": " + violations_json() +
                         ", \"counters\": " + counters_json() + "}\n";
      fputs(text.c_str(), file);
      fclose(file);
    }
  }
  const char* code = getenv("CANN_SIM_EXIT_CODE");
  if (code && *code && violation_total()) {
    fflush(stdout);
    fflush(stderr);
    _exit(atoi(code));
  }
}

}  // namespace
