// tests/kernels/bf16_values.h: rows written as numbers, for the kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/bf16.h"

namespace fp8kvd::kernels {

inline std::vector<uint16_t> Bf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) bits.push_back(FloatToBf16(value));
  return bits;
}

}  // namespace fp8kvd::kernels
