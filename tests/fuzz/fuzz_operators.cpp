// The entry point of libFuzzer: see check.h.

#include <cstddef>
#include <cstdint>

#include "check.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  pacache::testing::prepare();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // What makes no call is not worth keeping.
  return pacache::testing::check(data, size) ==
                 pacache::testing::Outcome::kNoCall
             ? -1
             : 0;
}
