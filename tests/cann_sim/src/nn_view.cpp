#include "nn_view.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "acl_codes.h"
#include "half.h"
#include "journal.h"

namespace cann_sim {
namespace {

constexpr int64_t kMaxRuns = 4096;

// Dense trailing axes merged: elements per run and the axes that are left.
int64_t run_length(const TensorInfo& t, size_t* outer_axes) {
  int64_t run = 1;
  size_t axis = t.dims.size();
  while (axis > 0 && (t.dims[axis - 1] == 1 || t.strides[axis - 1] == run)) {
    run *= t.dims[axis - 1];
    --axis;
  }
  *outer_axes = axis;
  return run;
}

void note_runs(const Call& call, const TensorInfo& t, Access access) {
  size_t outer = 0;
  int64_t run = run_length(t, &outer);
  std::vector<int64_t> dims(t.dims.begin(), t.dims.begin() + outer);
  if (product(dims) > kMaxRuns) return;
  std::vector<int64_t> strides(t.strides.begin(), t.strides.begin() + outer);
  for_each_offset(dims, strides, t.itemsize(), [&](int64_t offset) {
    note_access(t.first() + offset, run * t.itemsize(), access, call.run);
  });
}

template <typename T>
T load(const uint8_t* from) {
  T out;
  memcpy(&out, from, sizeof(T));
  return out;
}

template <typename T>
void store(uint8_t* to, T value) {
  memcpy(to, &value, sizeof(T));
}

// Float to integer as hardware does it: saturating, NaN is zero.
template <typename T>
T to_integer(double value) {
  if (std::isnan(value)) return 0;
  if (value >= 9.2233720368547758e18) return static_cast<T>(INT64_MAX);
  if (value <= -9.2233720368547758e18) return static_cast<T>(INT64_MIN);
  return static_cast<T>(static_cast<int64_t>(value));
}

// Complex numbers and 8-bit floats are copied as bytes, not converted.
void no_conversion(int data_type) {
  violation("missing_operator", "conversion",
            "from or to dtype number " + std::to_string(data_type));
}

double load_real(const uint8_t* from, int data_type) {
  switch (data_type) {
    case kFloat:
      return load<float>(from);
    case kHalf:
      return half_to_float(load<uint16_t>(from));
    case kBfloat16:
      return bfloat16_to_float(load<uint16_t>(from));
    case kDouble:
      return load<double>(from);
    case kInt8:
      return load<int8_t>(from);
    case kUint8:
    case kBool:
      return load<uint8_t>(from);
    case kInt16:
      return load<int16_t>(from);
    case kUint16:
      return load<uint16_t>(from);
    case kInt32:
      return load<int32_t>(from);
    case kUint32:
      return load<uint32_t>(from);
    case kInt64:
    case kUint64:
      return static_cast<double>(load<int64_t>(from));
    default:
      no_conversion(data_type);
      return 0;
  }
}

int64_t load_integer(const uint8_t* from, int data_type) {
  if (data_type == kInt64 || data_type == kUint64) return load<int64_t>(from);
  return to_integer<int64_t>(load_real(from, data_type));
}

void store_integer(uint8_t* to, int data_type, int64_t value);

void store_real(uint8_t* to, int data_type, double value) {
  switch (data_type) {
    case kFloat:
      return store(to, static_cast<float>(value));
    case kHalf:
      return store(to, float_to_half(static_cast<float>(value)));
    case kBfloat16:
      return store(to, float_to_bfloat16(static_cast<float>(value)));
    case kDouble:
      return store(to, value);
    case kBool:
      return store<uint8_t>(to, value != 0);
    default:
      return store_integer(to, data_type, to_integer<int64_t>(value));
  }
}

void store_integer(uint8_t* to, int data_type, int64_t value) {
  switch (data_type) {
    case kInt8:
    case kUint8:
      return store(to, static_cast<uint8_t>(value));
    case kBool:
      return store<uint8_t>(to, value != 0);
    case kInt16:
    case kUint16:
      return store(to, static_cast<uint16_t>(value));
    case kInt32:
    case kUint32:
      return store(to, static_cast<uint32_t>(value));
    case kInt64:
    case kUint64:
      return store(to, value);
    default:
      if (is_floating(data_type)) {
        return store_real(to, data_type, static_cast<double>(value));
      }
      return no_conversion(data_type);
  }
}

template <typename Visit>
void for_each_element(const View& view, Visit visit) {
  const TensorInfo& t = view.info;
  int64_t itemsize = t.itemsize();
  if (t.contiguous()) {
    int64_t count = t.numel();
    for (int64_t i = 0; i < count; ++i) visit(view.base + i * itemsize);
    return;
  }
  for_each_offset(t.dims, t.strides, itemsize,
                  [&](int64_t offset) { visit(view.base + offset); });
}

}  // namespace

int64_t product(const std::vector<int64_t>& numbers) {
  int64_t out = 1;
  for (int64_t n : numbers) out *= n;
  return out;
}

View open_view(const Call& call, int index, Access access,
               const std::string& name) {
  View view;
  view.info = call.tensors[index];
  const TensorInfo& t = view.info;
  if (t.numel() == 0) return view;
  int64_t low = 0;
  int64_t high = 0;
  for (size_t i = 0; i < t.dims.size(); ++i) {
    int64_t reach = (t.dims[i] - 1) * t.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  int64_t itemsize = t.itemsize();
  uint8_t* begin =
      host_view(t.first() + low * itemsize, (high - low + 1) * itemsize, access,
                call.run, name, false);
  view.ok = begin != nullptr;
  if (!view.ok) return view;
  view.base = begin - low * itemsize;
  note_runs(call, t, access);
  return view;
}

bool expand(const View& view, const std::vector<int64_t>& dims, View* out) {
  *out = view;
  if (dims.size() < view.info.dims.size()) return false;
  size_t lead = dims.size() - view.info.dims.size();
  std::vector<int64_t> strides(dims.size(), 0);
  for (size_t i = 0; i < view.info.dims.size(); ++i) {
    if (view.info.dims[i] == dims[lead + i]) {
      strides[lead + i] = view.info.strides[i];
    } else if (view.info.dims[i] != 1) {
      return false;
    }
  }
  out->info.dims = dims;
  out->info.strides = strides;
  return true;
}

View axis_last(View view, int64_t axis) {
  auto& dims = view.info.dims;
  auto& strides = view.info.strides;
  std::rotate(dims.begin() + axis, dims.begin() + axis + 1, dims.end());
  std::rotate(strides.begin() + axis, strides.begin() + axis + 1,
              strides.end());
  return view;
}

std::vector<double> read_reals(const View& view) {
  std::vector<double> out;
  out.reserve(view.info.numel());
  int type = view.info.data_type;
  for_each_element(
      view, [&](const uint8_t* p) { out.push_back(load_real(p, type)); });
  return out;
}

std::vector<int64_t> read_integers(const View& view) {
  std::vector<int64_t> out;
  out.reserve(view.info.numel());
  int type = view.info.data_type;
  for_each_element(
      view, [&](const uint8_t* p) { out.push_back(load_integer(p, type)); });
  return out;
}

void write_reals(const View& view, const std::vector<double>& values) {
  size_t i = 0;
  int type = view.info.data_type;
  for_each_element(view, [&](uint8_t* p) { store_real(p, type, values[i++]); });
}

void write_integers(const View& view, const std::vector<int64_t>& values) {
  size_t i = 0;
  int type = view.info.data_type;
  for_each_element(view,
                   [&](uint8_t* p) { store_integer(p, type, values[i++]); });
}

void copy_view(const View& to, const View& from) {
  const TensorInfo& a = to.info;
  const TensorInfo& b = from.info;
  if (a.numel() == 0) return;
  int64_t itemsize = a.itemsize();
  if (a.data_type == b.data_type) {
    if (a.contiguous() && b.contiguous()) {
      memmove(to.base, from.base, a.numel() * itemsize);
      return;
    }
    // Bytes, in two steps so that overlapping views are read first.
    std::vector<uint8_t> bytes(a.numel() * itemsize);
    uint8_t* cursor = bytes.data();
    for_each_element(from, [&](const uint8_t* p) {
      memcpy(cursor, p, itemsize);
      cursor += itemsize;
    });
    cursor = bytes.data();
    for_each_element(to, [&](uint8_t* p) {
      memcpy(p, cursor, itemsize);
      cursor += itemsize;
    });
    return;
  }
  if (is_floating(a.data_type) || is_floating(b.data_type)) {
    write_reals(to, read_reals(from));
  } else {
    write_integers(to, read_integers(from));
  }
}

Region::Region(const Call& call, int index, Access access, std::string name,
               int64_t limit)
    : call_(call),
      access_(access),
      name_(std::move(name)),
      first_(call.tensors[index].first()),
      limit_(limit) {
  bool here = device_of(first_) == call.run.device;
  if (limit_ > 0 && here) whole_ = peek(first_, limit_);
}

void Region::flush() {
  if (pending_end_ > pending_begin_) {
    note_access(first_ + pending_begin_, pending_end_ - pending_begin_, access_,
                call_.run);
  }
  pending_begin_ = pending_end_ = 0;
}

uint8_t* Region::at(int64_t offset, int64_t bytes) {
  bool inside = offset >= 0 && (limit_ < 0 || bytes <= limit_ - offset);
  if (inside && whole_) {
    if (offset == pending_end_) {
      pending_end_ += bytes;
    } else {
      flush();
      pending_begin_ = offset;
      pending_end_ = offset + bytes;
    }
    return whole_ + offset;
  }
  // One violation per tensor and call is enough.
  if (failed_) return inside ? peek(first_ + offset, bytes) : nullptr;
  uint8_t* out = nullptr;
  if (inside) {
    out = host_view(first_ + offset, bytes, access_, call_.run, name_);
  } else {
    violation("out_of_bounds", call_.run.op,
              name_ + format(": %s at byte %lld (+%lld), the tensor has %lld",
                             access_ == Access::kRead ? "read" : "write",
                             static_cast<long long>(offset),
                             static_cast<long long>(bytes),
                             static_cast<long long>(limit_)));
  }
  if (!out) failed_ = true;
  return out;
}

}  // namespace cann_sim
