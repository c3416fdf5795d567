#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "journal.h"
#include "settings.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace cann_sim {
namespace {

constexpr int kMaxDevices = 16;
constexpr uintptr_t kFirstAddress = 0x120000000000;
constexpr uintptr_t kDeviceSpan = uintptr_t{1} << 40;
// Blocks start on 2 MiB / 64 like real ones on pages; the gap behind a block
// belongs to nobody.
constexpr size_t kAlignment = 4096;
constexpr size_t kGap = 4096;
// Freed bytes stay poisoned until this much was freed after them.
constexpr size_t kPoisonedBytes = size_t{256} << 20;
// Larger blocks are given back to the system instead (they read as zeros).
constexpr size_t kMaxPoisonedBlock = size_t{64} << 20;
// A task that touches more separate ranges than this is not looked at by the
// race detector: it may miss a race, it never invents one.
constexpr size_t kMaxRanges = 100000;

// One access history per byte range of a block.
struct Range {
  uintptr_t end;
  int writer = -1;
  uint64_t write_sequence = 0;
  std::string write_op;
  std::map<int, std::pair<uint64_t, std::string>> readers;
};

struct Block {
  size_t bytes = 0;
  bool live = true;
  std::string module;
  std::map<uintptr_t, Range> history;
};

struct Device {
  uint8_t* backing = nullptr;
  uintptr_t next = 0;
  std::map<uintptr_t, Block> blocks;
  std::deque<std::pair<uintptr_t, size_t>> poisoned;
  size_t poisoned_bytes = 0;
  MemoryUse use;
};

struct Memory {
  std::mutex mutex;
  Device devices[kMaxDevices];
};

Memory& memory() {
  static Memory* instance = new Memory;
  return *instance;
}

uintptr_t base_of(int device) { return kFirstAddress + device * kDeviceSpan; }

bool map_device(Device* d, int device) {
  if (d->backing) return true;
  void* numbers = mmap(
      reinterpret_cast<void*>(base_of(device)), kDeviceSpan, PROT_NONE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  void* bytes = mmap(nullptr, kDeviceSpan, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (numbers != reinterpret_cast<void*>(base_of(device)) ||
      bytes == MAP_FAILED) {
    fprintf(stderr, "cann_sim: cannot reserve address space\n");
    abort();
  }
  d->backing = static_cast<uint8_t*>(bytes);
  d->next = base_of(device);
  return true;
}

uint8_t* backing_of(int device, uintptr_t address) {
  return memory().devices[device].backing + (address - base_of(device));
}

// Block that starts at or before address, or null.
Block* block_before(Device* d, uintptr_t address, uintptr_t* start) {
  auto it = d->blocks.upper_bound(address);
  if (it == d->blocks.begin()) return nullptr;
  --it;
  *start = it->first;
  return &it->second;
}

// Empty when [address, address + bytes) is live; else kind and text.
struct Problem {
  std::string kind;
  std::string text;
};

Problem problem_with(const void* pointer, size_t bytes, int device) {
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  std::string range = format("[%s, +%zu)", hex(pointer).c_str(), bytes);
  if (device < 0) {
    return {"host_pointer", range + " is host memory"};
  }
  Device* d = &memory().devices[device];
  uintptr_t start = 0;
  Block* block = block_before(d, address, &start);
  if (!block || address >= start + block->bytes + (bytes == 0)) {
    return {"out_of_bounds", range + " is in no allocation"};
  }
  if (!block->live) {
    return {
        "use_after_free",
        range + format(" lies in a freed block of %zu bytes", block->bytes)};
  }
  if (address + bytes > start + block->bytes) {
    return {"out_of_bounds",
            range + format(" passes the end of its block of %zu bytes",
                           block->bytes)};
  }
  return {};
}

bool ordered(const Run& run, int stream, uint64_t sequence) {
  if (stream == run.stream_number) return true;
  if (!run.clock) return false;
  auto it = run.clock->find(stream);
  return it != run.clock->end() && it->second >= sequence;
}

std::string party(int stream, const std::string& op) {
  return stream == 0 ? "the host (" + op + ")"
                     : op + format(" on stream %d", stream);
}

// Updates the history of [begin, end); returns the other party of a race.
std::string update_history(Block* block, uintptr_t begin, uintptr_t end,
                           Access access, const Run& run) {
  auto& history = block->history;
  std::string other;
  // Cut the ranges that straddle an end, so that whole ranges remain.
  for (uintptr_t cut : {begin, end}) {
    auto it = history.upper_bound(cut);
    if (it == history.begin()) continue;
    --it;
    if (it->first < cut && it->second.end > cut) {
      Range right = it->second;
      it->second.end = cut;
      history.emplace(cut, std::move(right));
    }
  }
  auto first = history.lower_bound(begin);
  uintptr_t position = begin;
  std::vector<std::pair<uintptr_t, Range>> gaps;
  auto it = first;
  for (; it != history.end() && it->first < end; ++it) {
    Range& r = it->second;
    if (r.writer >= 0 && !ordered(run, r.writer, r.write_sequence)) {
      other = party(r.writer, r.write_op) + " wrote";
    }
    if (access == Access::kWrite) {
      for (auto& reader : r.readers) {
        if (!ordered(run, reader.first, reader.second.first)) {
          other = party(reader.first, reader.second.second) + " read";
        }
      }
    } else {
      if (position < it->first) {
        Range gap;
        gap.end = it->first;
        gap.readers[run.stream_number] = {run.sequence, run.op};
        gaps.emplace_back(position, gap);
      }
      r.readers[run.stream_number] = {run.sequence, run.op};
      position = r.end;
    }
  }
  if (access == Access::kWrite) {
    history.erase(first, it);
    Range r;
    r.end = end;
    r.writer = run.stream_number;
    r.write_sequence = run.sequence;
    r.write_op = run.op;
    history.emplace(begin, std::move(r));
  } else {
    if (position < end) {
      Range gap;
      gap.end = end;
      gap.readers[run.stream_number] = {run.sequence, run.op};
      gaps.emplace_back(position, gap);
    }
    for (auto& gap : gaps) history.emplace(gap.first, std::move(gap.second));
  }
  return other;
}

}  // namespace

bool is_device_pointer(const void* pointer) { return device_of(pointer) >= 0; }

int device_of(const void* pointer) {
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (address < kFirstAddress) return -1;
  uintptr_t device = (address - kFirstAddress) / kDeviceSpan;
  return device < kMaxDevices ? static_cast<int>(device) : -1;
}

void* device_malloc(int device, size_t bytes, const void* caller) {
  if (device < 0 || device >= kMaxDevices || bytes == 0) return nullptr;
  std::string module = module_of(caller);
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  Device* d = &m.devices[device];
  map_device(d, device);
  int64_t limit = settings().memory_bytes;
  if (d->use.live_bytes + static_cast<int64_t>(bytes) > limit) return nullptr;
  size_t step = (bytes + kGap + kAlignment - 1) / kAlignment * kAlignment;
  if (d->next + step > base_of(device) + kDeviceSpan) return nullptr;
  uintptr_t address = d->next;
  d->next += step;
  Block block;
  block.bytes = bytes;
  block.module = module;
  d->blocks.emplace(address, std::move(block));
  d->use.live_bytes += bytes;
  d->use.peak_bytes = std::max(d->use.peak_bytes, d->use.live_bytes);
  ++d->use.live_blocks;
  ++d->use.mallocs;
  return reinterpret_cast<void*>(address);
}

bool device_free(void* pointer) {
  int device = device_of(pointer);
  std::string kind;
  {
    Memory& m = memory();
    std::lock_guard<std::mutex> lock(m.mutex);
    Device* d = device < 0 ? nullptr : &m.devices[device];
    uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    auto it = d ? d->blocks.find(address) : decltype(d->blocks.end()){};
    if (!d) {
      kind = "host_pointer";
    } else if (it == d->blocks.end()) {
      kind = "out_of_bounds";
    } else if (!it->second.live) {
      kind = "use_after_free";
    } else {
      Block& block = it->second;
      block.live = false;
      block.history.clear();
      uint8_t* bytes = backing_of(device, address);
      if (block.bytes <= kMaxPoisonedBlock) {
        memset(bytes, kPoison, block.bytes);
        d->poisoned.emplace_back(address, block.bytes);
        d->poisoned_bytes += block.bytes;
      } else {
        madvise(bytes, block.bytes, MADV_DONTNEED);
      }
      while (d->poisoned_bytes > kPoisonedBytes) {
        auto old = d->poisoned.front();
        d->poisoned.pop_front();
        d->poisoned_bytes -= old.second;
        madvise(backing_of(device, old.first), old.second, MADV_DONTNEED);
      }
      d->use.live_bytes -= block.bytes;
      --d->use.live_blocks;
      ++d->use.frees;
      return true;
    }
  }
  violation(kind, "aclrtFree", hex(pointer) + " is no live allocation");
  return false;
}

uint8_t* peek(const void* pointer, size_t bytes) {
  int device = device_of(pointer);
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (!problem_with(pointer, bytes, device).kind.empty()) return nullptr;
  return backing_of(device, reinterpret_cast<uintptr_t>(pointer));
}

uint8_t* host_view(const void* pointer, size_t bytes, Access access,
                   const Run& run, const std::string& what, bool note) {
  int device = device_of(pointer);
  Problem problem;
  {
    Memory& m = memory();
    std::lock_guard<std::mutex> lock(m.mutex);
    problem = problem_with(pointer, bytes, device);
  }
  if (!problem.kind.empty()) {
    violation(problem.kind, run.op, what + ": " + problem.text);
    return nullptr;
  }
  if (run.device >= 0 && device != run.device) {
    violation("wrong_device", run.op,
              what + format(": memory of device %d in a kernel on device %d",
                            device, run.device));
    return nullptr;
  }
  if (note) note_access(pointer, bytes, access, run);
  return backing_of(device, reinterpret_cast<uintptr_t>(pointer));
}

void note_access(const void* pointer, size_t bytes, Access access,
                 const Run& run) {
  if (!settings().races || bytes == 0) return;
  int device = device_of(pointer);
  if (device < 0) return;
  std::string other;
  {
    Memory& m = memory();
    std::lock_guard<std::mutex> lock(m.mutex);
    uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    uintptr_t start = 0;
    Block* block = block_before(&m.devices[device], address, &start);
    if (!block || !block->live || block->history.size() > kMaxRanges) return;
    other = update_history(block, address, address + bytes, access, run);
  }
  if (other.empty()) return;
  violation(
      "race", run.op,
      format("[%s, +%zu): %s what %s, with no order between them",
             hex(pointer).c_str(), bytes,
             access == Access::kWrite ? "writes" : "reads", other.c_str()));
}

MemoryUse memory_use(int device) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (device < 0 || device >= kMaxDevices) return {};
  return m.devices[device].use;
}

}  // namespace cann_sim
