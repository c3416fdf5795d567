// x86-64 with AVX-512: a register is a cache line. A line that is stored whole
// past the cache leaves the processor in one write, where two halves may
// leave in two; and two neighbouring tokens of an NZ cache, half a line each,
// are one store.

#if defined(__x86_64__)

#if !defined(__clang__)
// gcc takes the undefined registers of its own header for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstring>

#include "copy_kernels.h"

namespace pacache::cpu {
namespace {

#define PACACHE_TARGET __attribute__((target("avx512f,avx512vl")))

constexpr int64_t kLine = 64;

PACACHE_TARGET inline __m512i load_line(const char* src) {
  return _mm512_loadu_si512(src);
}

PACACHE_TARGET inline __m256i load_unit(const char* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

// Two units that are one line on the other side.
PACACHE_TARGET inline __m512i load_pair(const char* first, const char* second) {
  return _mm512_inserti64x4(_mm512_zextsi256_si512(load_unit(first)),
                            load_unit(second), 1);
}

PACACHE_TARGET inline void store_unit(char* dst, __m256i unit) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), unit);
}

// With stream, dst is a multiple of 64.
template <bool stream>
PACACHE_TARGET inline void store_line(char* dst, __m512i line) {
  if constexpr (stream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), line);
  } else {
    _mm512_storeu_si512(dst, line);
  }
}

template <bool stream>
PACACHE_TARGET inline int64_t copy_lines(char* dst, const char* src,
                                         int64_t begin, int64_t n) {
  int64_t i = begin;
  for (; i + 4 * kLine <= n; i += 4 * kLine) {
    const __m512i a = load_line(src + i);
    const __m512i b = load_line(src + i + kLine);
    const __m512i c = load_line(src + i + 2 * kLine);
    const __m512i d = load_line(src + i + 3 * kLine);
    store_line<stream>(dst + i, a);
    store_line<stream>(dst + i + kLine, b);
    store_line<stream>(dst + i + 2 * kLine, c);
    store_line<stream>(dst + i + 3 * kLine, d);
  }
  for (; i + kLine <= n; i += kLine) {
    store_line<stream>(dst + i, load_line(src + i));
  }
  return i;
}

PACACHE_TARGET void copy(char* dst, const char* src, int64_t n) {
  const int64_t done = copy_lines<false>(dst, src, 0, n);
  if (done < n) {
    std::memcpy(dst + done, src + done, n - done);
  }
}

PACACHE_TARGET void stream(char* dst, const char* src, int64_t n) {
  const auto to_line =
      static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kLine - 1));
  const int64_t head = to_line < n ? to_line : n;
  if (head > 0) {
    std::memcpy(dst, src, head);
  }
  const int64_t done = copy_lines<true>(dst, src, head, n);
  if (done < n) {
    std::memcpy(dst + done, src + done, n - done);
  }
}

void fence() { _mm_sfence(); }

inline bool is_line(const char* address) {
  return reinterpret_cast<uintptr_t>(address) % kLine == 0;
}

template <bool stream>
PACACHE_TARGET void scatter_lines(char* const* paged, int64_t paged_unit_stride,
                                  const char* const* dense, int64_t tokens,
                                  int64_t units) {
  for (int64_t u = 0; u < units; ++u) {
    const int64_t to = u * paged_unit_stride;
    const int64_t from = u * kNzUnit;
    for (int64_t t = 0; t < tokens; t += 2) {
      store_line<stream>(paged[t] + to,
                         load_pair(dense[t] + from, dense[t + 1] + from));
    }
  }
}

PACACHE_TARGET void scatter_units(char* const* paged, int64_t paged_unit_stride,
                                  const char* const* dense, int64_t tokens,
                                  int64_t units, bool stream) {
  bool lines = tokens % 2 == 0 && paged_unit_stride % kLine == 0;
  for (int64_t t = 0; lines && t < tokens; t += 2) {
    lines = is_line(paged[t]) && paged[t + 1] == paged[t] + kNzUnit;
  }
  if (lines) {
    if (stream) {
      scatter_lines<true>(paged, paged_unit_stride, dense, tokens, units);
    } else {
      scatter_lines<false>(paged, paged_unit_stride, dense, tokens, units);
    }
    return;
  }
  for (int64_t u = 0; u < units; ++u) {
    const int64_t to = u * paged_unit_stride;
    const int64_t from = u * kNzUnit;
    for (int64_t t = 0; t < tokens; ++t) {
      store_unit(paged[t] + to, load_unit(dense[t] + from));
    }
  }
}

// Two units of one token complete a line of the dense side.
template <bool stream>
PACACHE_TARGET void gather_tile(char* dense, int64_t dense_token_stride,
                                const char* paged, int64_t paged_token_stride,
                                int64_t paged_unit_stride, int64_t tokens,
                                int64_t units) {
  int64_t u = 0;
  for (; u + 2 <= units; u += 2) {
    const char* from = paged + u * paged_unit_stride;
    for (int64_t t = 0; t < tokens; ++t) {
      const char* unit = from + t * paged_token_stride;
      store_line<stream>(dense + t * dense_token_stride + u * kNzUnit,
                         load_pair(unit, unit + paged_unit_stride));
    }
  }
  if (u < units) {
    const char* from = paged + u * paged_unit_stride;
    for (int64_t t = 0; t < tokens; ++t) {
      store_unit(dense + t * dense_token_stride + u * kNzUnit,
                 load_unit(from + t * paged_token_stride));
    }
  }
}

PACACHE_TARGET void gather_units(char* dense, int64_t dense_token_stride,
                                 const char* paged, int64_t paged_token_stride,
                                 int64_t paged_unit_stride, int64_t tokens,
                                 int64_t units, bool stream) {
  const bool lines =
      stream && is_line(dense) && dense_token_stride % kLine == 0;
  for (int64_t first = 0; first < tokens; first += kTileTokens) {
    const int64_t count =
        tokens - first < kTileTokens ? tokens - first : kTileTokens;
    const auto tile = lines ? &gather_tile<true> : &gather_tile<false>;
    tile(dense + first * dense_token_stride, dense_token_stride,
         paged + first * paged_token_stride, paged_token_stride,
         paged_unit_stride, count, units);
  }
}

}  // namespace

const CopyKernels kAvx512Kernels = {"avx512", copy,          stream,
                                    fence,    scatter_units, gather_units};

}  // namespace pacache::cpu

#endif
