#include "stream_copy.h"

#if defined(__x86_64__)

namespace pacache::cpu {
namespace {

using StreamLines = void (*)(char* dst, const char* src, int64_t lines);

// Whole 64-byte lines to an aligned place; one function per instruction set.

void stream_lines_sse2(char* dst, const char* src, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) {
    stream_32(dst, src);
    stream_32(dst + 32, src + 32);
    dst += 64;
    src += 64;
  }
}

__attribute__((target("avx"))) void stream_lines_avx(char* dst, const char* src,
                                                     int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) {
    const __m256i low =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    const __m256i high =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), high);
    dst += 64;
    src += 64;
  }
}

__attribute__((target("avx512f"))) void stream_lines_avx512(char* dst,
                                                            const char* src,
                                                            int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst),
                        _mm512_loadu_si512(src));
    dst += 64;
    src += 64;
  }
}

StreamLines select() {
  if (__builtin_cpu_supports("avx512f")) {
    return stream_lines_avx512;
  }
  if (__builtin_cpu_supports("avx")) {
    return stream_lines_avx;
  }
  return stream_lines_sse2;
}

const StreamLines stream_lines = select();

}  // namespace

void stream_copy(char* dst, const char* src, int64_t n) {
  const auto misaligned =
      static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & uintptr_t{63});
  const int64_t head = misaligned < n ? misaligned : n;
  std::memcpy(dst, src, head);
  const int64_t lines = (n - head) / 64;
  stream_lines(dst + head, src + head, lines);
  const int64_t done = head + lines * 64;
  std::memcpy(dst + done, src + done, n - done);
}

}  // namespace pacache::cpu

#endif
