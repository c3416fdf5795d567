// What can be set: by environment variable before the process starts, by
// cann_sim_set_* while it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace cann_sim {

// CANN editions, in the order of their release.
enum Version {
  kCann830Alpha3 = 830,  // 8.3.RC1.alpha003: 11-argument scatter
  kCann850 = 850,
  kCann900 = 900,
  kCann910 = 910,
};

struct Settings {
  std::atomic<int> version{kCann910};
  std::atomic<bool> lazy{false};
  std::atomic<bool> races{true};
  std::atomic<bool> trace{true};
  std::atomic<int> devices{2};
  std::atomic<int64_t> phase1_us{0};
  std::atomic<int64_t> phase2_us{0};
  std::atomic<int64_t> memory_bytes{int64_t{64} << 30};
  std::atomic<int64_t> atb_workspace_bytes{0};
};

Settings& settings();

// SoC name as aclrtGetSocName reports it. The pointer stays valid.
const char* soc_name();
void set_soc_name(const std::string& name);

// True for Atlas A2 and A3, the products both operators were made for.
bool soc_is_a2_a3();
bool soc_is_950();

// "9.1.0" and the like.
const char* version_text();
bool set_version_text(const std::string& text);

// Burns the given number of microseconds on the calling thread.
void spin(int64_t microseconds);

}  // namespace cann_sim
