// Inputs in the form that device kernels read: dense, indices as int32.
// Caches and outputs are never copied: a call that would need it is refused.

#pragma once

#include <ATen/core/Tensor.h>

#include "../tensor_rules.h"

namespace pacache::npu {

// Indices as dense int32; the same tensor when it is that already.
at::Tensor as_int32(const at::Tensor& index);
at::Tensor as_int32(const OptionalTensor& index);  // undefined for none

// Slots as dense int32. A negative one stays negative, however long it was.
at::Tensor as_int32_slots(const at::Tensor& slots);

// As as_int32, at an address that is a multiple of 32 bytes, as ATB takes it.
at::Tensor as_aligned_int32(const at::Tensor& index);
at::Tensor as_aligned_int32(const OptionalTensor& index);

// An NZ cache in the 4-D form [num_blocks, units, block_size, unit]; a dense
// 5-D cache is the same memory.
at::Tensor as_4d_nz(const at::Tensor& cache);

// Index tensors on the host, for PACACHE_CHECK=1 (waits for the device).
at::Tensor on_host(const at::Tensor& index);

// Is PACACHE_CHECK=1?
bool check_values_enabled();

}  // namespace pacache::npu
