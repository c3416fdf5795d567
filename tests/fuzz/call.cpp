#include "call.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace pacache::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kHalf,
                                      at::kBFloat16,
                                      at::kFloat,
                                      at::kChar,
                                      at::kByte,
                                      at::kShort,
                                      at::kUInt16,
                                      at::kInt,
                                      at::kUInt32,
                                      at::kFloat8_e4m3fn,
                                      at::kFloat8_e5m2,
                                      at::kFloat8_e4m3fnuz,
                                      at::kFloat8_e5m2fnuz,
                                      at::kFloat8_e8m0fnu,
                                      at::kLong,
                                      at::kDouble,
                                      at::kBool,
                                      at::kComplexFloat};
constexpr int64_t kCopyDtypes = 14;
constexpr int64_t kMeanDtypes = 3;

template <typename T, size_t n>
T choose(Bytes& b, const T (&options)[n]) {
  return options[b.pick(n)];
}

// Draws how tensors lie in memory.
class Layouts {
 public:
  Layouts(Bytes& bytes, Call& call) : b(bytes), call_(call) {}

  // A dense last dimension, the others in any order and with gaps.
  Argument tensor(const char* name, at::ScalarType dtype,
                  std::vector<int64_t> sizes) {
    Argument t;
    t.name = name;
    t.kind = Argument::kStrided;
    t.dtype = dtype;
    t.sizes = std::move(sizes);
    const size_t rank = t.sizes.size();
    t.strides.assign(rank, 1);
    const uint8_t way = b.byte();
    const bool dense = way % 4 == 0;
    const int64_t pad = dense ? 0 : way / 4 % 4;
    const size_t turn = dense || rank < 2 ? 0 : way / 16 % (rank - 1);
    const auto size = [&](size_t dim) {
      return std::max<int64_t>(1, t.sizes[dim]);
    };
    int64_t extent = size(rank - 1) + pad;
    for (size_t i = rank - 1; i-- > 0;) {
      const size_t dim = (i + turn) % (rank - 1);
      t.strides[dim] = extent;
      extent = extent * size(dim) + pad;
    }
    t.offset = pad;
    int64_t elements = t.offset + 1;
    for (size_t dim = 0; dim < rank; ++dim) {
      elements += (size(dim) - 1) * t.strides[dim];
    }
    // It ends with the tensor: a byte more is not there.
    t.storage = storage(elements * c10::elementSize(dtype));
    return t;
  }

  // Two tensors, apart or out of one allocation.
  void pair(const char* name, at::ScalarType dtype, std::vector<int64_t> sizes,
            const char* other_name, at::ScalarType other_dtype,
            std::vector<int64_t> other_sizes) {
    const int64_t way = dtype == other_dtype ? b.pick(6) : 0;
    const bool equal = sizes == other_sizes;
    const bool split =
        sizes.size() == other_sizes.size() &&
        std::equal(sizes.begin(), sizes.end() - 1, other_sizes.begin());
    if (way >= 4 && equal) {  // halves of a larger tensor
      const size_t dim = way - 4;
      sizes.insert(sizes.begin() + dim, 2);
      Argument both = tensor(name, dtype, sizes);
      const int64_t step = both.strides[dim];
      both.sizes.erase(both.sizes.begin() + dim);
      both.strides.erase(both.strides.begin() + dim);
      push(both);
      both.offset += step;
      both.name = other_name;
      push(both);
    } else if (way == 3 && split) {  // parts of its last dimension
      const int64_t first = sizes.back(), second = other_sizes.back();
      sizes.back() = first + second;
      Argument both = tensor(name, dtype, sizes);
      both.sizes.back() = first;
      push(both);
      both.sizes.back() = second;
      both.offset += first;
      both.name = other_name;
      push(both);
    } else {
      push(tensor(name, dtype, std::move(sizes)));
      push(tensor(other_name, other_dtype, std::move(other_sizes)));
    }
  }

