// libnnopbase: the value objects that are handed to aclnn operators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cann_sim {

// What aclCreateTensor was told. Element (i0, i1, ...) of the view lies at
// data + (offset + sum(i * strides)) * itemsize.
struct TensorInfo {
  std::vector<int64_t> dims;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  int data_type = 0;
  int format = 0;
  std::vector<int64_t> storage_dims;
  void* data = nullptr;
  std::string name;  // of the argument, once in an executor

  int64_t rank() const { return static_cast<int64_t>(dims.size()); }
  int64_t numel() const;
  int64_t itemsize() const;
  // Bytes from data that the declared storage holds.
  int64_t storage_bytes() const;
  bool contiguous() const;
  // Address of the view's first element.
  char* first() const;
};

int64_t itemsize_of(int data_type);
const char* data_type_name(int data_type);
bool is_floating(int data_type);

std::string numbers_json(const std::vector<int64_t>& numbers);
// JSON object of a descriptor; the data pointer is left out on request, so
// that equal signatures give equal text.
std::string tensor_json(const TensorInfo& tensor, bool with_data);

// A number with its type.
struct ScalarInfo {
  int data_type = 0;
  double real = 0;
  int64_t integer = 0;
};

}  // namespace cann_sim

struct aclTensor {
  cann_sim::TensorInfo info;
};
struct aclScalar {
  cann_sim::ScalarInfo info;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> items;
};
struct aclScalarList {
  std::vector<const aclScalar*> items;
};
