// Copies past the cache: stores that do not read the line first.
//
// A plain store to a line that is not cached reads it from memory before it
// writes, so a large copy moves three bytes per byte copied. Non-temporal
// stores move two. They pay when what is written would not stay in the cache
// anyway (kStreamBytes), and only in whole lines.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pacache::cpu {

// Bytes written by a call from which on its stores go past the cache.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

#if defined(__x86_64__)

constexpr bool kHasStream = true;

// n bytes; any alignment. Ends of a line that is not whole are stored plainly.
void stream_copy(char* dst, const char* src, int64_t n);

// 32 bytes to a 16-byte aligned place. Two neighbours make a line.
inline void stream_32(char* dst, const char* src) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
  const __m128i high =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 16));
  _mm_stream_si128(reinterpret_cast<__m128i*>(dst), low);
  _mm_stream_si128(reinterpret_cast<__m128i*>(dst + 16), high);
}

// Non-temporal stores are ordered before what a thread does next.
inline void stream_fence() { _mm_sfence(); }

#else

constexpr bool kHasStream = false;

inline void stream_copy(char* dst, const char* src, int64_t n) {
  std::memcpy(dst, src, n);
}
inline void stream_32(char* dst, const char* src) { std::memcpy(dst, src, 32); }
inline void stream_fence() {}

#endif

}  // namespace pacache::cpu
