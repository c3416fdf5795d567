// The kernels behind aclnnScatterPaKvCache and ATB's ReshapeAndCache: what a
// first phase decides and they need.
#pragma once

#include <cstdint>
#include <string>

#include "nn_executor.h"

namespace cann_sim {

enum class ScatterMode {
  kNz,
  kNorm,
  kNct,
  kSiso,
  kSisoNct,
  kAlibi,
  kRope,
  kOmni,
  kNhsd,
};

// Numbers of the arguments in Call::tensors, -1 for absent ones.
struct ScatterTensors {
  int key = -1;
  int key_cache = -1;
  int slots = -1;
  int value = -1;
  int value_cache = -1;
  int compress_lens = -1;
  int compress_offsets = -1;
  int seq_lens = -1;
};

struct ScatterPlan {
  ScatterMode mode = ScatterMode::kNorm;
  int version = 0;
  ScatterTensors t;
  int64_t strides[2] = {1, 1};
  int64_t offsets[2] = {0, 0};
  // 9.1.0: strided tensors are made dense before and copied back after.
  bool make_dense = false;

  bool compressed() const {
    return mode == ScatterMode::kAlibi || mode == ScatterMode::kRope ||
           mode == ScatterMode::kOmni;
  }
  bool key_only() const {
    return mode == ScatterMode::kSiso || mode == ScatterMode::kSisoNct;
  }
};

void run_scatter(const ScatterPlan& plan, const Call& call);

}  // namespace cann_sim
