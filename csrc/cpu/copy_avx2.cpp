// x86-64 with AVX2: 32-byte registers and non-temporal stores. A memcpy of a
// row of some KiB is a `rep movsb` in glibc, which is slower than these loops
// on the processors that were measured.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "copy_kernels.h"

namespace pacache::cpu {
namespace {

#define PACACHE_TARGET __attribute__((target("avx2")))

using Unit = __m256i;

PACACHE_TARGET inline Unit load(const char* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

PACACHE_TARGET inline void store(char* dst, Unit unit) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), unit);
}

PACACHE_TARGET inline void stream_store(char* dst, Unit unit) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), unit);
}

#include "copy_loops.inc"

PACACHE_TARGET void copy(char* dst, const char* src, int64_t n) {
  int64_t i = 0;
  for (; i + 128 <= n; i += 128) {
    const Unit a = load(src + i);
    const Unit b = load(src + i + 32);
    const Unit c = load(src + i + 64);
    const Unit d = load(src + i + 96);
    store(dst + i, a);
    store(dst + i + 32, b);
    store(dst + i + 64, c);
    store(dst + i + 96, d);
  }
  for (; i + 32 <= n; i += 32) {
    store(dst + i, load(src + i));
  }
  if (i < n) {
    std::memcpy(dst + i, src + i, n - i);
  }
}

PACACHE_TARGET void stream(char* dst, const char* src, int64_t n) {
  const auto to_line =
      static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & uintptr_t{63});
  const int64_t head = to_line < n ? to_line : n;
  if (head > 0) {
    std::memcpy(dst, src, head);
  }
  int64_t i = head;
  for (; i + 64 <= n; i += 64) {
    const Unit a = load(src + i);
    const Unit b = load(src + i + 32);
    stream_store(dst + i, a);
    stream_store(dst + i + 32, b);
  }
  if (i < n) {
    std::memcpy(dst + i, src + i, n - i);
  }
}

void fence() { _mm_sfence(); }

}  // namespace

const CopyKernels kAvx2Kernels = {"avx2", copy,          stream,
                                  fence,  scatter_units, gather_units};

}  // namespace pacache::cpu

#endif
