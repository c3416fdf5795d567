#include "nn_objects.h"

#include <algorithm>
#include <cstring>

#include "acl_codes.h"
#include "half.h"
#include "journal.h"

namespace cann_sim {

int64_t itemsize_of(int data_type) {
  switch (data_type) {
    case kInt8:
    case kUint8:
    case kBool:
      return 1;
    case kHalf:
    case kBfloat16:
    case kInt16:
    case kUint16:
      return 2;
    case kFloat:
    case kInt32:
    case kUint32:
      return 4;
    case kComplex128:
      return 16;
    default:
      return 8;
  }
}

const char* data_type_name(int data_type) {
  switch (data_type) {
    case kFloat:
      return "float32";
    case kHalf:
      return "float16";
    case kInt8:
      return "int8";
    case kInt32:
      return "int32";
    case kUint8:
      return "uint8";
    case kInt16:
      return "int16";
    case kUint16:
      return "uint16";
    case kUint32:
      return "uint32";
    case kInt64:
      return "int64";
    case kUint64:
      return "uint64";
    case kDouble:
      return "float64";
    case kBool:
      return "bool";
    case kBfloat16:
      return "bfloat16";
    default:
      return "?";
  }
}

bool is_floating(int data_type) {
  return data_type == kFloat || data_type == kHalf || data_type == kBfloat16 ||
         data_type == kDouble;
}

int64_t TensorInfo::numel() const {
  int64_t out = 1;
  for (int64_t d : dims) out *= d;
  return out;
}

int64_t TensorInfo::itemsize() const { return itemsize_of(data_type); }

int64_t TensorInfo::storage_bytes() const {
  int64_t out = itemsize();
  for (int64_t d : storage_dims) out *= d;
  return out;
}

bool TensorInfo::contiguous() const {
  int64_t expected = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i] != 1 && strides[i] != expected) return false;
    expected *= dims[i];
  }
  return true;
}

char* TensorInfo::first() const {
  return static_cast<char*>(data) + offset * itemsize();
}

std::string numbers_json(const std::vector<int64_t>& numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i) out += ", ";
    out += std::to_string(numbers[i]);
  }
  return out + "]";
}

std::string tensor_json(const TensorInfo& t, bool with_data) {
  std::string out = "{\"dims\": " + numbers_json(t.dims) +
                    ", \"strides\": " + numbers_json(t.strides) +
                    ", \"offset\": " + std::to_string(t.offset) +
                    ", \"dtype\": \"" + data_type_name(t.data_type) +
                    "\", \"dtype_code\": " + std::to_string(t.data_type) +
                    ", \"format\": " + std::to_string(t.format) +
                    ", \"storage_dims\": " + numbers_json(t.storage_dims);
  if (with_data) out += ", \"data\": \"" + hex(t.data) + "\"";
  return out + "}";
}

