#include "window_mean.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pacache::cpu {
namespace {

// sum[d] += token[d] for tokens one after the other.
using AddTokens = void (*)(float* sum, const char* tokens, int64_t token_stride,
                           int64_t count, int64_t channels);

template <typename T>
void add_tokens(float* sum, const char* tokens, int64_t token_stride,
                int64_t count, int64_t channels) {
  for (int64_t j = 0; j < count; ++j) {
    const T* token = reinterpret_cast<const T*>(tokens + j * token_stride);
    for (int64_t d = 0; d < channels; ++d) {
      sum[d] += static_cast<float>(token[d]);
    }
  }
}

template <typename T>
void store_mean(char* out, const float* sum, float count, int64_t channels) {
  T* row = reinterpret_cast<T*>(out);
  for (int64_t d = 0; d < channels; ++d) {
    row[d] = static_cast<T>(sum[d] / count);
  }
}

#if defined(__x86_64__)

#define PACACHE_AVX2 __attribute__((target("avx2,f16c")))

// Eight channels of a token as float32, exactly.
struct Float16Channels {
  PACACHE_AVX2 static __m256 load(const char* src) {
    return _mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
  }
  using Scalar = c10::Half;
};
struct BFloat16Channels {
  PACACHE_AVX2 static __m256 load(const char* src) {
    const __m256i wide = _mm256_cvtepu16_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  using Scalar = c10::BFloat16;
};
struct Float32Channels {
  PACACHE_AVX2 static __m256 load(const char* src) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(src));
  }
  using Scalar = float;
};

template <typename Channels>
PACACHE_AVX2 void add_tokens_avx2(float* sum, const char* tokens,
                                  int64_t token_stride, int64_t count,
                                  int64_t channels) {
  constexpr int64_t kStep = 8;
  constexpr int64_t kBytes = kStep * sizeof(typename Channels::Scalar);
  const int64_t whole = channels / kStep;
  // Four tokens at a time, still added one after the other, so that the sum is
  // read and written a quarter as often.
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    const char* token = tokens + j * token_stride;
    for (int64_t i = 0; i < whole; ++i) {
      const char* src = token + i * kBytes;
      __m256 total = _mm256_loadu_ps(sum + i * kStep);
      total = _mm256_add_ps(total, Channels::load(src));
      total = _mm256_add_ps(total, Channels::load(src + token_stride));
      total = _mm256_add_ps(total, Channels::load(src + 2 * token_stride));
      total = _mm256_add_ps(total, Channels::load(src + 3 * token_stride));
      _mm256_storeu_ps(sum + i * kStep, total);
    }
  }
  for (; j < count; ++j) {
    const char* token = tokens + j * token_stride;
    for (int64_t i = 0; i < whole; ++i) {
      const __m256 total = _mm256_loadu_ps(sum + i * kStep);
      _mm256_storeu_ps(
          sum + i * kStep,
          _mm256_add_ps(total, Channels::load(token + i * kBytes)));
    }
  }
  add_tokens<typename Channels::Scalar>(sum + whole * kStep,
                                        tokens + whole * kBytes, token_stride,
                                        count, channels - whole * kStep);
}

// Not every compiler's __builtin_cpu_supports knows f16c.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();

template <typename Channels>
AddTokens select() {
  return has_avx2 ? add_tokens_avx2<Channels>
                  : add_tokens<typename Channels::Scalar>;
}

#else

struct Float16Channels {
  using Scalar = c10::Half;
};
struct BFloat16Channels {
  using Scalar = c10::BFloat16;
};
struct Float32Channels {
  using Scalar = float;
};

template <typename Channels>
AddTokens select() {
  return add_tokens<typename Channels::Scalar>;
}

#endif

template <typename Channels>
void mean(char* out, const char* tokens, int64_t token_stride, int64_t count,
          int64_t channels, float* sum) {
  static const AddTokens add = select<Channels>();
  add(sum, tokens, token_stride, count, channels);
  store_mean<typename Channels::Scalar>(out, sum, static_cast<float>(count),
                                        channels);
}

}  // namespace

void window_mean(at::ScalarType dtype, char* out, const char* tokens,
                 int64_t token_stride, int64_t count, int64_t channels,
                 std::vector<float>& sum) {
  sum.assign(channels, 0.0F);
  switch (dtype) {
    case at::ScalarType::Half:
      mean<Float16Channels>(out, tokens, token_stride, count, channels,
                            sum.data());
      break;
    case at::ScalarType::BFloat16:
      mean<BFloat16Channels>(out, tokens, token_stride, count, channels,
                             sum.data());
      break;
    default:
      mean<Float32Channels>(out, tokens, token_stride, count, channels,
                            sum.data());
      break;
  }
}

}  // namespace pacache::cpu
