// What is decided or made at first use, and how is it made ahead of it?

#pragma once

#include <c10/core/Device.h>

namespace pacache::npu {

// The device operator behind paged_cache_load.
enum class LoadBackend { kAtb, kSibling };

// PACACHE_LOAD_BACKEND = atb | aclnn | auto (default: ATB where it is there,
// else aclnnGatherPaKvCache). Decided once per process.
LoadBackend load_backend();

// Resolve the functions and, for ATB, make the context of the queue's thread,
// so that a later graph capture does neither.
void warm_up_scatter();
void warm_up_load(const c10::Device& device);

}  // namespace pacache::npu
