#include <cstring>

#include "copy_kernels.h"

namespace pacache::cpu {
namespace {

#define PACACHE_TARGET

// Two or four vector registers; compilers move it without a call.
struct Unit {
  char bytes[32];
};

inline Unit load(const char* src) {
  Unit unit;
  std::memcpy(unit.bytes, src, sizeof(unit.bytes));
  return unit;
}

inline void store(char* dst, const Unit& unit) {
  std::memcpy(dst, unit.bytes, sizeof(unit.bytes));
}

inline void stream_store(char* dst, const Unit& unit) { store(dst, unit); }

#include "copy_loops.inc"

// The library's own, tuned for the processor at hand.
void copy_with_memcpy(char* dst, const char* src, int64_t n) {
  std::memcpy(dst, src, n);
}

void no_fence() {}

}  // namespace

const CopyKernels kPortableKernels = {"portable",       copy_with_memcpy,
                                      copy_with_memcpy, no_fence,
                                      scatter_units,    gather_units};

}  // namespace pacache::cpu
