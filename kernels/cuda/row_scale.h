// kernels/cuda/row_scale.h: a row's scale, and its values over the scale, without a division each.
// The codes that follow are those of the exact rule (kernels/reference/append.h) for every finite
// row: tests/kernels/cuda/row_scale_test.cc goes through all of them.
//
// Why no division. code = e4m3(fl(x / s)), s = fl(amax / 448). With y within three ulps of 1 / s
// and rest = y * fma(-s, y, 1), fma(x, y, fl(x * rest)) is x / s times 1 + e, |e| < 2^-42, rounded
// once. So it can differ from fl(x / s) by an ulp, and code by that only if x / s is within 2^-42
// of a number h where the code changes: a middle m of two codes, or m plus or minus half an ulp,
// from where fl() gives m. No x / s is that near to an h and not equal to it on both ways: with
// whole numbers X < 2^8, S < 2^24, M < 2^5 for the digits of x, s and m, h = M 2^20 + i, i in
// {-1, 0, 1}, nearness asks for |X 2^p - S (M 2^20 + i)| < 2^8 with p > 40. Then S i = d modulo
// 2^20 with |d| < 2^8. For i = 0 the whole is a multiple of 2^20: 0, and both ways give m. Else
// S = k 2^20 + d' with |d'| < 2^8 and 8 <= k < 16, and the rest, (d' M + i k) 2^20, has to be a
// multiple of 2^40, which |d' M + i k| < 2^14 is only as 0; d' M = -i k has no answer but d' = 0
// and k = 0. (A subnormal code's m has fewer digits: the same with a smaller M.)
//
// Range. Rows whose amax is beyond 2^-60 ... 2^60 are first taken there, exactly, by a power of
// two.
#pragma once

#include <cmath>
#include <cstdint>

#include "config/base/limits.h"
#include "kernels/e4m3.h"
#include "kernels/host_device.h"

namespace fp8kvd::kernels::cuda {

inline constexpr float kE4m3MaxInverse = 1.0F / kE4m3Max;

struct RowScale {
  float scale;    // of the row
  float inverse;  // y above, of the scaled row
  float rest;
};

// What a row is multiplied by first: 1 for all that attention takes.
FP8KVD_HOST_DEVICE inline float PreFactor(float amax) {
  if (amax < 0x1p-60F) return 0x1p100F;
  return amax > 0x1p60F ? 0x1p-64F : 1.0F;
}

// amax / 448, rounded once, for every finite amax: a product that is an ulp off at most, set right
// by its remainder. (The remainder is exact; no amax of 8 digits over 7 is near the middle of two
// floats, subnormal ones included, where the last rounding could go wrong.)
FP8KVD_HOST_DEVICE inline float OverE4m3Max(float amax) {
  const float near = amax * kE4m3MaxInverse;
  return fmaf(fmaf(-kE4m3Max, near, amax), kE4m3MaxInverse, near);
}

// y: below 1 / scale by three ulps at most. Below, so that rest is positive and the sign of a zero
// stays.
FP8KVD_HOST_DEVICE inline RowScale RowScaleFrom(float scale, float y) {
  return {scale, y, fmaf(-scale, y, 1.0F) * y};
}

FP8KVD_HOST_DEVICE inline float Quotient(float x, const RowScale& row) {
  return fmaf(x, row.inverse, x * row.rest);
}

}  // namespace fp8kvd::kernels::cuda
