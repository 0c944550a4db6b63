// kernels/cuda/any/decode/pipeline.cuh: a warp's own ring of units in shared memory. Nothing is
// shared with other warps, so no barrier of the CTA stands in the loop.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/work.cuh"

namespace fp8kvd::kernels::cuda {

// Ring says how bytes travel: kArrivals, Init, Copy (all lanes call it; `owner` has the source),
// Wait.
template <class T, class Ring>
class Pipeline {
 public:
  __device__ __forceinline__ Pipeline(const DecodeArgs& args, const WorkMap& map, Range units,
                                      int32_t row, int32_t stages, uint8_t* ring, uint64_t* full)
      : args_(args),
        map_(map),
        units_(units),
        stages_(stages),
        ring_(ring),
        full_(full),
        row_(row) {
    lane_ = threadIdx.x % kWarpLanes;
    for (int32_t s = lane_; s < stages_; s += kWarpLanes) Ring::Init(full_ + s);
    Ring::FenceInit();
    __syncwarp();
  }

  // Sets out as many units as the ring holds; with below_queries no more than up to the first that
  // has keys at or after its row's pos. A second call goes on where the first one stopped.
  __device__ __forceinline__ void Start(bool below_queries) {
    const int32_t count = min(stages_, units_.end - units_.first);
    while (issued_ < count) {
      LookUp();
      if (below_queries && !__shfl_sync(kAllLanes, source_.below_query, issued_ % kWarpLanes))
        break;
      Issue(issued_);
    }
  }

  // The next unit's bytes, once they are here.
  __device__ __forceinline__ uint8_t* Wait() {
    Ring::Wait(full_ + stage_, phase_);
    return ring_ + stage_ * T::kUnitBytes;
  }

  // All lanes are done with the unit; another one takes its place.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    if (issued_ < units_.end - units_.first) {
      LookUp();
      Issue(stage_);
    }
    if (++stage_ == stages_) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  // Lanes look up one unit each, 32 at a time, and keep the source until its turn comes.
  __device__ __forceinline__ void LookUp() {
    if (issued_ != looked_up_) return;
    const int32_t unit = units_.first + issued_ + lane_;
    if (unit < units_.end) source_ = SourceOf<T>(args_, map_, unit, row_);
    looked_up_ += kWarpLanes;
  }

  __device__ __forceinline__ void Issue(int32_t stage) {
    Ring::Copy(ring_ + stage * T::kUnitBytes, source_, issued_ % kWarpLanes, lane_, full_ + stage);
    ++issued_;
  }

  const DecodeArgs& args_;
  const WorkMap& map_;
  const Range units_;
  const int32_t stages_;
  uint8_t* const ring_;
  uint64_t* const full_;
  int32_t lane_;
  int32_t row_;  // of the unit looked up last
  int32_t issued_ = 0;
  int32_t looked_up_ = 0;
  int32_t stage_ = 0;
  uint32_t phase_ = 0;
  UnitSource source_{};
};

}  // namespace fp8kvd::kernels::cuda
