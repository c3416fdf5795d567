#include "acl_handles.h"

#include <c10/util/StringUtil.h>

#include "call_error.h"
#include "cann_library.h"

namespace pacache::npu {
namespace {

// aclCreateTensor: mind the order offset, format.
using CreateTensor = aclTensor* (*)(const int64_t* view_dims,
                                    uint64_t view_rank, int dtype,
                                    const int64_t* strides, int64_t offset,
                                    int format, const int64_t* storage_dims,
                                    uint64_t storage_rank, void* data);
using CreateIntArray = aclIntArray* (*)(const int64_t* values, uint64_t size);
using Destroy = int (*)(const void*);

struct DtypeNumber {
  at::ScalarType torch_dtype;
  int number;
  const char* name;
};

constexpr DtypeNumber kDtypes[] = {
    {at::kFloat, 0, "float32"}, {at::kHalf, 1, "float16"},
    {at::kChar, 2, "int8"},     {at::kInt, 3, "int32"},
    {at::kByte, 4, "uint8"},    {at::kShort, 6, "int16"},
    {at::kUInt16, 7, "uint16"}, {at::kUInt32, 8, "uint32"},
    {at::kLong, 9, "int64"},    {at::kBFloat16, 27, "bfloat16"},
};

constexpr const char* kSinceAlways = "CANN 7.0";

}  // namespace

int acl_dtype(at::ScalarType dtype) {
  for (const DtypeNumber& entry : kDtypes) {
    if (entry.torch_dtype == dtype) {
      return entry.number;
    }
  }
  return -1;
}

const char* acl_dtype_name(int dtype) {
  for (const DtypeNumber& entry : kDtypes) {
    if (entry.number == dtype) {
      return entry.name;
    }
  }
  return "unknown";
}

TensorDescriptor::TensorDescriptor(const at::Tensor& t) {
  if (!t.defined()) {
    return;
  }
  present = true;
  data = const_cast<void*>(t.const_data_ptr());
  dtype = acl_dtype(t.scalar_type());
  sizes.assign(t.sizes().begin(), t.sizes().end());
  strides.assign(t.strides().begin(), t.strides().end());
  extent = 1;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    extent += (sizes[dim] - 1) * strides[dim];
  }
}

TensorDescriptor dense_descriptor(void* data, at::ScalarType dtype,
                                  at::IntArrayRef sizes) {
  TensorDescriptor descriptor;
  descriptor.present = true;
  descriptor.data = data;
  descriptor.dtype = acl_dtype(dtype);
  descriptor.sizes.assign(sizes.begin(), sizes.end());
  descriptor.strides.resize(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    descriptor.strides[dim] = stride;
    stride *= sizes[dim];
  }
  descriptor.extent = stride;
  return descriptor;
}

void DestroyTensor::operator()(aclTensor* tensor) const {
  static const auto destroy =
      reinterpret_cast<Destroy>(find_op_api("aclDestroyTensor"));
  if (destroy != nullptr) {
    destroy(tensor);
  }
}

void DestroyIntArray::operator()(aclIntArray* array) const {
  static const auto destroy =
      reinterpret_cast<Destroy>(find_op_api("aclDestroyIntArray"));
  if (destroy != nullptr) {
    destroy(array);
  }
}

void DestroyExecutor::operator()(aclOpExecutor* executor) const {
  static const auto destroy =
      reinterpret_cast<Destroy>(find_op_api("aclDestroyAclOpExecutor"));
  if (destroy != nullptr) {
    destroy(executor);
  }
}

TensorHandle make_tensor(const char* op, const TensorDescriptor& descriptor) {
  if (!descriptor.present) {
    return nullptr;
  }
  static const auto create =
      require_op_api<CreateTensor>(op, "aclCreateTensor", kSinceAlways);
  // Nothing is made that could not be given back.
  [[maybe_unused]] static const auto destroy =
      require_op_api<Destroy>(op, "aclDestroyTensor", kSinceAlways);
  // One flat storage dimension: what follows the address.
  const int64_t storage = descriptor.extent;
  TensorHandle tensor(create(descriptor.sizes.data(), descriptor.sizes.size(),
                             descriptor.dtype, descriptor.strides.data(), 0,
                             descriptor.format, &storage, 1, descriptor.data));
  if (tensor == nullptr) {
    throw_null(op, "aclCreateTensor",
               c10::str(acl_dtype_name(descriptor.dtype), " ",
                        at::IntArrayRef(descriptor.sizes), " strides ",
                        at::IntArrayRef(descriptor.strides)));
  }
  return tensor;
}

IntArrayHandle make_int_array(const char* op, at::IntArrayRef values) {
  static const auto create =
      require_op_api<CreateIntArray>(op, "aclCreateIntArray", kSinceAlways);
  [[maybe_unused]] static const auto destroy =
      require_op_api<Destroy>(op, "aclDestroyIntArray", kSinceAlways);
  IntArrayHandle array(create(values.data(), values.size()));
  if (array == nullptr) {
    throw_null(op, "aclCreateIntArray", c10::str(values));
  }
  return array;
}

}  // namespace pacache::npu
