// kernels/bf16.h: bf16 to fp32 and back, one value at a time. bf16 is the upper half of an fp32.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/host_device.h"

namespace fp8kvd::kernels {

FP8KVD_HOST_DEVICE constexpr float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; what is beyond the largest finite bf16 becomes infinite, NaN stays NaN.
FP8KVD_HOST_DEVICE constexpr uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace fp8kvd::kernels
