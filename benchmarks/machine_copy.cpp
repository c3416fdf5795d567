// How fast does this machine copy, whoever asks? A C interface for ctypes.
//
// Regions are divided evenly over the bytes, one piece per thread, as a plain
// parallel copy would. On x86-64 there are stores that do not read the line
// first (non-temporal); elsewhere that form is memcpy.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Copy = void (*)(char* dst, const char* src, int64_t bytes);

void copy_plain(char* dst, const char* src, int64_t bytes) {
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

#if defined(__x86_64__)

// The bytes before the first whole line are copied plainly; gives their number.
int64_t copy_head(char* dst, const char* src, int64_t bytes) {
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(dst) & 63);
  const int64_t head = std::min(bytes, past == 0 ? 0 : 64 - past);
  copy_plain(dst, src, head);
  return head;
}

void copy_stream_sse2(char* dst, const char* src, int64_t bytes) {
  int64_t i = copy_head(dst, src, bytes);
  for (; i + 64 <= bytes; i += 64) {
    __m128i part[4];
    for (int k = 0; k < 4; ++k) {
      part[k] =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i + 16 * k));
    }
    for (int k = 0; k < 4; ++k) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i + 16 * k), part[k]);
    }
  }
  copy_plain(dst + i, src + i, bytes - i);
  _mm_sfence();
}

__attribute__((target("avx2"))) void copy_stream_avx2(char* dst,
                                                      const char* src,
                                                      int64_t bytes) {
  int64_t i = copy_head(dst, src, bytes);
  for (; i + 64 <= bytes; i += 64) {
    const __m256i low =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i high =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), high);
  }
  copy_plain(dst + i, src + i, bytes - i);
  _mm_sfence();
}

__attribute__((target("avx512f"))) void copy_stream_avx512(char* dst,
                                                           const char* src,
                                                           int64_t bytes) {
  int64_t i = copy_head(dst, src, bytes);
  for (; i + 64 <= bytes; i += 64) {
    const __m512i line = _mm512_loadu_si512(src + i);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), line);
  }
  copy_plain(dst + i, src + i, bytes - i);
  _mm_sfence();
}

#endif

struct Stream {
  const char* name = "none";
  Copy copy = copy_plain;
};

Stream choose_stream() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) {
    return {"avx512", copy_stream_avx512};
  }
  if (__builtin_cpu_supports("avx2")) {
    return {"avx2", copy_stream_avx2};
  }
  return {"sse2", copy_stream_sse2};
#else
  return {};
#endif
}

const Stream& stream() {
  static const Stream chosen = choose_stream();
  return chosen;
}

constexpr int64_t kPage = 4096;

// f(begin, end) over `threads` even pieces of [0, bytes), cut at pages.
template <typename F>
void over_bytes(int64_t bytes, int threads, const F& f) {
  if (threads <= 1) {
    f(int64_t{0}, bytes);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t all = omp_get_num_threads();
    const int64_t pages = (bytes + kPage - 1) / kPage;
    const int64_t each = (pages + all - 1) / all * kPage;
    const int64_t begin = std::min(bytes, omp_get_thread_num() * each);
    const int64_t end = std::min(bytes, begin + each);
    if (begin < end) {
      f(begin, end);
    }
  }
}

uint64_t sum_bytes(const char* src, int64_t bytes) {
  uint64_t sum[8] = {};
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    uint64_t line[8];
    std::memcpy(line, src + i, 64);
    for (int k = 0; k < 8; ++k) {
      sum[k] += line[k];
    }
  }
  for (; i < bytes; ++i) {
    sum[0] += static_cast<unsigned char>(src[i]);
  }
  uint64_t all = 0;
  for (const uint64_t part : sum) {
    all += part;
  }
  return all;
}

}  // namespace

extern "C" {

// What non-temporal copies are made of: "avx512", "avx2", "sse2" or "none".
const char* machine_stream_name() { return stream().name; }

// `count` regions, one after the other; use_stream: non-temporal stores.
void machine_copy(int count, char* const* dst, const char* const* src,
                  const int64_t* bytes, int threads, int use_stream) {
  const Copy copy = use_stream != 0 ? stream().copy : copy_plain;
  int64_t total = 0;
  for (int r = 0; r < count; ++r) {
    total += bytes[r];
  }
  over_bytes(total, threads, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // of the region, in the total
    for (int r = 0; r < count; ++r) {
      const int64_t from = std::max(begin, first) - first;
      const int64_t to = std::min(end, first + bytes[r]) - first;
      if (from < to) {
        copy(dst[r] + from, src[r] + from, to - from);
      }
      first += bytes[r];
    }
  });
}

// Reads read_bytes of src once, of which it writes the first write_bytes (not
// more than read_bytes) to dst: the least that an operator can do which looks
// at every row and writes fewer. Returns a sum so that the reads are made.
uint64_t machine_read_write(char* dst, const char* src, int64_t read_bytes,
                            int64_t write_bytes, int threads) {
  uint64_t sum = 0;
  const double part =
      static_cast<double>(write_bytes) / static_cast<double>(read_bytes);
  over_bytes(read_bytes, threads, [&](int64_t begin, int64_t end) {
    const auto written =
        static_cast<int64_t>(static_cast<double>(end - begin) * part);
    copy_plain(dst + static_cast<int64_t>(static_cast<double>(begin) * part),
               src + begin, written);
    const uint64_t mine =
        sum_bytes(src + begin + written, end - begin - written);
#pragma omp atomic
    sum += mine;
  });
  return sum;
}

}  // extern "C"
