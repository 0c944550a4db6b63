// kernels/cpu/targets.h: the instruction sets that kernels/cpu is compiled for; the first of
// Highway's headers that a file here includes. On x86: AVX-512 (AVX3), AVX2, and portable code
// (SCALAR) for what is older. Sizeless vectors (SVE, RVV) are left out: the kernels hold arrays of
// vectors.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// Portable code is SCALAR with every compiler; emulated vectors take minutes to compile
// instrumented.
#define HWY_BROKEN_EMU128 1

#include <hwy/targets.h>
