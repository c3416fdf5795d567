#include "expectation.h"

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstring>

namespace pacache::testing {
namespace {

constexpr int64_t kMostElements = 1 << 17;

struct DoesNotFit {};
struct TooLong {};

bool has_means(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
}

float to_float(const uint8_t* element, at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf: {
      c10::Half number;
      std::memcpy(&number, element, sizeof(number));
      return static_cast<float>(number);
    }
    case at::kBFloat16: {
      c10::BFloat16 number;
      std::memcpy(&number, element, sizeof(number));
      return static_cast<float>(number);
    }
    default: {
      float number;
      std::memcpy(&number, element, sizeof(number));
      return number;
    }
  }
}

void from_float(float number, uint8_t* element, at::ScalarType dtype) {
  if (dtype == at::kHalf) {
    const c10::Half half = number;
    std::memcpy(element, &half, sizeof(half));
  } else if (dtype == at::kBFloat16) {
    const c10::BFloat16 bfloat = number;
    std::memcpy(element, &bfloat, sizeof(bfloat));
  } else {
    std::memcpy(element, &number, sizeof(number));
  }
}

class Expecting {
 public:
  explicit Expecting(const Call& call) : call_(call) {
    result_.memory = call.memory;
    for (const auto& storage : call.memory) {
      written_.emplace_back(storage.size(), false);
    }
  }

  Expectation run() {
    try {
      if (call_.is_load) {
        load();
      } else if (call_[kSeqLens].kind == Argument::kNone ||
                 !call_.kv_layout.empty()) {
        scatter_tokens();
      } else {
        scatter_heads();
      }
    } catch (const DoesNotFit&) {
      result_.fits = false;
    } catch (const TooLong&) {
      result_.too_long = true;
    }
    return std::move(result_);
  }

 private:
  using Index = std::initializer_list<int64_t>;

  static void require(bool fits) {
    if (!fits) {
      throw DoesNotFit();
    }
  }

  void work() {
    if (++done_ > kMostElements) {
      throw TooLong();
    }
  }

  // First byte of an element in its storage.
  int64_t byte_of(const Argument& t, __int128 element) {
    work();
    const auto itemsize = static_cast<__int128>(c10::elementSize(t.dtype));
    const auto size = static_cast<__int128>(call_.memory[t.storage].size());
    require(element >= 0 && (element + 1) * itemsize <= size);
    return static_cast<int64_t>(element * itemsize);
  }

  int64_t byte_of(const Argument& t, Index index) {
    require(index.size() == t.sizes.size());
    __int128 element = t.offset;
    size_t dim = 0;
    for (const int64_t i : index) {
      require(i >= 0 && i < t.sizes[dim]);
      element += static_cast<__int128>(i) * t.strides[dim++];
    }
    return byte_of(t, element);
  }

  int64_t value(const Argument& t, Index index) {
    require(t.kind != Argument::kNone &&
            (t.dtype == at::kInt || t.dtype == at::kLong));
    const uint8_t* at = call_.memory[t.storage].data() + byte_of(t, index);
    if (t.dtype == at::kInt) {
      int32_t number;
      std::memcpy(&number, at, sizeof(number));
      return number;
    }
    int64_t number;
    std::memcpy(&number, at, sizeof(number));
    return number;
  }

  void write(const Argument& to, int64_t byte, const uint8_t* element) {
    const size_t itemsize = c10::elementSize(to.dtype);
    for (size_t i = 0; i < itemsize; ++i) {
      auto written = written_[to.storage][byte + i];
      result_.repeated |= written;
      written_[to.storage][byte + i] = true;
    }
    std::memcpy(result_.memory[to.storage].data() + byte, element, itemsize);
  }

  void copy(const Argument& from, int64_t source, const Argument& to,
            int64_t byte) {
    require(from.dtype == to.dtype);
    write(to, byte, call_.memory[from.storage].data() + source);
  }

  // Element d of head h at a position of a block of scatter's cache.
  int64_t cache_byte(const Argument& cache, int64_t slot, int64_t h, int64_t d,
                     int64_t size) {
    const bool nz = call_.cache_mode == "PA_NZ";
    const size_t position = nz ? cache.sizes.size() - 2
                            : call_.scatter_mode == "NHSD" ? 2
                                                           : 1;
    require(cache.sizes.size() >= 4 && cache.sizes[position] > 0);
    const int64_t block = slot / cache.sizes[position];
    const int64_t p = slot % cache.sizes[position];
    if (!nz) {
      return position == 2 ? byte_of(cache, {block, h, p, d})
                           : byte_of(cache, {block, p, h, d});
    }
    const int64_t unit = cache.sizes.back();
    require(unit > 0);
    return cache.sizes.size() == 5
               ? byte_of(cache, {block, h, d / unit, p, d % unit})
               : byte_of(cache, {block, (h * size + d) / unit, p,
                                 (h * size + d) % unit});
  }

