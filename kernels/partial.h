// kernels/partial.h: joining softmax results that were taken over different keys of one query.
//
// Over a set of keys with scores s_t and values v_t, a denominator is
//     max = max s_t,   sum = sum exp(s_t - max),   lse = max + ln(sum)
// and the output o is either the raw sum of exp(s_t - max) v_t or that divided by sum. Both merge:
//     raw:         o = weight_a o_a + weight_b o_b, over the merged max
//     normalised:  o = (weight_a o_a + weight_b o_b) / sum, from Merge(FromLse(a), FromLse(b))
// The empty set has max = -inf and merges as nothing; two empty sets give the empty set, never NaN.
// A sink is a key whose value is zero: FromLse(sink_logit).
#pragma once

#include <cmath>
#include <limits>

#include "kernels/host_device.h"

namespace fp8kvd::kernels {

struct Denominator {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;
};

FP8KVD_HOST_DEVICE inline bool IsEmpty(Denominator d) {
  return d.max == -std::numeric_limits<float>::infinity();
}

FP8KVD_HOST_DEVICE inline Denominator FromLse(float lse) { return {lse, 1.0F}; }

// Natural log; -inf of the empty set.
FP8KVD_HOST_DEVICE inline float Lse(Denominator d) {
  return IsEmpty(d) ? d.max : d.max + std::log(d.sum);
}

struct MergedDenominator {
  Denominator both;
  float weight_a;  // of a's raw output in the merged one; 0 where a is empty
  float weight_b;
};

FP8KVD_HOST_DEVICE inline MergedDenominator Merge(Denominator a, Denominator b) {
  if (IsEmpty(a) && IsEmpty(b)) return {Denominator{}, 0.0F, 0.0F};
  const float max = a.max < b.max ? b.max : a.max;
  const float weight_a = IsEmpty(a) ? 0.0F : std::exp(a.max - max);
  const float weight_b = IsEmpty(b) ? 0.0F : std::exp(b.max - max);
  return {{max, weight_a * a.sum + weight_b * b.sum}, weight_a, weight_b};
}

}  // namespace fp8kvd::kernels
