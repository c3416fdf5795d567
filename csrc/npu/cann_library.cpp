#include "cann_library.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "product.h"

// Exported by torch_npu: looks an aclnn function up in $ASCEND_CUSTOM_OPP_PATH,
// $ASCEND_OPP_PATH/vendors, $ASCEND_HOME_PATH/lib64/libopapi_*.so and
// libopapi.so, in this order.
void* GetOpApiFuncAddr(const char* name);

namespace pacache::npu {
namespace {

namespace fs = std::filesystem;

// The file behind a library that is loaded, or "".
std::string resolve(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) {
    return {};
  }
  std::string path;
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) {
    path = map->l_name;
  }
  dlclose(handle);
  return path;
}

// An environment variable that holds an absolute path; anything else is not
// searched (a relative path would depend on the current directory).
fs::path absolute_path_from(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr || value[0] != '/') {
    return {};
  }
  return fs::path(value);
}

void* open_atb() {
  // The loader's path first: libatb can be loaded only once in a process, and
  // torch_npu's own ATB operators find it there.
  const fs::path home = absolute_path_from("ATB_HOME_PATH");
  void* handle = dlopen("libatb.so", RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr && !home.empty()) {
    handle =
        dlopen((home / "lib" / "libatb.so").c_str(), RTLD_LAZY | RTLD_LOCAL);
  }
  return handle;
}

void* atb_handle() {
  static void* handle = open_atb();
  return handle;
}

SearchedLibrary searched_file(const fs::path& path) {
  std::error_code ignored;
  return {path.string(), fs::exists(path, ignored)
                             ? fs::canonical(path, ignored).string()
                             : std::string()};
}

}  // namespace

void* find_op_api(const char* name) { return GetOpApiFuncAddr(name); }

void* find_runtime(const char* name) {
  static void* handle =
      dlopen("libascendcl.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : dlsym(handle, name);
}

void* find_atb(const char* name) {
  void* handle = atb_handle();
  return handle == nullptr ? nullptr : dlsym(handle, name);
}

std::vector<SearchedLibrary> searched_op_api() {
  find_op_api("aclCreateTensor");  // opens libopapi.so, if it can be
  std::vector<SearchedLibrary> libraries;
  std::error_code ignored;
  if (const char* custom = std::getenv("ASCEND_CUSTOM_OPP_PATH")) {
    std::stringstream paths(custom);
    for (std::string path; std::getline(paths, path, ':');) {
      libraries.push_back(
          searched_file(fs::path(path) / "op_api/lib/libcust_opapi.so"));
    }
  }
  const fs::path vendors = absolute_path_from("ASCEND_OPP_PATH") / "vendors";
  if (fs::is_directory(vendors, ignored)) {
    for (const auto& entry : fs::directory_iterator(vendors, ignored)) {
      if (entry.is_directory(ignored)) {
        libraries.push_back(
            searched_file(entry.path() / "op_api/lib/libcust_opapi.so"));
      }
    }
  }
  const fs::path lib64 = absolute_path_from("ASCEND_HOME_PATH") / "lib64";
  if (fs::is_directory(lib64, ignored)) {
    for (const auto& entry : fs::directory_iterator(lib64, ignored)) {
      const std::string file = entry.path().filename().string();
      if (file.rfind("libopapi_", 0) == 0 &&
          entry.path().extension() == ".so") {
        libraries.push_back(searched_file(entry.path()));
      }
    }
  }
  std::sort(libraries.begin(), libraries.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  libraries.push_back({"libopapi.so", resolve("libopapi.so")});
  return libraries;
}

std::vector<SearchedLibrary> searched_atb() {
  atb_handle();
  std::vector<SearchedLibrary> libraries{{"libatb.so", resolve("libatb.so")}};
  const fs::path home = absolute_path_from("ATB_HOME_PATH");
  if (!home.empty()) {
    libraries.push_back(searched_file(home / "lib" / "libatb.so"));
  }
  return libraries;
}

void throw_missing(const char* op, const char* name, const char* since,
                   const std::vector<SearchedLibrary>& searched) {
  std::ostringstream text;
  text << op << ": the function " << name
       << " was not found; the oldest version that has it is " << since
       << ". Searched:";
  for (const SearchedLibrary& library : searched) {
    text << " " << library.name << " ("
         << (library.path.empty() ? "not found" : library.path) << ");";
  }
  text << " environment:";
  for (const char* variable :
       {"ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH", "ASCEND_HOME_PATH",
        "ATB_HOME_PATH", "LD_LIBRARY_PATH"}) {
    const char* value = std::getenv(variable);
    text << " " << variable << "=" << (value == nullptr ? "(not set)" : value)
         << ";";
  }
  text << " CANN " << cann_version_text() << ", ATB " << atb_version_text();
  TORCH_CHECK(false, text.str());
  std::abort();  // TORCH_CHECK(false) has thrown
}

}  // namespace pacache::npu
