// The mean of a window of tokens: a float32 sum in token order, one division,
// one rounding (ties to even).

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace pacache::cpu {

// Channel d of out is the mean of channel d of `count` tokens, token_stride
// bytes apart. dtype is float16, bfloat16 or float32. Every instruction set
// gives the same bits: channels are independent, tokens are added one after
// the other. (Of a mean that is not a number only that it is none is told.)
// `sum` is scratch, kept by the caller between calls.
void window_mean(at::ScalarType dtype, char* out, const char* tokens,
                 int64_t token_stride, int64_t count, int64_t channels,
                 std::vector<float>& sum);

}  // namespace pacache::cpu
