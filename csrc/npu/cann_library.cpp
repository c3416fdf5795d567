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

// A path with its links followed, or "" where there is no such file.
std::string real_path(const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  return error ? std::string() : real.string();
}

// The file behind a handle, or "".
std::string file_of(void* handle) {
  link_map* map = nullptr;
  if (handle == nullptr || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) {
    return {};
  }
  return real_path(map->l_name);
}

// The file behind a library that is loaded, or "".
std::string resolve(const char* name) {
  void* handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  const std::string file = file_of(handle);
  if (handle != nullptr) {
    dlclose(handle);
  }
  return file;
}

// The folders in which the loader looks for what this library opens by name,
// in its order: LD_LIBRARY_PATH as it was when the process began, where an
// empty entry is the current directory, and the system's.
std::vector<fs::path> loader_folders() {
  std::vector<fs::path> folders;
  Dl_info here;
  if (dladdr(reinterpret_cast<void*>(&loader_folders), &here) == 0) {
    return folders;
  }
  void* handle = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  Dl_serinfo size;
  if (handle == nullptr || dlinfo(handle, RTLD_DI_SERINFOSIZE, &size) != 0) {
    return folders;
  }
  std::vector<char> memory(size.dls_size);
  auto* found = reinterpret_cast<Dl_serinfo*>(memory.data());
  dlinfo(handle, RTLD_DI_SERINFOSIZE, found);
  if (dlinfo(handle, RTLD_DI_SERINFO, found) == 0) {
    for (unsigned i = 0; i < found->dls_cnt; ++i) {
      folders.emplace_back(found->dls_serpath[i].dls_name);
    }
  }
  dlclose(handle);
  return folders;
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

void* open_file(const fs::path& file) {
  return dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL);
}

void* open_atb() {
  // The loader's path first: libatb can be loaded only once in a process, and
  // torch_npu's own ATB operators find it there.
  void* handle = dlopen("libatb.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle != nullptr) {
    return handle;
  }
  const std::vector<fs::path> folders = loader_folders();
  if (std::all_of(folders.begin(), folders.end(),
                  [](const fs::path& path) { return path.is_absolute(); })) {
    handle = open_file("libatb.so");
  } else {
    // By name, the loader would take one in the current directory too.
    for (const fs::path& folder : folders) {
      if (handle == nullptr && folder.is_absolute()) {
        handle = open_file(folder / "libatb.so");
      }
    }
  }
  const fs::path home = absolute_path_from("ATB_HOME_PATH");
  if (handle == nullptr && !home.empty()) {
    handle = open_file(home / "lib" / "libatb.so");
  }
  return handle;
}

void* atb_handle() {
  static void* handle = open_atb();
  return handle;
}

SearchedLibrary searched_file(const fs::path& path) {
  return {path.string(), real_path(path)};
}

std::vector<std::string> entries(const char* variable) {
  std::vector<std::string> found;
  const char* value = std::getenv(variable);
  std::stringstream paths(value == nullptr ? "" : value);
  for (std::string path; std::getline(paths, path, ':');) {
    if (!path.empty()) {
      found.push_back(path);
    }
  }
  return found;
}

// A variable by which torch_npu would search the current directory, with its
// value, or "".
std::string relative_search() {
  for (const char* variable : {"ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH"}) {
    for (const std::string& path : entries(variable)) {
      if (path[0] != '/') {
        return std::string(variable) + "=" + std::getenv(variable);
      }
    }
  }
  return {};
}

}  // namespace

void* find_op_api(const char* name) {
  return relative_search().empty() ? GetOpApiFuncAddr(name) : nullptr;
}

void refuse_relative_search(const char* op) {
  const std::string relative = relative_search();
  TORCH_CHECK(relative.empty(), op, ": ", relative,
              " must be an absolute path: nothing is loaded from a path that "
              "depends on the current directory");
}

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
  const std::string relative = relative_search();
  if (!relative.empty()) {
    return {{relative + ", a relative path: nothing is searched", ""}};
  }
  find_op_api("aclCreateTensor");  // opens libopapi.so, if it can be
  std::vector<SearchedLibrary> libraries;
  std::error_code ignored;
  for (const std::string& path : entries("ASCEND_CUSTOM_OPP_PATH")) {
    libraries.push_back(
        searched_file(fs::path(path) / "op_api/lib/libcust_opapi.so"));
  }
  const fs::path opp = absolute_path_from("ASCEND_OPP_PATH");
  if (!opp.empty()) {
    for (const auto& entry : fs::directory_iterator(opp / "vendors", ignored)) {
      if (entry.is_directory(ignored)) {
        libraries.push_back(
            searched_file(entry.path() / "op_api/lib/libcust_opapi.so"));
      }
    }
  }
  const fs::path cann = absolute_path_from("ASCEND_HOME_PATH");
  if (!cann.empty()) {
    for (const auto& entry : fs::directory_iterator(cann / "lib64", ignored)) {
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
  std::vector<SearchedLibrary> libraries{{"libatb.so", file_of(atb_handle())}};
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
