// aclnnScatterPaKvCache, phase two: the kernels, with the deviations that a
// version has from the documented meaning.
//
// All addressing is that of the dense layout, in bytes from the first element
// of a tensor. Bounds: the dense extent of the view; for Nct sources, which
// reach beyond it by design, the allocation.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "half.h"
#include "journal.h"
#include "nn_scatter.h"
#include "nn_view.h"
#include "settings.h"

namespace cann_sim {
namespace {

constexpr int64_t kLine = 32;  // bytes that the copy engine moves at once

int64_t dense_bytes(const TensorInfo& t) { return t.numel() * t.itemsize(); }

// Extent of a cache whose block stride may be larger than a block.
int64_t block_strided_bytes(const TensorInfo& t) {
  if (t.numel() == 0) return 0;
  int64_t block = t.numel() / t.dims[0];
  return ((t.dims[0] - 1) * t.strides[0] + block) * t.itemsize();
}

// Index tensors. Kernels that are not made for int64 read the buffer as
// int32 words: element i is word i.
class Indices {
 public:
  Indices(const Call& call, int index, bool as_words, const char* name)
      : region_(call, index, Access::kRead, name,
                dense_bytes(call.tensors[index])),
        wide_(call.tensors[index].data_type == kInt64 && !as_words) {
    if (call.tensors[index].data_type == kInt64 && as_words) {
      count("int64_read_as_int32");
    }
  }

  // False when the read left the tensor.
  bool get(int64_t i, int64_t* value) {
    int64_t size = wide_ ? 8 : 4;
    const uint8_t* p = region_.at(i * size, size);
    if (!p) return false;
    if (wide_) {
      memcpy(value, p, 8);
    } else {
      int32_t narrow;
      memcpy(&narrow, p, 4);
      *value = narrow;
    }
    return true;
  }

 private:
  Region region_;
  bool wide_;
};

bool reads_words(const ScatterPlan& p) {
  if (p.compressed()) return true;
  return p.version < kCann900 && p.mode != ScatterMode::kNz;
}

// ---- scenarios 1, 2, 6, 7
// -----------------------------------------------------

// How one of key and value is laid out.
struct Side {
  int source = -1;
  int cache = -1;
  std::string name;
  int64_t stride = 0;  // bytes between tokens of the source
  int64_t offset = 0;  // bytes before token 0
  bool fused = false;  // Nct: the source may lie beyond the view
  int64_t itemsize = 0;
  int64_t heads = 0;
  int64_t head_size = 0;
  int64_t moved_bytes = 0;  // of a token; less than it has on 8.5.0 SISO
};

Side make_side(const ScatterPlan& p, const Call& call, bool is_key) {
  Side s;
  s.source = is_key ? p.t.key : p.t.value;
  s.cache = is_key ? p.t.key_cache : p.t.value_cache;
  s.name = is_key ? "key" : "value";
  const TensorInfo& x = call.tensors[s.source];
  s.itemsize = x.itemsize();
  // The 8.5.0 ND kernel copies value in units of the key's element type.
  if (p.version < kCann900 && p.mode != ScatterMode::kNz) {
    s.itemsize = call.tensors[p.t.key].itemsize();
  }
  s.heads = x.dims[1];
  s.head_size = x.dims[2];
  int64_t token_bytes = s.heads * s.head_size * s.itemsize;
  s.stride = token_bytes;
  s.moved_bytes = token_bytes;
  if (p.mode == ScatterMode::kNct || p.mode == ScatterMode::kSisoNct) {
    bool own_stride = is_key || p.version >= kCann900;
    s.fused = true;
    s.stride = p.strides[own_stride && !is_key ? 1 : 0] * s.itemsize;
    s.offset = p.offsets[is_key ? 0 : 1] * s.itemsize;
  }
  if (p.key_only() && p.version < kCann900) {
    s.moved_bytes = token_bytes / kLine * kLine;
  }
  return s;
}

void scatter_side(const ScatterPlan& p, const Call& call, const Side& s) {
  const TensorInfo& x = call.tensors[s.source];
  const TensorInfo& cache = call.tensors[s.cache];
  bool block_stride = p.mode == ScatterMode::kNorm && p.version >= kCann910;
  Region from(call, s.source, Access::kRead, s.name,
              s.fused ? -1 : dense_bytes(x));
  Region to(call, s.cache, Access::kWrite, s.name + "_cache",
            block_stride ? block_strided_bytes(cache) : dense_bytes(cache));
  Indices slots(call, p.t.slots, reads_words(p), "slot_mapping");
  int64_t token_bytes = s.heads * s.head_size * s.itemsize;
  int64_t block_size = p.mode == ScatterMode::kNz ? cache.dims[cache.rank() - 2]
                       : p.mode == ScatterMode::kNhsd ? cache.dims[2]
                                                      : cache.dims[1];
  for (int64_t i = 0; i < x.dims[0]; ++i) {
    int64_t slot;
    if (!slots.get(i, &slot)) return;
    if (slot < 0) continue;
    int64_t block = slot / block_size;
    int64_t row = slot % block_size;
    int64_t source = s.offset + i * s.stride;
    if (p.mode == ScatterMode::kNz) {
      // A token is cut into lines; line c lies c * block_size lines further.
      // The gap between lines is a 16-bit number.
      int64_t gap = (block_size - 1) & 0xFFFF;
      int64_t start = block * block_size * token_bytes + row * kLine;
      for (int64_t c = 0; c < token_bytes / kLine; ++c) {
        uint8_t* read = from.at(source + c * kLine, kLine);
        uint8_t* write = to.at(start + c * (gap + 1) * kLine, kLine);
        if (read && write) memcpy(write, read, kLine);
      }
    } else if (p.mode == ScatterMode::kNhsd) {
      int64_t head_bytes = s.head_size * s.itemsize;
      for (int64_t h = 0; h < s.heads; ++h) {
        int64_t target =
            ((block * s.heads + h) * block_size + row) * head_bytes;
        uint8_t* read = from.at(source + h * head_bytes, head_bytes);
        uint8_t* write = to.at(target, head_bytes);
        if (read && write) memcpy(write, read, head_bytes);
      }
    } else if (s.moved_bytes) {
      int64_t target = block_stride ? block * cache.strides[0] * s.itemsize +
                                          row * token_bytes
                                    : slot * token_bytes;
      uint8_t* read = from.at(source, s.moved_bytes);
      uint8_t* write = to.at(target, s.moved_bytes);
      if (read && write) memcpy(write, read, s.moved_bytes);
    }
  }
}

// ---- scenarios 4 and 5
// ----------------------------------------------------------

float to_float(const uint8_t* p, int data_type) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return data_type == kHalf ? half_to_float(bits) : bfloat16_to_float(bits);
}

void from_float(uint8_t* p, int data_type, float value) {
  uint16_t bits =
      data_type == kHalf ? float_to_half(value) : float_to_bfloat16(value);
  memcpy(p, &bits, 2);
}

// One of key and value in a compressed mode. Rows of the cache have the head
// size of the key for both, and slots are unsigned 32-bit numbers.
class CompressedSide {
 public:
  CompressedSide(const ScatterPlan& p, const Call& call, bool is_key)
      : heads_(call.tensors[p.t.key].dims[1]),
        head_size_(call.tensors[p.t.key].dims[2]),
        data_type_(call.tensors[p.t.key].data_type),
        head_bytes_(head_size_ * call.tensors[p.t.key].itemsize()),
        moved_(head_bytes_ / kLine * kLine),
        from_(call, is_key ? p.t.key : p.t.value, Access::kRead,
              is_key ? "key" : "value",
              dense_bytes(call.tensors[is_key ? p.t.key : p.t.value])),
        to_(call, is_key ? p.t.key_cache : p.t.value_cache, Access::kWrite,
            is_key ? "key_cache" : "value_cache",
            dense_bytes(
                call.tensors[is_key ? p.t.key_cache : p.t.value_cache])) {}