  // The same of a packed cache: key's half is plane 0, value's plane 1.
  int64_t packed_byte(size_t plane, int64_t block, int64_t p, int64_t h,
                      int64_t d) {
    const Argument& cache = call_[kKeyCache];
    const auto half = static_cast<int64_t>(plane);
    const int64_t channel = half * call_[kKey].sizes.back() + d;
    if (call_.kv_layout == "2BNHD") {
      return byte_of(cache, {half, block, p, h, d});
    }
    if (call_.kv_layout == "B2NHD") {
      return byte_of(cache, {block, half, p, h, d});
    }
    if (call_.kv_layout == "BHNC") {
      return byte_of(cache, {block, h, p, channel});
    }
    return byte_of(cache, {block, p, h, channel});
  }

  int64_t packed_block_size() {
    const Argument& cache = call_[kKeyCache];
    const size_t position = call_.kv_layout == "BNHC" ? 1 : 2;
    require(cache.sizes.size() >= 4 && cache.sizes[position] > 0);
    return cache.sizes[position];
  }

  void scatter_tokens() {
    const Argument& slots = call_[kSlotMapping];
    require(slots.sizes.size() == 1);
    for (int64_t i = 0; i < slots.sizes[0]; ++i) {
      const int64_t slot = value(slots, {i});
      if (slot < 0) {
        continue;
      }
      for (const size_t plane : {0, 1}) {
        const Argument& source = call_[kKey + plane];
        const bool packed = !call_.kv_layout.empty();
        const Argument& cache = call_[packed ? kKeyCache : kKeyCache + plane];
        if (source.kind == Argument::kNone) {
          continue;
        }
        require(source.sizes.size() == 3);
        const int64_t heads = source.sizes[1], size = source.sizes[2];
        for (int64_t h = 0; h < heads; ++h) {
          work();
          for (int64_t d = 0; d < size; ++d) {
            int64_t from;
            if (call_.scatter_mode == "Nct" && !packed) {
              require(call_.strides && call_.strides->size() > plane &&
                      (!call_.offsets || call_.offsets->size() > plane));
              __int128 element = source.offset;
              element += call_.offsets ? (*call_.offsets)[plane] : 0;
              element += static_cast<__int128>(i) * (*call_.strides)[plane];
              from = byte_of(source, element + h * size + d);
            } else {
              from = byte_of(source, {i, h, d});
            }
            if (packed) {
              const int64_t block_size = packed_block_size();
              copy(source, from, cache,
                   packed_byte(plane, slot / block_size, slot % block_size, h,
                               d));
              continue;
            }
            copy(source, from, cache, cache_byte(cache, slot, h, d, size));
          }
        }
      }
    }
  }

  void scatter_heads() {
    const Argument& key = call_[kKey];
    const bool padded = key.sizes.size() == 4;
    require(padded || key.sizes.size() == 3);
    const int64_t heads = key.sizes[padded ? 2 : 1];
    const Argument& lens = call_[kSeqLens];
    require(lens.sizes.size() == 1);
    __int128 first = 0;
    for (int64_t b = 0; b < lens.sizes[0]; ++b) {
      const int64_t length = value(lens, {b});
      for (int64_t h = 0; h < heads; ++h) {
        scatter_head(b, h, length, padded, first, b * heads + h);
      }
      first += length;
    }
  }

  void scatter_head(int64_t b, int64_t h, int64_t length, bool padded,
                    __int128 first, int64_t task) {
    const auto of_task = [&](size_t i) {
      const bool matrix = padded && i != kCompressSeqOffsets;
      return matrix ? value(call_[i], {b, h}) : value(call_[i], {task});
    };
    const int64_t slot = of_task(kSlotMapping);
    if (slot < 0) {
      return;
    }
    const bool alibi = call_[kCompressSeqOffsets].kind == Argument::kNone;
    const int64_t window = of_task(kCompressLens);
    const int64_t offset = alibi ? 0 : of_task(kCompressSeqOffsets);
    const bool whole = offset == -1 || window == 0 || offset == length;
    require(length >= 0 && window >= 0 && window <= length &&
            (whole || (offset >= 0 && offset <= length - window)));
    int64_t row = slot;
    const auto copy_tokens = [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token, ++row) {
        work();
        for (const size_t plane : {0, 1}) {
          const Argument& source = call_[kKey + plane];
          const Argument& cache = call_[kKeyCache + plane];
          require(source.kind != Argument::kNone && !source.sizes.empty());
          for (int64_t d = 0; d < source.sizes.back(); ++d) {
            copy(source, source_byte(plane, b, h, d, padded, first, token),
                 cache, cache_byte(cache, row, 0, d, 0));
          }
        }
      }
    };
    if (alibi) {
      copy_tokens(length - window, length);
    } else if (whole) {
      copy_tokens(0, length);
    } else {
      copy_tokens(0, offset);
      if (call_.scatter_mode != "Omni") {
        write_means(b, h, padded, first, offset, window, row++);
      }
      copy_tokens(offset + window, length);
    }
  }