  // An index tensor, with other values between its own.
  void index(const char* name, const std::vector<int64_t>& values,
             std::vector<int64_t> sizes) {
    const uint8_t way = b.byte();
    Argument t;
    t.name = name;
    t.kind = Argument::kStrided;
    t.dtype = way % 2 == 0 ? at::kInt : at::kLong;
    t.sizes = std::move(sizes);
    const int64_t step = 1 + way / 2 % 3;
    t.offset = way / 8 % 2;
    t.strides.assign(t.sizes.size(), step);
    if (t.sizes.size() == 2) {
      const size_t outer = way / 16 % 2;
      t.strides[outer] = step * std::max<int64_t>(1, t.sizes[1 - outer]);
    }
    const size_t itemsize = c10::elementSize(t.dtype);
    const auto count = static_cast<int64_t>(values.size());
    t.storage = storage(
        (t.offset + std::max<int64_t>(0, count - 1) * step + 1) * itemsize);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t columns = t.sizes.size() == 2 ? t.sizes[1] : 1;
      const int64_t element =
          t.offset + (t.sizes.size() == 2 ? i / columns * t.strides[0] +
                                                i % columns * t.strides[1]
                                          : i * step);
      // Of a value that is too large for it an int32 has the lower half.
      std::memcpy(call_.memory[t.storage].data() + element * itemsize,
                  &values[i], itemsize);
    }
    push(t);
  }

  void none(const char* name) {
    Argument t;
    t.name = name;
    push(t);
  }

  void push(const Argument& t) { call_.arguments.push_back(t); }

  size_t storage(int64_t bytes) {
    std::vector<uint8_t> memory(bytes);
    // Different everywhere, and of float dtypes every kind of number.
    for (auto& byte : memory) {
      state_ = state_ * 6364136223846793005U + 1442695040888963407U;
      byte = static_cast<uint8_t>(state_ >> 56);
    }
    call_.memory.push_back(std::move(memory));
    return call_.memory.size() - 1;
  }

  Bytes& b;

 private:
  Call& call_;
  uint64_t state_ = 1;
};

constexpr const char* kLayouts[] = {"2BNHD", "B2NHD", "BHNC", "BNHC"};

// Of a cache that holds keys and values of these sizes.
std::vector<int64_t> packed_sizes(const std::string& layout, int64_t num_blocks,
                                  int64_t block_size, int64_t heads,
                                  int64_t size, int64_t value_size) {
  if (layout == "2BNHD") {
    return {2, num_blocks, block_size, heads, size};
  }
  if (layout == "B2NHD") {
    return {num_blocks, 2, block_size, heads, size};
  }
  if (layout == "BHNC") {
    return {num_blocks, heads, block_size, size + value_size};
  }
  return {num_blocks, block_size, heads, size + value_size};
}

constexpr int64_t kHeadSizes[] = {8, 1, 2, 3, 5, 16, 33, 64, 132, 0};

