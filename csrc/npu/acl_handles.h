// Who owns what CANN gave us?
//
// aclTensor and aclIntArray are described once, created by CANN and destroyed
// here on every path. A handle belongs to the call that made it: it is moved
// into the call's second phase, which runs on another thread, and destroyed
// there or with the call if that never runs.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>

struct aclTensor;
struct aclIntArray;
struct aclOpExecutor;

namespace pacache::npu {

// Numbers of CANN's aclFormat that are used here.
constexpr int kFormatNd = 2;
constexpr int kFormatFractalNz = 29;

// CANN's number of a dtype, and its name; -1 for one that is not used here.
int acl_dtype(at::ScalarType dtype);
const char* acl_dtype_name(int dtype);

// What CANN is told about a tensor. The address is the view's own, so that
// views of one signature at different places of a storage are alike.
struct TensorDescriptor {
  void* data = nullptr;
  int dtype = 0;
  int format = kFormatNd;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t extent = 0;  // elements from data that belong to it
  bool present = false;

  TensorDescriptor() = default;
  // A tensor as it is. Undefined tensors give an absent descriptor.
  explicit TensorDescriptor(const at::Tensor& t);
};

// A dense tensor of these sizes at data, whatever strides the memory has.
TensorDescriptor dense_descriptor(void* data, at::ScalarType dtype,
                                  at::IntArrayRef sizes);

struct DestroyTensor {
  void operator()(aclTensor* tensor) const;
};
struct DestroyIntArray {
  void operator()(aclIntArray* array) const;
};
struct DestroyExecutor {
  void operator()(aclOpExecutor* executor) const;
};
using TensorHandle = std::unique_ptr<aclTensor, DestroyTensor>;
using IntArrayHandle = std::unique_ptr<aclIntArray, DestroyIntArray>;
// Until phase two takes it over.
using ExecutorHandle = std::unique_ptr<aclOpExecutor, DestroyExecutor>;

// Null for an absent descriptor; RuntimeError when CANN gives none.
TensorHandle make_tensor(const char* op, const TensorDescriptor& descriptor);
IntArrayHandle make_int_array(const char* op, at::IntArrayRef values);

}  // namespace pacache::npu
