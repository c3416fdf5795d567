// When does a call store past the processor's cache?
//
// A plain store to a line that is not cached reads the line first, a
// non-temporal one does not. It pays where the line would not have been cached
// or would not stay so, and costs twice a plain store where it would. The
// figures are of measurements with 1 MiB of L2 and 32 MiB of L3 a core; they
// are not sensitive.

#pragma once

#include <cstdint>

namespace pacache::cpu {

// Bytes written by a thread that push one another out: runs of kLongRun or
// more are prefetched well and stay cheap longer.
constexpr int64_t kStreamLongRuns = int64_t{12} << 20;
constexpr int64_t kStreamShortRuns = int64_t{4} << 20;
constexpr int64_t kLongRun = int64_t{16} << 10;
// Of a paged cache this big, the few rows that a call writes were last seen
// long ago. Reading its lines to overwrite them is what a decoding step would
// wait for.
constexpr int64_t kColdMemory = int64_t{128} << 20;

class PastCache {
 public:
  // memory: bytes that the written rows are scattered over.
  PastCache(int64_t bytes, int64_t threads, int64_t memory)
      : long_runs_(memory >= kColdMemory || bytes / threads >= kStreamLongRuns),
        short_runs_(long_runs_ || bytes / threads >= kStreamShortRuns) {}

  bool run_of(int64_t bytes) const {
    return bytes >= kLongRun ? long_runs_ : short_runs_;
  }
  bool any() const { return short_runs_; }

 private:
  bool long_runs_;
  bool short_runs_;
};

}  // namespace pacache::cpu
