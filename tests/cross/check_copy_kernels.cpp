// Do this processor's copy kernels give what loops over bytes give?
// Built and run by run.py for a processor that is not at hand.

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/copy_kernels.h"

namespace {

using Bytes = std::vector<char>;

Bytes noise(size_t n) {
  static std::mt19937 generator(7);
  Bytes bytes(n);
  for (char& byte : bytes) {
    byte = static_cast<char>(generator());
  }
  return bytes;
}

int failures = 0;

void expect(bool holds, const char* what, int64_t size, int64_t shift) {
  if (!holds) {
    std::printf("%s: differs at size %ld, shift %ld\n", what,
                static_cast<long>(size), static_cast<long>(shift));
    ++failures;
  }
}

void check_runs(const pacache::cpu::CopyKernels& kernels) {
  for (int64_t size : {1, 31, 32, 63, 64, 127, 128, 200, 257, 2048, 4099}) {
    for (int64_t shift : {0, 1, 32, 63}) {
      const Bytes src = noise(size + 64);
      for (bool stream : {false, true}) {
        Bytes dst = noise(size + 192);
        Bytes wanted = dst;
        std::memcpy(wanted.data() + shift, src.data() + 3, size);
        (stream ? kernels.stream : kernels.copy)(dst.data() + shift,
                                                 src.data() + 3, size);
        kernels.fence();
        expect(dst == wanted, stream ? "stream" : "copy", size, shift);
      }
    }
  }
}

void check_units(const pacache::cpu::CopyKernels& kernels) {
  constexpr int64_t unit = pacache::cpu::kNzUnit;
  constexpr int64_t positions = 37;
  for (int64_t units : {1, 2, 5, 64}) {
    for (int64_t tokens = 1; tokens <= pacache::cpu::kTileTokens; ++tokens) {
      for (int64_t first : {0, 1, 4}) {
        const Bytes dense = noise(tokens * units * unit);
        Bytes paged = noise(units * positions * unit);
        Bytes wanted = paged;
        std::vector<char*> to(tokens);
        std::vector<const char*> from(tokens);
        for (int64_t t = 0; t < tokens; ++t) {
          to[t] = paged.data() + (first + t) * unit;
          from[t] = dense.data() + t * units * unit;
          for (int64_t u = 0; u < units; ++u) {
            std::memcpy(wanted.data() + (u * positions + first + t) * unit,
                        from[t] + u * unit, unit);
          }
        }
        kernels.scatter_units(to.data(), positions * unit, from.data(), tokens,
                              units, false);
        expect(paged == wanted, "scatter_units", units, tokens);
        Bytes back(dense.size());
        kernels.gather_units(back.data(), units * unit,
                             paged.data() + first * unit, unit,
                             positions * unit, tokens, units, false);
        expect(back == dense, "gather_units", units, tokens);
      }
    }
  }
}

}  // namespace

int main() {
  const auto& kernels = pacache::cpu::copy_kernels();
  check_runs(kernels);
  check_units(kernels);
  std::printf("%s kernels: %d differences\n", kernels.name, failures);
  return failures == 0 ? 0 : 1;
}
