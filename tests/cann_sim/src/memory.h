// Device memory.
//
// A device address is a number in a range that is mapped without any access
// right, so host code that follows one crashes, as it would with an NPU. The
// bytes live in a second mapping at a fixed distance; only host_view() leads
// there, and it checks that the whole range lies in one live allocation.
// Addresses are handed out once and never again, so a stale pointer can
// always be told from a fresh one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "stream.h"

namespace cann_sim {

enum class Access { kRead, kWrite };

constexpr uint8_t kPoison = 0xDB;

// Null when the device is full or unknown.
void* device_malloc(int device, size_t bytes, const void* caller);

// Poisons the block and retires its address. False with a violation when
// pointer is not the start of a live block.
bool device_free(void* pointer);

bool is_device_pointer(const void* pointer);

// Device of a pointer, -1 for a host pointer.
int device_of(const void* pointer);

// Host address of [pointer, pointer + bytes), or null after recording why
// not: host_pointer, use_after_free, out_of_bounds or wrong_device. `run`
// says which operator on which stream asks; without one (a blocking copy)
// the host does. Feeds the race detector when note is set.
uint8_t* host_view(const void* pointer, size_t bytes, Access access,
                   const Run& run, const std::string& what, bool note = true);

// As host_view without the race detector and without recording anything.
uint8_t* peek(const void* pointer, size_t bytes);

// Note for the race detector that run touched the range.
void note_access(const void* pointer, size_t bytes, Access access,
                 const Run& run);

struct MemoryUse {
  int64_t live_bytes = 0;
  int64_t live_blocks = 0;
  int64_t peak_bytes = 0;
  int64_t mallocs = 0;
  int64_t frees = 0;
};
MemoryUse memory_use(int device);

}  // namespace cann_sim
