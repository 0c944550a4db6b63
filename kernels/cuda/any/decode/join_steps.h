// kernels/cuda/any/decode/join_steps.h: which CTA joins which pieces of a pair that CTAs share. The
// last one joins them all, unless they are so many that it would take long over them: then each
// kStepCtas-th CTA joins its own with those before it (a step), and the last one joins these and
// what came after them. Each CTA waits for CTAs of lower numbers alone. For the kernels and for
// tests.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode_work.h"

namespace fp8kvd::kernels::cuda {

inline constexpr int32_t kStepCtas = 8;

// Whether pieces join in steps: those of two steps or more that may not all fit the shared memory
// of a CTA, which holds `fit`, where a step does. units: of the pair, of which each of its CTAs has
// `share` at most, so that there may be one CTA more than shares. The same for all of them.
FP8KVD_HOST_DEVICE constexpr bool JoinsInSteps(int32_t units, int32_t share, int32_t fit) {
  const int32_t at_once = fit > 2 * kStepCtas ? fit : 2 * kStepCtas;
  return fit >= kStepCtas && units > int64_t{at_once - 1} * share;
}

// before: CTAs of the pair before this one.
FP8KVD_HOST_DEVICE constexpr bool EndsStep(int32_t before) {
  return before % kStepCtas == kStepCtas - 1;
}

// The pieces that a CTA joins, each by how many CTAs of the pair are before the one that left it;
// the CTA's own comes last. One after the other:
struct PiecesInLine {
  int32_t first;
  int32_t count;

  FP8KVD_HOST_DEVICE constexpr int32_t At(int32_t i) const { return first + i; }
};

FP8KVD_HOST_DEVICE constexpr PiecesInLine PiecesOfStep(int32_t before) {
  return {before + 1 - kStepCtas, kStepCtas};
}

// Those of all steps that end before the pair's last CTA, then one after the other.
struct PiecesOfSteps {
  int32_t steps;
  int32_t count;

  FP8KVD_HOST_DEVICE constexpr int32_t At(int32_t i) const {
    return i < steps ? kStepCtas * (i + 1) - 1 : (kStepCtas - 1) * steps + i;
  }
};

FP8KVD_HOST_DEVICE constexpr PiecesOfSteps PiecesAfterSteps(int32_t before) {
  const int32_t steps = FloorDiv(before, kStepCtas);
  return {steps, before + 1 - (kStepCtas - 1) * steps};
}

}  // namespace fp8kvd::kernels::cuda
