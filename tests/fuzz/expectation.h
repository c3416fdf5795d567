// What a call must leave in memory: plain loops over elements, written from
// the operators' definition and not from their kernels.

#pragma once

#include "call.h"

namespace pacache::testing {

struct Expectation {
  // Every element that the call names lies in its storage, and every index in
  // its tensor. A call that is accepted must fit.
  bool fits = true;
  // Some byte is written twice: defined in deterministic mode only.
  bool repeated = false;
  // More work than is worth doing; nothing else is known then.
  bool too_long = false;
  Memory memory;
  // Elements that hold the mean of a window: storage, first byte, dtype. If
  // one is no number, which is left open.
  struct Mean {
    size_t storage;
    int64_t byte;
    at::ScalarType dtype;
  };
  std::vector<Mean> means;
};

Expectation expect(const Call& call);

// Does an element hold a float that is no number?
bool is_nan(const uint8_t* element, at::ScalarType dtype);

}  // namespace pacache::testing
