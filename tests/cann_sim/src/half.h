// float16 and bfloat16 as bit patterns; rounding to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace cann_sim {

inline float bits_to_float(uint32_t bits) {
  float out;
  memcpy(&out, &bits, sizeof(out));
  return out;
}

inline uint32_t float_to_bits(float value) {
  uint32_t out;
  memcpy(&out, &value, sizeof(out));
  return out;
}

inline float bfloat16_to_float(uint16_t bits) {
  return bits_to_float(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;  // NaN
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t bits) {
  uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  uint32_t exponent = (bits >> 10) & 0x1F;
  uint32_t mantissa = bits & 0x3FF;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000 | mantissa << 13);
  if (exponent) {
    return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  }
  // Zero or subnormal: mantissa * 2^-24, exact in float.
  float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits = float_to_bits(value);
  uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;   // NaN
  if (magnitude >= 0x47800000) return sign | 0x7C00;  // 65536 and more
  if (magnitude >= 0x38800000) {
    // Normal: drop 13 bits of the mantissa; a carry moves the exponent.
    uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
  }
  if (magnitude < 0x33000000) return sign;  // below half of 2^-24
  // Subnormal: the mantissa with its leading one, shifted to units of 2^-24.
  uint32_t shift = 126 - (magnitude >> 23);
  uint32_t full = (magnitude & 0x7FFFFF) | 0x800000;
  uint32_t unit = full >> shift;
  uint32_t rest = full & ((1u << shift) - 1);
  uint32_t half_unit = 1u << (shift - 1);
  if (rest > half_unit || (rest == half_unit && (unit & 1))) ++unit;
  return static_cast<uint16_t>(sign | unit);
}

}  // namespace cann_sim
