#include "tensor_rules.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

namespace pacache {
namespace {

const char* layout_name(at::Layout layout) {
  switch (layout) {
    case at::kStrided:
      return "strided";
    case at::kSparse:
      return "sparse_coo";
    case at::kSparseCsr:
      return "sparse_csr";
    case at::kSparseCsc:
      return "sparse_csc";
    case at::kSparseBsr:
      return "sparse_bsr";
    case at::kSparseBsc:
      return "sparse_bsc";
    case at::kMkldnn:
      return "_mkldnn";
    case at::kJagged:
      return "jagged";
    default:
      return "unknown";
  }
}

bool is_copy_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kChar:
    case at::kByte:
    case at::kShort:
    case at::kUInt16:
    case at::kInt:
    case at::kUInt32:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

bool sizes_can_be_multiplied(const at::Tensor& t) {
  constexpr int64_t kLimit = int64_t{1} << 62;
  int64_t bytes = t.element_size();
  if (t.numel() > 0) {
    return t.numel() < kLimit / bytes;  // torch has multiplied them
  }
  for (const int64_t size : t.sizes()) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes) ||
        bytes >= kLimit) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

void check_tensors(const char* op, std::initializer_list<NamedTensor> tensors) {
  const NamedTensor lead = *tensors.begin();
  const at::Device device = lead.tensor->device();
  for (const auto& [name, t] : tensors) {
    if (t == nullptr) {
      continue;
    }
    TORCH_CHECK_VALUE(t->layout() == at::kStrided, op, ": ", name,
                      " must be a strided tensor, got layout ",
                      layout_name(t->layout()));
    TORCH_CHECK_VALUE(t->device() == device, op, ": ", name, " must be on ",
                      device, " as ", lead.name, ", got ", t->device());
    TORCH_CHECK(!(t->requires_grad() && at::GradMode::is_enabled()), op, ": ",
                name,
                " must not require grad while grad mode is on (the op has no "
                "backward; use torch.no_grad() or detach()), got "
                "requires_grad=True");
    TORCH_CHECK_VALUE(sizes_can_be_multiplied(*t), op, ": ", name,
                      " must have sizes, each taken as 1 at least, of less "
                      "than 2^62 bytes, got ",
                      t->sizes());
  }
}

void check_copy_dtype(const char* op, NamedTensor t) {
  TORCH_CHECK_TYPE(is_copy_dtype(t.tensor->scalar_type()), op, ": ", t.name,
                   " must have a 1-, 2- or 4-byte dtype, got ",
                   dtype_name(t.tensor->scalar_type()));
}

void check_same_dtype(const char* op, NamedTensor t, NamedTensor as,
                      const char* why) {
  TORCH_CHECK_TYPE(t.tensor->scalar_type() == as.tensor->scalar_type(), op,
                   ": ", t.name, " must have dtype ",
                   dtype_name(as.tensor->scalar_type()), " as ", as.name, why,
                   ", got ", dtype_name(t.tensor->scalar_type()));
}

void check_index_dtype(const char* op, NamedTensor t) {
  if (t.tensor == nullptr) {
    return;
  }
  const at::ScalarType dtype = t.tensor->scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kInt || dtype == at::kLong, op, ": ", t.name,
                   " must be int32 or int64, got ", dtype_name(dtype));
}

void check_dense_last_dim(const char* op, NamedTensor t) {
  TORCH_CHECK_VALUE(
      t.tensor->size(-1) <= 1 || t.tensor->stride(-1) == 1, op, ": ", t.name,
      " must have a dense last dimension (stride 1), got strides ",
      t.tensor->strides());
}

bool has_shape(const at::Tensor& t, int64_t rank,
               std::initializer_list<std::pair<int64_t, int64_t>> dims) {
  if (t.dim() != rank) {
    return false;
  }
  for (const auto& [dim, size] : dims) {
    if (t.size(dim) != size) {
      return false;
    }
  }
  return true;
}

}  // namespace pacache