void read_scatter(Layouts& make, Call& call) {
  Bytes& b = make.b;
  const int64_t form = b.pick(12);
  const bool packed = form == 11;
  const bool compressed = form >= 6 && !packed;
  const bool padded = form >= 9 && !packed;
  const bool alibi = form == 6 || form == 9;
  const bool rope = form == 7 || form == 10;
  const bool nz = form == 4;
  const at::ScalarType dtype =
      kDtypes[b.pick(rope ? kMeanDtypes : kCopyDtypes)];
  const at::ScalarType value_dtype = nz ? kDtypes[b.pick(kCopyDtypes)] : dtype;
  const int64_t heads = b.pick(5);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  const auto value_itemsize =
      static_cast<int64_t>(c10::elementSize(value_dtype));
  int64_t size = choose(b, kHeadSizes);
  int64_t value_size = choose(b, kHeadSizes);
  const int64_t way = b.pick(4);
  if (nz) {
    size = (1 + size % 5) * 32 / itemsize;
    value_size = (1 + value_size % 5) * 32 / value_itemsize;
  } else if ((compressed && !padded) || way < 2) {
    value_size = size;
  }
  if (packed) {
    call.kv_layout = choose(b, kLayouts);
    value_size = call.kv_layout[0] == '2' || call.kv_layout[1] == '2'
                     ? size
                     : value_size;
  }
  const int64_t block_size = 1 + b.pick(8);
  call.cache_mode = nz ? "PA_NZ" : "Norm";
  constexpr const char* kModes[] = {"None", "None", "Nct",   "Nct",
                                    "None", "NHSD", "Alibi", "Rope",
                                    "Omni", "None", "None",  "None"};
  call.scatter_mode = kModes[form];

  // Slots, lengths and windows.
  std::vector<int64_t> slots, lens, windows, offsets;
  int64_t tokens = 0, batch = 0, seq_len = 0, num_blocks = 0;
  if (!compressed) {
    tokens = b.pick(33);
    num_blocks = (tokens + block_size - 1) / block_size + b.pick(3);
    const int64_t total = std::max<int64_t>(1, num_blocks * block_size);
    const int64_t order = b.pick(4);
    for (int64_t i = 0; i < tokens; ++i) {
      int64_t slot = order == 0 ? i : b.byte() % total;
      if (order == 2) {
        slot = (i * 7 + 3) % total;
      } else if (order == 3 && slot % 3 == 0) {
        slot = -slot - 1;
      }
      slots.push_back(slot);
    }
  } else {
    batch = b.pick(4);
    int64_t next = 0;
    for (int64_t s = 0; s < batch; ++s) {
      const int64_t length = b.pick(24);
      lens.push_back(length);
      tokens += length;
      seq_len = std::max(seq_len, length);
      for (int64_t h = 0; h < heads; ++h) {
        const uint8_t how = b.byte();
        const int64_t window = length == 0 ? 0 : b.pick(length + 1);
        int64_t offset = b.pick(length - window + 1);
        if (how % 8 == 1) {
          offset = -1;
        } else if (how % 8 == 2) {
          offset = length;
        }
        const bool whole = offset == -1 || window == 0 || offset == length;
        slots.push_back(how % 8 == 3 ? -1 : how % 8 == 4 ? how / 8 : next);
        windows.push_back(window);
        offsets.push_back(offset);
        next += alibi   ? window
                : whole ? length
                        : length - window + (rope ? 1 : 0);
      }
    }
    num_blocks = (next + block_size - 1) / block_size + b.pick(2);
    seq_len += b.pick(3);
  }

  std::vector<int64_t> sizes{tokens + b.pick(2), heads, size};
  std::vector<int64_t> value_sizes{tokens, heads, value_size};
  if (padded) {
    sizes = {batch, seq_len, heads, size};
    value_sizes = {batch, seq_len, heads, value_size};
  } else if (compressed) {
    sizes[0] = tokens;
  }
  make.pair("key", dtype, sizes, "value", value_dtype, value_sizes);
  if (call.scatter_mode == "Nct") {
    // The strides that the tensors have, or others that may fit.
    std::vector<int64_t> strides, starts;
    for (const size_t i : {kKey, kValue}) {
      const bool own = b.pick(2) == 0;
      strides.push_back(own ? call[i].strides[0] : 1 + b.pick(64));
      starts.push_back(own ? 0 : b.pick(3));
    }
    call.strides = strides;
    if (b.pick(2) == 0) {
      call.offsets = starts;
    }
  }
  const auto cache = [&](int64_t width, int64_t item) -> std::vector<int64_t> {
    if (compressed) {
      return {num_blocks, block_size, 1, width};
    }
    if (form == 5) {
      return {num_blocks, heads, block_size, width};
    }
    if (!nz) {
      return {num_blocks, block_size, heads, width};
    }
    const int64_t unit = 32 / item;
    if (b.pick(2) == 0) {
      return {num_blocks, heads * (width / unit), block_size, unit};
    }
    return {num_blocks, heads, width / unit, block_size, unit};
  };
  if (packed) {
    make.push(make.tensor("kv_cache", dtype,
                          packed_sizes(call.kv_layout, num_blocks, block_size,
                                       heads, size, value_size)));
    make.none("value_cache");
  } else {
    const auto key_cache = cache(size, itemsize);
    const auto value_cache = cache(value_size, value_itemsize);
    make.pair("key_cache", dtype, key_cache, "value_cache", value_dtype,
              value_cache);
  }
  if (form == 1 || form == 3) {
    call.arguments[kValue].kind = Argument::kNone;
    call.arguments[kValueCache].kind = Argument::kNone;
  }
  const auto count = static_cast<int64_t>(slots.size());
  std::vector<int64_t> task_sizes{count};
  if (padded) {
    task_sizes = {batch, heads};
  }
  make.index("slot_mapping", slots, task_sizes);
  if (!compressed) {
    make.none("compress_lens");
    make.none("compress_seq_offsets");
    make.none("seq_lens");
    return;
  }
  make.index("compress_lens", windows, task_sizes);
  if (alibi) {
    make.none("compress_seq_offsets");
  } else {
    make.index("compress_seq_offsets", offsets, {count});
  }
  make.index("seq_lens", lens, {batch});
}