  int64_t source_byte(size_t plane, int64_t b, int64_t h, int64_t d,
                      bool padded, __int128 first, int64_t token) {
    const Argument& source = call_[kKey + plane];
    if (padded) {
      return byte_of(source, {b, token, h, d});
    }
    require(first + token <= INT64_MAX);
    return byte_of(source, {static_cast<int64_t>(first) + token, h, d});
  }

  void write_means(int64_t b, int64_t h, bool padded, __int128 first,
                   int64_t offset, int64_t window, int64_t row) {
    for (const size_t plane : {0, 1}) {
      const Argument& source = call_[kKey + plane];
      const Argument& cache = call_[kKeyCache + plane];
      require(source.dtype == cache.dtype && has_means(source.dtype));
      for (int64_t d = 0; d < source.sizes.back(); ++d) {
        float sum = 0;
        for (int64_t token = offset; token < offset + window; ++token) {
          sum += to_float(call_.memory[source.storage].data() +
                              source_byte(plane, b, h, d, padded, first, token),
                          source.dtype);
        }
        uint8_t element[4];
        from_float(sum / static_cast<float>(window), element, source.dtype);
        const int64_t byte = cache_byte(cache, row, 0, d, 0);
        write(cache, byte, element);
        result_.means.push_back({cache.storage, byte, cache.dtype});
      }
    }
  }

  void load() {
    const Argument& tables = call_[kBlockTables];
    const Argument& lens = call_[kContextLens];
    require(tables.sizes.size() == 2);
    int64_t row = call_.is_cumsum ? value(lens, {0}) : 0;
    for (int64_t b = 0; b < tables.sizes[0]; ++b) {
      work();
      int64_t length = value(lens, {call_.is_cumsum ? b + 1 : b});
      if (call_.is_cumsum) {
        require(row >= 0 && length >= row);
        length -= row;
      }
      const Argument& starts = call_[kSeqStarts];
      const int64_t start =
          starts.kind == Argument::kNone ? 0 : value(starts, {b});
      require(length >= 0 && start >= 0);
      for (int64_t j = 0; j < length; ++j, ++row) {
        work();
        for (const size_t plane : {0, 1}) {
          load_row(plane, b, j, start, row);
        }
      }
    }
  }

  void load_row(size_t plane, int64_t b, int64_t j, int64_t start,
                int64_t row) {
    const Argument& out = call_[kKey + plane];
    if (!call_.kv_layout.empty()) {
      const int64_t block_size = packed_block_size();
      const int64_t block =
          value(call_[kBlockTables], {b, start / block_size + j / block_size});
      require(out.sizes.size() == 3);
      for (int64_t h = 0; h < out.sizes[1]; ++h) {
        work();
        for (int64_t d = 0; d < out.sizes[2]; ++d) {
          copy(call_[kKeyCache],
               packed_byte(plane, block, j % block_size, h, d), out,
               byte_of(out, {row, h, d}));
        }
      }
      return;
    }
    const Argument& cache = call_[kKeyCache + plane];
    const bool nz = call_.cache_mode == "PA_NZ";
    const size_t position = nz ? cache.sizes.size() - 2 : 1;
    require(cache.sizes.size() >= 4 && cache.sizes[position] > 0);
    const int64_t block_size = cache.sizes[position];
    const int64_t p = j % block_size;
    const int64_t block =
        value(call_[kBlockTables], {b, start / block_size + j / block_size});
    require(block >= 0 && block < cache.sizes[0]);
    if (!nz) {
      for (int64_t h = 0; h < cache.sizes[2]; ++h) {
        work();
        for (int64_t d = 0; d < cache.sizes[3]; ++d) {
          copy(cache, byte_of(cache, {block, p, h, d}), out,
               byte_of(out, {row, h, d}));
        }
      }
      return;
    }
    require(out.sizes.size() == 2 ||
            (out.sizes.size() == 3 && out.sizes[2] >= 0));
    const int64_t unit = cache.sizes.back();
    const int64_t inner = cache.sizes.size() == 5 ? cache.sizes[2] : 1;
    const auto units = static_cast<__int128>(cache.sizes[1]) * inner;
    for (int64_t u = 0; u < units; ++u) {
      work();
      for (int64_t i = 0; i < unit; ++i) {
        const int64_t source =
            cache.sizes.size() == 5
                ? byte_of(cache, {block, u / inner, u % inner, p, i})
                : byte_of(cache, {block, u, p, i});
        const int64_t e = u * unit + i;
        require(out.sizes.size() == 2 || out.sizes[2] > 0);
        copy(cache, source, out,
             out.sizes.size() == 2
                 ? byte_of(out, {row, e})
                 : byte_of(out, {row, e / out.sizes[2], e % out.sizes[2]}));
      }
    }
  }

  const Call& call_;
  Expectation result_;
  std::vector<std::vector<bool>> written_;
  int64_t done_ = 0;
};

}  // namespace

bool is_nan(const uint8_t* element, at::ScalarType dtype) {
  return std::isnan(to_float(element, dtype));
}

Expectation expect(const Call& call) { return Expecting(call).run(); }

}  // namespace pacache::testing
