// The kernel behind AtbPagedCacheLoad and aclnnGatherPaKvCache.
#pragma once

#include "nn_executor.h"

namespace cann_sim {

// Numbers of the arguments in Call::tensors; starts is -1 when absent.
struct PagedLoad {
  int key_cache = 0;
  int value_cache = 1;
  int tables = 2;
  int lengths = 3;
  int key = 4;
  int value = 5;
  int starts = -1;
  bool nz = false;
  bool cumulative = false;
};

// Nothing is checked before the copy, as in the real kernels: every access
// that leaves a tensor is a violation and is not made.
void run_paged_load(const PagedLoad& plan, const Call& call);

}  // namespace cann_sim
