#include "settings.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace cann_sim {
namespace {

struct NamedVersion {
  int version;
  const char* text;
};

constexpr NamedVersion kVersions[] = {
    {kCann830Alpha3, "8.3.RC1.alpha003"},
    {kCann850, "8.5.0"},
    {kCann900, "9.0.0"},
    {kCann910, "9.1.0"},
};

std::atomic<const std::string*> current_soc{nullptr};

int64_t number(const char* name, int64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoll(text) : otherwise;
}

const char* text(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

Settings* read_environment() {
  Settings* s = new Settings;
  s->lazy = number("CANN_SIM_LAZY", 0) != 0;
  s->races = number("CANN_SIM_RACES", 1) != 0;
  s->trace = strcmp(text("CANN_SIM_TRACE", "1"), "0") != 0;
  s->devices = static_cast<int>(number("CANN_SIM_DEVICES", 2));
  s->phase1_us = number("CANN_SIM_PHASE1_US", 0);
  s->phase2_us = number("CANN_SIM_PHASE2_US", 0);
  s->memory_bytes = number("CANN_SIM_MEMORY_MB", 64 << 10) << 20;
  s->atb_workspace_bytes = number("CANN_SIM_ATB_WORKSPACE", 0);
  const char* wanted = text("CANN_SIM_VERSION", "9.1.0");
  bool known = false;
  for (const NamedVersion& v : kVersions) {
    if (!strcmp(v.text, wanted)) {
      s->version = v.version;
      known = true;
    }
  }
  if (!known) {
    fprintf(stderr, "cann_sim: unknown CANN_SIM_VERSION %s\n", wanted);
    abort();
  }
  return s;
}

}  // namespace

Settings& settings() {
  static Settings* instance = read_environment();
  return *instance;
}

const char* soc_name() {
  const std::string* soc = current_soc.load();
  if (!soc) {
    set_soc_name(text("CANN_SIM_SOC", "Ascend910B3"));
    soc = current_soc.load();
  }
  return soc->c_str();
}

void set_soc_name(const std::string& name) {
  // Old names are kept: a caller may still hold the pointer.
  current_soc = new std::string(name);
}

bool soc_is_a2_a3() {
  std::string soc = soc_name();
  bool a2 = soc.find("Ascend910B") != std::string::npos &&
            soc.size() > strlen("Ascend910B");
  return a2 || soc.find("Ascend910_93") != std::string::npos;
}

bool soc_is_950() {
  return std::string(soc_name()).find("Ascend950") != std::string::npos;
}

const char* version_text() {
  for (const NamedVersion& v : kVersions) {
    if (v.version == settings().version) return v.text;
  }
  return "?";
}

bool set_version_text(const std::string& wanted) {
  for (const NamedVersion& v : kVersions) {
    if (wanted == v.text) {
      settings().version = v.version;
      return true;
    }
  }
  return false;
}

void spin(int64_t microseconds) {
  if (microseconds <= 0) return;
  auto end = std::chrono::steady_clock::now() +
             std::chrono::microseconds(microseconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

}  // namespace cann_sim
