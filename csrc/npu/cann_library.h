// Where are CANN's and ATB's functions?
//
// Nothing is linked: functions are looked up by name when they are first
// needed. Functions of operators (aclnn*, aclCreateTensor, ...) come through
// torch_npu's own search order, so that both use the same library. libatb is
// separate and may be missing. Nothing is loaded from a path that depends on
// the current directory.

#pragma once

#include <string>
#include <vector>

namespace pacache::npu {

// A function that torch_npu's search order finds, or null. Not cached here.
// Nothing is looked for while the order holds a relative path.
void* find_op_api(const char* name);

// A RuntimeError if torch_npu's search order holds a relative path.
void refuse_relative_search(const char* op);

// A function of libascendcl, which torch_npu has loaded, or null.
void* find_runtime(const char* name);

// A function of libatb, or null. The first call opens the library.
void* find_atb(const char* name);

// One library of the search: its file, resolved if it is there.
struct SearchedLibrary {
  std::string name;
  std::string path;  // empty: not found
};

// The libraries that the lookups above went through, for an error text or the
// doctor.
std::vector<SearchedLibrary> searched_op_api();
std::vector<SearchedLibrary> searched_atb();

// A RuntimeError that says which function is missing, where it was looked for
// and which version has it. `since` is the oldest version with the function.
[[noreturn]] void throw_missing(const char* op, const char* name,
                                const char* since,
                                const std::vector<SearchedLibrary>& searched);

template <typename F>
F require_op_api(const char* op, const char* name, const char* since) {
  void* address = find_op_api(name);
  if (address == nullptr) {
    refuse_relative_search(op);
    throw_missing(op, name, since, searched_op_api());
  }
  return reinterpret_cast<F>(address);
}

template <typename F>
F require_atb(const char* op, const char* name, const char* since) {
  void* address = find_atb(name);
  if (address == nullptr) {
    throw_missing(op, name, since, searched_atb());
  }
  return reinterpret_cast<F>(address);
}

}  // namespace pacache::npu
