// The journal as control.cpp hands it to a test.
#pragma once

#include <cstdint>
#include <string>

namespace cann_sim {

std::string violations_json();
int64_t violation_total();
std::string counters_json();
std::string trace_json();
std::string handles_json();
void clear_journal();
void clear_trace();
void fail_call(const std::string& api, int code, int64_t nth);

// One "leak" violation per kind and creating library of handle still alive.
void record_leaks();

}  // namespace cann_sim
