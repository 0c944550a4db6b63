// kernels/cuda/any/decode/pipeline.cuh: a worker's own ring of units in shared memory: a warp's, or
// one that a warpgroup's warps count alike. Nothing is shared with other workers, so no barrier of
// the CTA stands in the loop.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/pace.cuh"
#include "kernels/cuda/any/decode/work.cuh"

namespace fp8kvd::kernels::cuda {

// Ring says how bytes travel: Init (by warps that MakesBarriers), Copy (all lanes call it; `owner`
// has the source), Wait, and where it kBringsNear, BringNear. Source says where a unit comes from:
// UnitSource At(unit), called with ascending units. PaceKind: NoPace or Pace.
template <class T, class Ring, class Source, class PaceKind = NoPace>
class Pipeline {
 public:
  __device__ __forceinline__ Pipeline(const Source& source, Range units, int32_t stages,
                                      uint8_t* ring, uint64_t* full, PaceKind pace = PaceKind())
      : source_(source), units_(units), stages_(stages), ring_(ring), full_(full), pace_(pace) {
    lane_ = threadIdx.x % kWarpLanes;
    const int32_t first = Ring::MakesBarriers() ? lane_ : stages_;
    for (int32_t s = first; s < stages_; s += kWarpLanes) Ring::Init(full_ + s);
    Ring::FenceInit();
    __syncwarp();
  }

  // Sets out as many units as the ring holds; with below_queries no more than up to the first that
  // has keys at or after its row's pos. A second call goes on where the first one stopped.
  __device__ __forceinline__ void Start(bool below_queries) {
    const int32_t count = min(stages_, Units());
    while (issued_ < count) {
      LookUp(issued_);
      if (below_queries && !__shfl_sync(kAllLanes, found_.below_query, issued_ % kWarpLanes)) {
        return;
      }
      Issue(issued_);
    }
  }

  // Has the next units after those brought as far as the second-level cache, for a warp that waits
  // for the launch before and so cannot free its ring: the memory would have nothing to do.
  __device__ __forceinline__ void BringNear(int32_t count) const {
    if constexpr (Ring::kBringsNear) {
      const int32_t end = min(issued_ + count, min(Units(), looked_up_));
      if (lane_ >= issued_ && lane_ < end) Ring::BringNear(found_);
    }
  }

  // From here on; before a unit is done.
  __device__ __forceinline__ void Keep(const PacePlan& plan) {
    if constexpr (PaceKind::kIsOn) pace_.Keep(plan, stages_);
  }

  // All units are done.
  __device__ __forceinline__ void CountTheRest() {
    if constexpr (PaceKind::kIsOn) pace_.CountTheRest();
  }

  // The next unit's bytes, once they are here.
  __device__ __forceinline__ uint8_t* Wait() {
    Ring::Wait(full_ + stage_, phase_);
    return ring_ + stage_ * T::kUnitBytes;
  }

  __device__ __forceinline__ bool HoldsTwo() const { return stages_ > 1; }

  // The unit after that, while the ring still holds the one before (HoldsTwo).
  __device__ __forceinline__ uint8_t* WaitForNext() {
    const bool wraps = stage_ + 1 == stages_;
    const int32_t next = wraps ? 0 : stage_ + 1;
    Ring::Wait(full_ + next, phase_ ^ (wraps ? 1U : 0U));
    return ring_ + next * T::kUnitBytes;
  }

  // All lanes are done with the unit; another one takes its place, or waits (Pace).
  __device__ __forceinline__ void Release() {
    __syncwarp();
    if constexpr (PaceKind::kIsOn) {
      for (int32_t count = pace_.UnitDone(); count > 0 && issued_ < Units(); --count) {
        LookUp(issued_);
        Issue(free_);
        if (++free_ == stages_) free_ = 0;
      }
    } else if (issued_ < Units()) {
      LookUp(issued_);
      Issue(stage_);
    }
    if (++stage_ == stages_) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // Units that are still to be set out.
  __device__ __forceinline__ int32_t Left() const { return Units() - issued_; }

 private:
  __device__ __forceinline__ int32_t Units() const { return units_.end - units_.first; }

  // Lanes look up one unit each, 32 at a time, and keep the source until its turn comes.
  __device__ __forceinline__ void LookUp(int32_t index) {
    if (index < looked_up_) return;
    const int32_t unit = units_.first + looked_up_ + lane_;
    if (unit < units_.end) found_ = source_.At(unit);
    looked_up_ += kWarpLanes;
  }

  __device__ __forceinline__ void Issue(int32_t stage) {
    Ring::Copy(ring_ + stage * T::kUnitBytes, found_, issued_ % kWarpLanes, lane_, full_ + stage);
    ++issued_;
  }

  Source source_;
  const Range units_;
  const int32_t stages_;
  uint8_t* const ring_;
  uint64_t* const full_;
  int32_t lane_;
  int32_t issued_ = 0;
  int32_t looked_up_ = 0;
  int32_t stage_ = 0;
  uint32_t phase_ = 0;
  int32_t free_ = 0;  // the stage that the next unit goes to, where there is a pace
  UnitSource found_{};
  PaceKind pace_;
};

}  // namespace fp8kvd::kernels::cuda
