// Descriptors of the old aclop path. Inputs are dense in their dims.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cann_sim {

struct AclopTensorDesc {
  int data_type;
  int format;
  std::vector<int64_t> dims;
  std::string name;
};

struct AclopDataBuffer {
  void* data;
  size_t bytes;
};

}  // namespace cann_sim