void read_load(Layouts& make, Call& call) {
  Bytes& b = make.b;
  const int64_t form = b.pick(4);
  const bool packed = form == 3;
  const bool nz = form == 1;
  call.is_cumsum = form == 2 || (packed && b.pick(2) == 0);
  call.cache_mode = nz ? "PA_NZ" : "Norm";
  const at::ScalarType dtype = kDtypes[b.pick(kCopyDtypes)];
  const at::ScalarType value_dtype = nz ? kDtypes[b.pick(kCopyDtypes)] : dtype;
  const int64_t heads = b.pick(5);
  int64_t size = choose(b, kHeadSizes);
  int64_t value_size = b.pick(2) == 0 ? size : choose(b, kHeadSizes);
  if (packed) {
    call.kv_layout = choose(b, kLayouts);
    value_size = call.kv_layout[0] == '2' || call.kv_layout[1] == '2'
                     ? size
                     : value_size;
  }
  const int64_t block_size = 1 + b.pick(8);
  const int64_t num_blocks = b.pick(6);
  const int64_t batch = b.pick(5);
  const bool has_starts = !nz && b.pick(2) == 1;

  std::vector<int64_t> lens, starts;
  int64_t rows = call.is_cumsum ? b.pick(3) : 0;
  int64_t columns = 0;
  if (call.is_cumsum) {
    lens.push_back(rows);
  }
  for (int64_t s = 0; s < batch; ++s) {
    const int64_t length = num_blocks == 0 ? 0 : b.pick(24);
    rows += length;
    lens.push_back(call.is_cumsum ? rows : length);
    starts.push_back(has_starts ? b.pick(20) : 0);
    columns = std::max(columns, starts.back() / block_size +
                                    (length + block_size - 1) / block_size);
  }
  columns += b.pick(2);
  std::vector<int64_t> table;
  for (int64_t i = 0; i < batch * columns; ++i) {
    table.push_back(b.pick(std::max<int64_t>(1, num_blocks)));
  }
  rows += b.pick(2);

  const auto sizes = [&](int64_t& width, at::ScalarType type,
                         bool cache) -> std::vector<int64_t> {
    if (!nz) {
      return cache ? std::vector{num_blocks, block_size, heads, width}
                   : std::vector{rows, heads, width};
    }
    const int64_t unit = 32 / static_cast<int64_t>(c10::elementSize(type));
    const int64_t units = 1 + width % 5;
    if (cache) {
      return b.pick(2) == 0
                 ? std::vector{num_blocks, heads * units, block_size, unit}
                 : std::vector{num_blocks, heads, units, block_size, unit};
    }
    return {rows, heads * units * unit};
  };
  const auto key = sizes(size, dtype, false);
  const auto value = sizes(value_size, value_dtype, false);
  make.pair("key", dtype, key, "value", value_dtype, value);
  if (nz) {  // the same rows as heads, of any size
    for (const size_t i : {kKey, kValue}) {
      Argument& out = call.arguments[i];
      const int64_t split = choose(
          b, {int64_t{0}, int64_t{1}, int64_t{4}, std::max<int64_t>(1, heads)});
      if (split > 0 && out.sizes[1] % split == 0) {
        const int64_t width = out.sizes[1] / split;
        out.sizes = {out.sizes[0], split, width};
        out.strides = {out.strides[0], width, 1};
      }
    }
  }
  if (packed) {
    make.push(make.tensor("kv_cache", dtype,
                          packed_sizes(call.kv_layout, num_blocks, block_size,
                                       heads, size, value_size)));
    make.none("value_cache");
  } else {
    const auto key_cache = sizes(size, dtype, true);
    const auto value_cache = sizes(value_size, value_dtype, true);
    make.pair("key_cache", dtype, key_cache, "value_cache", value_dtype,
              value_cache);
  }
  make.index("block_tables", table, {batch, columns});
  make.index("context_lens", lens, {static_cast<int64_t>(lens.size())});
  if (has_starts) {
    make.index("seq_starts", starts, {batch});
  } else {
    make.none("seq_starts");
  }
}

void spoil_modes(Bytes& b, Call& call) {
  constexpr const char* kModes[] = {"None", "Nct",  "Alibi", "Rope", "Omni",
                                    "NHSD", "Norm", "PA_NZ", "BNHC", "nct"};
  switch (b.pick(5)) {
    case 0:
      (call.kv_layout.empty() ? call.cache_mode : call.kv_layout) =
          choose(b, kModes);
      break;
    case 1:
      call.scatter_mode = choose(b, kModes);
      break;
    case 2:
      call.is_cumsum = !call.is_cumsum;
      break;
    default: {
      auto& list = b.pick(2) == 0 ? call.strides : call.offsets;
      list.emplace();
      for (int64_t i = b.pick(4); i > 0; --i) {
        list->push_back(b.number());
      }
    }
  }
}

