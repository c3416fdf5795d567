// One call from bytes: it is made, and what it did is held against what it had
// to do. Anything else ends the process.

#pragma once

#include <cstddef>
#include <cstdint>

namespace pacache::testing {

enum class Outcome { kNoCall, kRefused, kDone };

// Loads the operators; once, before any call.
void prepare();

// `on_threads`: the shares of a call run on threads of their own, and only
// calls of the given determinism are made: the switch is the process's.
Outcome check(const uint8_t* data, size_t size);
Outcome check_on_threads(const uint8_t* data, size_t size, bool deterministic);

}  // namespace pacache::testing
