// How does this processor copy bytes fastest?
//
// One table of functions per instruction set, chosen once. Everything that
// moves bytes goes through it (row_copy.h).

#pragma once

#include <cstdint>

namespace pacache::cpu {

// Bytes of one unit of the NZ layout.
constexpr int64_t kNzUnit = 32;

// Tokens whose units are moved together: enough to complete cache lines, few
// enough for their rows to stay in the L1 cache.
constexpr int64_t kTileTokens = 8;

struct CopyKernels {
  const char* name;

  // n bytes, any alignment.
  void (*copy)(char* dst, const char* src, int64_t n);
  // The same with non-temporal stores for the whole lines of dst; stores are
  // visible to other threads after fence().
  void (*stream)(char* dst, const char* src, int64_t n);
  void (*fence)();

  // NZ, dense to paged: unit u of tokens[t], 32 bytes each, goes to
  // paged[t] + u * paged_unit_stride, all tokens of one unit before the next
  // unit. At most kTileTokens tokens. With stream, paged and the stride are
  // multiples of 32.
  void (*scatter_units)(char* const* paged, int64_t paged_unit_stride,
                        const char* const* dense, int64_t tokens, int64_t units,
                        bool stream);
  // NZ, paged to dense: the reverse for tokens at equal distances on both
  // sides; any number of them. With stream, dense and its stride are multiples
  // of 32.
  void (*gather_units)(char* dense, int64_t dense_token_stride,
                       const char* paged, int64_t paged_token_stride,
                       int64_t paged_unit_stride, int64_t tokens, int64_t units,
                       bool stream);
};

// For this processor; PACACHE_CPU_KERNELS=portable|avx2|avx512 overrides the
// choice where the processor has it.
const CopyKernels& copy_kernels();

// Plain C++; also what other processors than x86-64 use.
extern const CopyKernels kPortableKernels;
#if defined(__x86_64__)
extern const CopyKernels kAvx2Kernels;
extern const CopyKernels kAvx512Kernels;
#endif

}  // namespace pacache::cpu