// Changes one thing of the call.
void spoil(Layouts& make, Call& call) {
  Bytes& b = make.b;
  const auto count = static_cast<int64_t>(call.arguments.size());
  const int64_t what = b.pick(16);
  if (what == 0) {
    spoil_modes(b, call);
    return;
  }
  Argument& t = call.arguments[b.pick(count)];
  if (t.kind == Argument::kNone) {
    const char* name = t.name;
    t = call.arguments[b.pick(count)];
    t.name = name;
    return;
  }
  std::vector<uint8_t>& memory = call.memory[t.storage];
  const auto itemsize = static_cast<int64_t>(c10::elementSize(t.dtype));
  const auto elements = static_cast<int64_t>(memory.size()) / itemsize;
  switch (what) {
    case 1:
      t.kind = choose(b, {Argument::kNone, Argument::kSparse, Argument::kMeta,
                          Argument::kRequiresGrad});
      break;
    case 2:
      t.dtype = choose(b, kDtypes);
      break;
    case 3:
    case 4:
      if (!t.sizes.empty()) {
        const int64_t dim = b.pick(static_cast<int64_t>(t.sizes.size()));
        const int64_t size = b.number();
        t.sizes[dim] = size < 0 ? 0 : size;
        if (b.pick(2) == 0) {
          t.strides[dim] = 0;
        }
      }
      break;
    case 5:
    case 6:
      if (!t.strides.empty()) {
        const int64_t dim = b.pick(static_cast<int64_t>(t.strides.size()));
        const int64_t stride = b.number();
        t.strides[dim] = stride < 0 ? 0 : stride;
      }
      break;
    case 7:
      t.offset = b.pick(elements + 2);
      break;
    case 8:
      memory.resize(memory.size() -
                    std::min<size_t>(memory.size(), b.pick(64)));
      break;
    case 9: {  // memory of another argument
      const Argument& other = call.arguments[b.pick(count)];
      t.storage = other.storage;
      t.offset = b.byte() + b.pick(4) * 256;
      break;
    }
    case 10:  // another rank
      if (b.pick(2) == 0 && !t.sizes.empty()) {
        t.sizes.pop_back();
        t.strides.pop_back();
      } else {
        t.sizes.insert(t.sizes.begin(), b.pick(3));
        t.strides.insert(t.strides.begin(), b.pick(3));
      }
      break;
    default: {  // a value
      const int64_t element = b.byte() + b.pick(4) * 256;
      const int64_t value = b.number();
      if (element < elements && t.dtype != at::kHalf) {
        std::memcpy(memory.data() + element * itemsize, &value,
                    std::min<int64_t>(itemsize, 8));
      }
    }
  }
}

}  // namespace

int64_t Bytes::number() {
  constexpr int64_t kEdges[] = {
      0,         1,           -1,        2,         3,         7,
      8,         16,          65535,     65536,     1LL << 31, (1LL << 31) - 1,
      1LL << 32, 1LL << 40,   1LL << 60, 1LL << 61, 1LL << 62, INT64_MAX,
      INT64_MIN, -(1LL << 31)};
  const uint8_t way = byte();
  if (way < 64) {
    return byte() % 48;
  }
  if (way < 224) {
    return kEdges[way % (sizeof(kEdges) / sizeof(kEdges[0]))];
  }
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) {
    value = value << 8 | byte();
  }
  return static_cast<int64_t>(value);
}

Call read_call(Bytes& bytes) {
  Call call;
  Layouts make(bytes, call);
  const uint8_t first = bytes.byte();
  call.is_load = first % 3 == 0;
  call.shares = 1 + bytes.pick(7);
  call.deterministic = first / 4 % 4 == 0;
  const int64_t spoils = std::max<int64_t>(0, first / 16 % 5 - 2);
  if (call.is_load) {
    read_load(make, call);
  } else {
    read_scatter(make, call);
  }
  for (int64_t i = 0; i < spoils; ++i) {
    spoil(make, call);
  }
  return call;
}

}  // namespace pacache::testing