  bool failed() const { return from_.failed() || to_.failed(); }

  void copy(int64_t token, int64_t head, int64_t row) {
    if (!moved_) return;
    uint8_t* read = from_.at((token * heads_ + head) * head_bytes_, moved_);
    uint8_t* write = to_.at(row * head_bytes_, moved_);
    if (read && write) memcpy(write, read, moved_);
  }

  // Mean over tokens [first, first + count): one float addition per token in
  // ascending order from zero, one division, rounding to nearest even.
  void mean(int64_t first, int64_t count, int64_t head, int64_t row) {
    std::vector<float> sum(head_size_, 0.0f);
    for (int64_t j = 0; j < count && !failed(); ++j) {
      const uint8_t* read =
          from_.at(((first + j) * heads_ + head) * head_bytes_, head_bytes_);
      if (!read) return;
      for (int64_t d = 0; d < head_size_; ++d) {
        sum[d] = sum[d] + to_float(read + 2 * d, data_type_);
      }
    }
    uint8_t* write = to_.at(row * head_bytes_, head_bytes_);
    if (!write) return;
    for (int64_t d = 0; d < moved_ / 2; ++d) {
      from_float(write + 2 * d, data_type_, sum[d] / static_cast<float>(count));
    }
  }

 private:
  int64_t heads_;
  int64_t head_size_;
  int data_type_;
  int64_t head_bytes_;
  int64_t moved_;
  Region from_;
  Region to_;
};

void scatter_compressed(const ScatterPlan& p, const Call& call, bool is_key) {
  CompressedSide side(p, call, is_key);
  Indices slots(call, p.t.slots, true, "slot_mapping");
  Indices windows(call, p.t.compress_lens, true, "compress_lens");
  Indices lengths(call, p.t.seq_lens, true, "seq_lens");
  std::unique_ptr<Indices> starts;
  if (p.mode != ScatterMode::kAlibi) {
    if (p.t.compress_offsets < 0) {
      violation("null_dereference", call.run.op,
                "the kernel reads compress_seq_offset, which is null");
      return;
    }
    starts = std::make_unique<Indices>(call, p.t.compress_offsets, true,
                                       "compress_seq_offset");
  }
  int64_t batch = call.tensors[p.t.seq_lens].dims[0];
  int64_t heads = call.tensors[p.t.key].dims[1];
  uint32_t before = 0;  // tokens of the batches before
  for (int64_t b = 0; b < batch; ++b) {
    int64_t length = 0;
    if (!lengths.get(b, &length)) return;
    for (int64_t h = 0; h < heads; ++h) {
      int64_t i = b * heads + h;
      int64_t window = 0;
      int64_t slot = 0;
      if (!windows.get(i, &window) || !slots.get(i, &slot)) return;
      int64_t row = static_cast<uint32_t>(slot);
      if (window < 0 || window > length) {
        violation("undefined", call.run.op,
                  format("compress_lens %lld of a sequence of %lld",
                         static_cast<long long>(window),
                         static_cast<long long>(length)));
      }
      if (p.mode == ScatterMode::kAlibi) {
        int64_t first = before + length - window;
        for (int64_t j = 0; j < window && !side.failed(); ++j) {
          side.copy(first + j, h, row + j);
        }
        continue;
      }
      int64_t start = 0;
      if (!starts->get(i, &start)) return;
      if (start == -1 || window == 0) start = length;
      if (start == length) window = 0;
      if (start < 0 || start + window > length) {
        violation("undefined", call.run.op,
                  format("window [%lld, +%lld) of a sequence of %lld",
                         static_cast<long long>(start),
                         static_cast<long long>(window),
                         static_cast<long long>(length)));
      }
      for (int64_t j = 0; j < start && !side.failed(); ++j) {
        side.copy(before + j, h, row + j);
      }
      if (p.mode == ScatterMode::kRope && window) {
        side.mean(before + start, window, h, row + start);
      }
      // Counts are unsigned: a window past the end wraps to about 2^32.
      uint32_t tail = static_cast<uint32_t>(length - start - window);
      int64_t gap = p.mode == ScatterMode::kRope ? 1 : 0;
      if (!window) tail = 0;
      for (uint32_t j = 0; j < tail && !side.failed(); ++j) {
        side.copy(before + start + window + j, h, row + start + gap + j);
      }
    }
    before += static_cast<uint32_t>(length);
  }
}

void run_dense(const ScatterPlan& p, const Call& call) {
  if (p.compressed()) {
    int64_t head_size = call.tensors[p.t.key].dims[2];
    int64_t head_bytes = head_size * call.tensors[p.t.key].itemsize();
    // Lines of 32 bytes are moved; the mean works on 32 elements at a time.
    if (head_bytes % kLine ||
        (p.mode == ScatterMode::kRope && head_size % 32)) {
      violation("undefined", call.run.op,
                format("head size %lld in a compressed mode: the tail is lost",
                       static_cast<long long>(head_size)));
    }
    if (call.tensors[p.t.value].dims[2] != head_size) {
      violation("undefined", call.run.op,
                "key and value head sizes differ in a compressed mode");
    }
    scatter_compressed(p, call, true);
    scatter_compressed(p, call, false);
    return;
  }
  scatter_side(p, call, make_side(p, call, true));
  if (!p.key_only()) scatter_side(p, call, make_side(p, call, false));
}

}  // namespace

