// kernels/e4m3.h: what an e4m3 code is worth, and the code that a number rounds to. e4m3 ("fn") has
// 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinities, and NaN only as 0x7F and 0xFF.
// The scalar definition: every backend's codes equal these bit for bit.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/host_device.h"

namespace fp8kvd::kernels {

inline constexpr uint8_t kE4m3Largest = 0x7E;  // 448
inline constexpr uint8_t kE4m3Nan = 0x7F;

// Exact. NaN for 0x7F and 0xFF.
FP8KVD_HOST_DEVICE constexpr float E4m3Value(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80U) << 24;
  const uint32_t magnitude = code & 0x7FU;
  if (magnitude == kE4m3Nan) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (magnitude < 8) {  // subnormal: magnitude * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + ((127U - 7U) << 23)));
}

// Round to nearest, ties to the even code, saturating: beyond 448 the code is 448's. NaN gives NaN.
FP8KVD_HOST_DEVICE constexpr uint8_t E4m3Encode(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<uint8_t>(sign | kE4m3Nan);
  uint32_t code = 0;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6F)) {
    // One unit in the last place of [2^14, 2^15) is 2^-9, a subnormal code's step: the sum rounds.
    const float sum = std::bit_cast<float>(magnitude) + 0x1p14F;
    code = std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0x1p14F);
  } else {
    const uint32_t rounded = magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U);
    code = (rounded >> 20) - ((127U - 7U) << 3);
  }
  return static_cast<uint8_t>(sign | (code < kE4m3Largest ? code : kE4m3Largest));
}

// Two codes in the upper bytes of two 16-bit halves, moved to where f16 has its exponent and
// mantissa: each half is an f16 worth 2^-kE4m3InF16Exponent of its code, subnormals included.
inline constexpr int32_t kE4m3InF16Exponent = 8;
FP8KVD_HOST_DEVICE constexpr uint32_t E4m3PairInF16(uint32_t upper_bytes) {
  return (upper_bytes & 0x80008000U) | ((upper_bytes >> 1) & 0x3F803F80U);
}

}  // namespace fp8kvd::kernels