namespace {

template <typename T>
T load(const void* from) {
  T out;
  memcpy(&out, from, sizeof(T));
  return out;
}

ScalarInfo read_scalar(const void* value, int data_type) {
  ScalarInfo s;
  s.data_type = data_type;
  switch (data_type) {
    case kFloat:
      s.real = load<float>(value);
      break;
    case kDouble:
      s.real = load<double>(value);
      break;
    case kHalf:
      s.real = half_to_float(load<uint16_t>(value));
      break;
    case kBfloat16:
      s.real = bfloat16_to_float(load<uint16_t>(value));
      break;
    case kInt8:
      s.integer = load<int8_t>(value);
      break;
    case kUint8:
      s.integer = load<uint8_t>(value);
      break;
    case kBool:
      s.integer = load<uint8_t>(value) != 0;
      break;
    case kInt16:
      s.integer = load<int16_t>(value);
      break;
    case kInt32:
      s.integer = load<int32_t>(value);
      break;
    default:
      s.integer = load<int64_t>(value);
  }
  if (is_floating(data_type)) {
    s.integer = static_cast<int64_t>(s.real);
  } else {
    s.real = static_cast<double>(s.integer);
  }
  return s;
}

template <typename T>
int destroy(const char* kind, const char* api, const T* object) {
  // A failure that a test asked for still destroys: nobody could do it after.
  int injected = enter(api);
  if (!object) return injected;
  bool fine = handle_retired(kind, object, api, [object] { delete object; });
  return fine ? injected : kAclnnInvalid;
}

template <typename T>
T* created(const char* kind, T* object, void* caller) {
  handle_created(kind, object, caller);
  return object;
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

#define CALLER __builtin_return_address(0)

// A creator that was made to fail returns null.
#define ENTER_CREATOR(api) \
  if (enter(#api)) return nullptr

CANN_SIM_EXPORT aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank,
                                           int data_type,
                                           const int64_t* strides,
                                           int64_t offset, int format,
                                           const int64_t* storage_dims,
                                           uint64_t storage_rank, void* data) {
  ENTER_CREATOR(aclCreateTensor);
  aclTensor* t = new aclTensor;
  TensorInfo& info = t->info;
  if (rank) info.dims.assign(dims, dims + rank);
  if (strides && rank) {
    info.strides.assign(strides, strides + rank);
  } else {
    info.strides.assign(rank, 1);
    for (size_t i = rank; i-- > 1;) {
      info.strides[i - 1] = info.strides[i] * info.dims[i];
    }
  }
  info.offset = offset;
  info.data_type = data_type;
  info.format = format;
  if (storage_rank) {
    info.storage_dims.assign(storage_dims, storage_dims + storage_rank);
  }
  info.data = data;
  return created("aclTensor", t, CALLER);
}

CANN_SIM_EXPORT int aclDestroyTensor(const aclTensor* tensor) {
  return destroy("aclTensor", "aclDestroyTensor", tensor);
}

CANN_SIM_EXPORT aclScalar* aclCreateScalar(void* value, int data_type) {
  ENTER_CREATOR(aclCreateScalar);
  return created("aclScalar", new aclScalar{read_scalar(value, data_type)},
                 CALLER);
}
CANN_SIM_EXPORT int aclDestroyScalar(const aclScalar* scalar) {
  return destroy("aclScalar", "aclDestroyScalar", scalar);
}

CANN_SIM_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values,
                                               uint64_t count) {
  ENTER_CREATOR(aclCreateIntArray);
  return created("aclIntArray", new aclIntArray{{values, values + count}},
                 CALLER);
}
CANN_SIM_EXPORT int aclDestroyIntArray(const aclIntArray* array) {
  return destroy("aclIntArray", "aclDestroyIntArray", array);
}

CANN_SIM_EXPORT aclFloatArray* aclCreateFloatArray(const float* values,
                                                   uint64_t count) {
  ENTER_CREATOR(aclCreateFloatArray);
  return created("aclFloatArray", new aclFloatArray{{values, values + count}},
                 CALLER);
}
CANN_SIM_EXPORT int aclDestroyFloatArray(const aclFloatArray* array) {
  return destroy("aclFloatArray", "aclDestroyFloatArray", array);
}

CANN_SIM_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values,
                                                 uint64_t count) {
  ENTER_CREATOR(aclCreateBoolArray);
  return created("aclBoolArray",
                 new aclBoolArray{std::vector<bool>(values, values + count)},
                 CALLER);
}
CANN_SIM_EXPORT int aclDestroyBoolArray(const aclBoolArray* array) {
  return destroy("aclBoolArray", "aclDestroyBoolArray", array);
}

CANN_SIM_EXPORT aclTensorList* aclCreateTensorList(
    const aclTensor* const* items, uint64_t count) {
  ENTER_CREATOR(aclCreateTensorList);
  return created("aclTensorList", new aclTensorList{{items, items + count}},
                 CALLER);
}
// Destroys the tensors in the list as well.
CANN_SIM_EXPORT int aclDestroyTensorList(const aclTensorList* list) {
  if (list && handle_known("aclTensorList", list)) {
    for (const aclTensor* t : list->items) {
      if (t) aclDestroyTensor(t);
    }
  }
  return destroy("aclTensorList", "aclDestroyTensorList", list);
}

CANN_SIM_EXPORT aclScalarList* aclCreateScalarList(
    const aclScalar* const* items, uint64_t count) {
  ENTER_CREATOR(aclCreateScalarList);
  return created("aclScalarList", new aclScalarList{{items, items + count}},
                 CALLER);
}
CANN_SIM_EXPORT int aclDestroyScalarList(const aclScalarList* list) {
  if (list && handle_known("aclScalarList", list)) {
    for (const aclScalar* s : list->items) {
      if (s) aclDestroyScalar(s);
    }
  }
  return destroy("aclScalarList", "aclDestroyScalarList", list);
}

// ---- getters --------------------------------------------------------------

namespace {

// As the real ones do, hands out an array that the caller frees with delete[].
int give(const std::vector<int64_t>& from, int64_t** values, uint64_t* count) {
  *count = from.size();
  *values = new int64_t[from.size() + 1];
  std::copy(from.begin(), from.end(), *values);
  return kOk;
}

bool live(const aclTensor* tensor, const char* api) {
  return tensor && handle_live("aclTensor", tensor, api);
}

}  // namespace

CANN_SIM_EXPORT int aclGetViewShape(const aclTensor* tensor, int64_t** dims,
                                    uint64_t* count) {
  CANN_SIM_ENTER(aclGetViewShape);
  if (!live(tensor, "aclGetViewShape")) return kAclnnInvalid;
  return give(tensor->info.dims, dims, count);
}
CANN_SIM_EXPORT int aclGetStorageShape(const aclTensor* tensor, int64_t** dims,
                                       uint64_t* count) {
  CANN_SIM_ENTER(aclGetStorageShape);
  if (!live(tensor, "aclGetStorageShape")) return kAclnnInvalid;
  return give(tensor->info.storage_dims, dims, count);
}
CANN_SIM_EXPORT int aclGetViewStrides(const aclTensor* tensor,
                                      int64_t** strides, uint64_t* count) {
  CANN_SIM_ENTER(aclGetViewStrides);
  if (!live(tensor, "aclGetViewStrides")) return kAclnnInvalid;
  return give(tensor->info.strides, strides, count);
}
CANN_SIM_EXPORT int aclGetViewOffset(const aclTensor* tensor, int64_t* offset) {
  CANN_SIM_ENTER(aclGetViewOffset);
  if (!live(tensor, "aclGetViewOffset")) return kAclnnInvalid;
  *offset = tensor->info.offset;
  return kOk;
}
CANN_SIM_EXPORT int aclGetFormat(const aclTensor* tensor, int* format) {
  CANN_SIM_ENTER(aclGetFormat);
  if (!live(tensor, "aclGetFormat")) return kAclnnInvalid;
  *format = tensor->info.format;
  return kOk;
}
CANN_SIM_EXPORT int aclGetDataType(const aclTensor* tensor, int* data_type) {
  CANN_SIM_ENTER(aclGetDataType);
  if (!live(tensor, "aclGetDataType")) return kAclnnInvalid;
  *data_type = tensor->info.data_type;
  return kOk;
}
