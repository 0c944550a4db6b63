// kernels/cuda/any/expand.cuh: a word of four codes as page_layout.h orders them, made into two
// registers of two f16 each, worth the codes: e4m3 is a subset of f16.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "kernels/e4m3.h"

namespace fp8kvd::kernels::cuda {

// The word's first two codes, and its last two.
struct Expanded {
  uint32_t first;
  uint32_t last;
};

__device__ __forceinline__ Expanded Expand(uint32_t word) {
#if __CUDA_ARCH__ >= 890
  Expanded x;
  asm("{.reg .b16 first, last; mov.b32 {first, last}, %2; cvt.rn.f16x2.e4m3x2 %0, first; "
      "cvt.rn.f16x2.e4m3x2 %1, last;}"
      : "=r"(x.first), "=r"(x.last)
      : "r"(word));
  return x;
#else
  const auto expand = [](uint32_t upper_bytes) {
    const uint32_t moved = E4m3PairInF16(upper_bytes);
    const __half2 codes = __hmul2(*reinterpret_cast<const __half2*>(&moved),
                                  __float2half2_rn(1 << kE4m3InF16Exponent));
    return *reinterpret_cast<const uint32_t*>(&codes);
  };
  return {expand(__byte_perm(word, 0, 0x1404)), expand(__byte_perm(word, 0, 0x3424))};
#endif
}

}  // namespace fp8kvd::kernels::cuda
