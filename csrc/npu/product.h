// Which chip and which CANN is this?

#pragma once

#include <cstdint>
#include <string>

namespace pacache::npu {

enum class Soc { kA2, kA3, k950, kOther };

// Ordered as CANN numbers its releases: 8.3.RC1.alpha003 < 8.3.RC1 <
// 8.5.0.alpha001 < 8.5.0 < 9.0.0-beta.2 < 9.0.0 < 9.1.0-beta.3 < 9.1.0.pre <
// 9.1.0.
struct CannVersion {
  int major = 0;
  int minor = 0;
  int patch = 0;
  int stage = 0;  // kAlpha + n, kBeta + n, ...
  int number = 0;

  enum Stage { kAlpha, kBeta, kRc, kPre, kFinal };

  bool operator<(const CannVersion& other) const;
  bool operator>=(const CannVersion& other) const { return !(*this < other); }
  bool is_known() const { return major > 0; }
};

// {0, ...} when the text is no version.
CannVersion parse_cann_version(const std::string& text);

struct Product {
  Soc soc = Soc::kOther;
  std::string soc_name;  // as the runtime says it, "unknown" if it does not
  CannVersion cann;
  std::string cann_text;
};

// The process's chip and CANN. PACACHE_CANN_VERSION overrides the version.
const Product& product();

const char* soc_family(Soc soc);

std::string cann_version_text();
std::string atb_version_text();

}  // namespace pacache::npu
