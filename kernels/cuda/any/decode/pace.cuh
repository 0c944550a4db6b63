// kernels/cuda/any/decode/pace.cuh: keeps the warps of a launch together (decision 0023). The
// memory serves some multiprocessors faster than others. A warp that gets ahead of the launch's
// mean keeps fewer units under way until it no longer is, so that the slow ones get more. Only
// speed depends on it.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/registers.cuh"
#include "kernels/cuda/any/ptx.cuh"
#include "kernels/cuda/decode_work.h"

namespace fp8kvd::kernels::cuda {

// For warps that are not kept together: sets out a unit for each one done.
struct NoPace {
  static constexpr bool kIsOn = false;
};

// In shared memory.
struct PaceTerms {
  float units_each;  // that the mean warp has done, for each check counted
  float lead;        // units that a warp may be ahead of what it knows of the mean
  uint32_t last;     // DecodeArgs::progress counts up to here and then is 0 again
  int32_t fewer;     // units under way of a warp that is ahead
  uint32_t checks;   // of this CTA's first warp
  uint4 seen[1];     // [warps]: .x is the progress that the warp saw last; copies of 16 bytes

  static constexpr int32_t Bytes(int32_t warps) { return 16 * (2 + warps); }
};

class Pace {
 public:
  static constexpr bool kIsOn = true;

  // Keeps to no plan as yet.
  __device__ __forceinline__ Pace(uint32_t* progress, PaceTerms& terms)
      : progress_(progress), terms_(terms), mask_(kNoPace.every - 1) {}

  // All threads of the CTA call it, with a barrier before the first unit is done. stages: of the
  // ring, at least 3: beside the unit in work one stays under way.
  __device__ __forceinline__ void Keep(const PacePlan& plan, int32_t stages) {
    mask_ = plan.every - 1;
    if (plan.every == kNoPace.every) return;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread % kWarpLanes == 0) terms_.seen[thread / kWarpLanes].x = 0;
    if (thread != 0) return;
    const auto every = static_cast<float>(plan.every);
    terms_.units_each = every / static_cast<float>(plan.ctas);
    // A check knows what was counted at the one before.
    terms_.lead = every;
    terms_.fewer = min(plan.fewer, stages - 2);
    terms_.last = static_cast<uint32_t>(plan.checks) - 1U;
    terms_.checks = static_cast<uint32_t>(plan.ChecksOf(static_cast<int32_t>(blockIdx.x)));
  }

  // After the last unit. A first warp counts as often as was planned, whatever it had: less than
  // planned where pairs cost something, less or more where items are cut.
  __device__ __forceinline__ void CountTheRest() {
    if (threadIdx.x != 0 || mask_ == kNoPace.every - 1) return;
    for (uint32_t i = Checks(); i < terms_.checks; ++i) CountUpTo(progress_, terms_.last);
  }

  // All lanes call it after each unit. How many units to set out now.
  __device__ __forceinline__ int32_t UnitDone() {
    ++done_;
    if ((done_ & mask_) == 0) wanted_ = Check();
    if (wanted_ > fewer_) {
      ++fewer_;
      return 0;
    }
    const int32_t count = 1 + fewer_ - wanted_;
    fewer_ = wanted_;
    return count;
  }

 private:
  __device__ __forceinline__ uint32_t Checks() const {
    return static_cast<uint32_t>(done_ / (mask_ + 1));
  }

  // The first warp of each CTA counts for it; all look. How many units fewer are to be under way.
  __device__ __forceinline__ int32_t Check() {
    int32_t fewer = 0;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread % kWarpLanes == 0) {
      uint4& seen = terms_.seen[thread / kWarpLanes];
      WaitForCopies();  // of the check before
      const float mean = terms_.units_each * static_cast<float>(seen.x);
      if (static_cast<float>(done_) > mean + terms_.lead) fewer = terms_.fewer;
      if (thread == 0 && Checks() <= terms_.checks) CountUpTo(progress_, terms_.last);
      CopyAsyncPastL1(&seen, progress_);
    }
    return __shfl_sync(kAllLanes, fewer, 0);
  }

  uint32_t* const progress_;
  PaceTerms& terms_;
  int32_t mask_;
  int32_t done_ = 0;
  int32_t fewer_ = 0;   // units under way than stages
  int32_t wanted_ = 0;  // what that is to be
};

template <class Kind>
__device__ __forceinline__ Kind MakePace(uint32_t* progress, PaceTerms& terms) {
  if constexpr (Kind::kIsOn) {
    return Kind(progress, terms);
  } else {
    return Kind();
  }
}

}  // namespace fp8kvd::kernels::cuda