void run_scatter(const ScatterPlan& p, const Call& call) {
  if (!p.make_dense) {
    run_dense(p, call);
    return;
  }
  // 9.1.0: dense temporaries in, the caches copied back out.
  std::vector<TensorInfo> dense = call.tensors;
  std::vector<void*> temporaries;
  bool ok = true;
  for (size_t i = 0; i < dense.size(); ++i) {
    TensorInfo& t = dense[i];
    if (t.contiguous() || t.numel() == 0) continue;
    View from = open_view(call, static_cast<int>(i), Access::kRead, "input");
    ok = ok && from.ok;
    if (!ok) break;
    void* memory = device_malloc(call.run.device, dense_bytes(t), nullptr);
    temporaries.push_back(memory);
    t.data = memory;
    t.offset = 0;
    int64_t stride = 1;
    for (size_t axis = t.dims.size(); axis-- > 0;) {
      t.strides[axis] = stride;
      stride *= t.dims[axis];
    }
    t.storage_dims = t.dims;
    View to = from;
    to.info = t;
    to.base = peek(memory, dense_bytes(t));
    copy_view(to, from);
  }
  if (ok) {
    Call inner{call.run, dense, call.workspace, call.workspace_bytes};
    run_dense(p, inner);
    for (int index : {p.t.key_cache, p.t.value_cache}) {
      if (index < 0 || dense[index].data == call.tensors[index].data) continue;
      View to = open_view(call, index, Access::kWrite, "cache copied back");
      View from = to;
      from.info = dense[index];
      from.base = peek(dense[index].data, dense_bytes(dense[index]));
      if (to.ok && from.base) copy_view(to, from);
    }
  }
  for (void* memory : temporaries) device_free(memory);
}

}  // namespace cann_sim
