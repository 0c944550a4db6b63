// kernels/cuda/any/expand.cuh: a word of four codes as page_layout.h mixes them, made into two
// registers of two bf16 each, worth the codes times 2^-kCodeExponent. e4m3 has 4 exponent and 3
// mantissa bits; put where bf16 has its 4 lower exponent and 3 upper mantissa bits, they are the
// same number with another bias (127 - 7 = 120), subnormals included. No conversion instruction is
// fast enough to keep up with the memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/page_layout.h"

namespace fp8kvd::kernels::cuda {

__device__ __forceinline__ uint32_t ExpandA(uint32_t word) {
  return word & (kHalfMaskA * 0x10001U);
}

__device__ __forceinline__ uint32_t ExpandB(uint32_t word) {
  constexpr uint32_t kSignAndLow = 0x80F080F0U;  // from bits 11 and 3..0
  constexpr uint32_t kHigh = 0x07000700U;        // from bits 14..12
  return ((word << 4) & kSignAndLow) | ((word >> 4) & kHigh);
}

}  // namespace fp8kvd::kernels::cuda
