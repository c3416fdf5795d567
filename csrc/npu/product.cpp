#include "product.h"

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <tuple>

#include "cann_library.h"

// Exported by torch_npu.
std::string GetCANNVersion(const std::string& module);

namespace pacache::npu {
namespace {

// Digits at text[i], or -1; moves i behind them.
int read_number(const std::string& text, size_t& i) {
  if (i >= text.size() ||
      std::isdigit(static_cast<unsigned char>(text[i])) == 0) {
    return -1;
  }
  int number = 0;
  while (i < text.size() &&
         std::isdigit(static_cast<unsigned char>(text[i])) != 0 &&
         number < 100000) {
    number = number * 10 + (text[i++] - '0');
  }
  return number;
}

std::string lower(std::string text) {
  for (char& c : text) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

std::string read_soc_name() {
  using GetSocName = const char* (*)();
  const auto get =
      reinterpret_cast<GetSocName>(find_runtime("aclrtGetSocName"));
  const char* name = get == nullptr ? nullptr : get();
  return name == nullptr ? "unknown" : name;
}

Soc family_of(const std::string& name) {
  // The bare "Ascend910B" is an older chip (910A).
  const std::string a2 = "Ascend910B";
  if (name.rfind(a2, 0) == 0 && name.size() > a2.size()) {
    return Soc::kA2;
  }
  if (name.rfind("Ascend910_93", 0) == 0) {
    return Soc::kA3;
  }
  if (name.rfind("Ascend910_95", 0) == 0 || name.rfind("Ascend950", 0) == 0) {
    return Soc::k950;
  }
  return Soc::kOther;
}

std::string read_cann_version() {
  const char* forced = std::getenv("PACACHE_CANN_VERSION");
  return forced != nullptr ? forced : GetCANNVersion("CANN");
}

Product read_product() {
  Product product;
  product.soc_name = read_soc_name();
  product.soc = family_of(product.soc_name);
  product.cann_text = read_cann_version();
  product.cann = parse_cann_version(product.cann_text);
  return product;
}

}  // namespace

bool CannVersion::operator<(const CannVersion& other) const {
  return std::tie(major, minor, patch, stage, number) <
         std::tie(other.major, other.minor, other.patch, other.stage,
                  other.number);
}

CannVersion parse_cann_version(const std::string& raw) {
  const std::string text = lower(raw);
  CannVersion version;
  size_t i = 0;
  const int major = read_number(text, i);
  if (major < 0 || i >= text.size() || text[i] != '.') {
    return {};
  }
  const int minor = read_number(text, ++i);
  if (minor < 0) {
    return {};
  }
  version.major = major;
  version.minor = minor;
  version.stage = CannVersion::kFinal;
  if (i < text.size() && text[i] == '.' && i + 1 < text.size() &&
      std::isdigit(static_cast<unsigned char>(text[i + 1])) != 0) {
    version.patch = read_number(text, ++i);
  }
  // An alpha of a release candidate is an alpha.
  const std::pair<const char*, CannVersion::Stage> stages[] = {
      {"alpha", CannVersion::kAlpha},
      {"beta", CannVersion::kBeta},
      {"rc", CannVersion::kRc},
      {"pre", CannVersion::kPre},
  };
  for (const auto& [word, stage] : stages) {
    const size_t at = text.find(word, i);
    if (at == std::string::npos) {
      continue;
    }
    version.stage = stage;
    size_t j = at + std::string(word).size();
    if (j < text.size() && text[j] == '.') {
      ++j;
    }
    version.number = std::max(0, read_number(text, j));
    break;
  }
  return version;
}

const Product& product() {
  static const Product found = read_product();
  return found;
}

const char* soc_family(Soc soc) {
  switch (soc) {
    case Soc::kA2:
      return "Atlas A2";
    case Soc::kA3:
      return "Atlas A3";
    case Soc::k950:
      return "Ascend 950";
    default:
      return "other";
  }
}

std::string cann_version_text() {
  const std::string text = product().cann_text;
  return text.empty() ? "of unknown version" : text;
}

std::string atb_version_text() {
  // ATB has no function that says its version; its package has a file.
  const char* home = std::getenv("ATB_HOME_PATH");
  if (home == nullptr || home[0] != '/') {
    return "of unknown version (ATB_HOME_PATH is not set)";
  }
  const std::filesystem::path root(home);
  for (const auto& folder :
       {root, root.parent_path(), root.parent_path().parent_path()}) {
    std::ifstream file(folder / "version.info");
    for (std::string line; std::getline(file, line);) {
      const size_t colon = line.find_first_of(":=");
      if (colon != std::string::npos &&
          lower(line.substr(0, colon)).find("version") != std::string::npos) {
        const size_t start = line.find_first_not_of(" \t", colon + 1);
        if (start != std::string::npos) {
          return line.substr(start);
        }
      }
    }
  }
  return "of unknown version (no version.info in ATB_HOME_PATH)";
}

}  // namespace pacache::npu
