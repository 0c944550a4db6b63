// kernels/cpu/decode.h: one decode launch on the CPU, over blocks of page_layout.h. Called by
// CpuBackend; runs to its end inside the call, on the threads that it is handed.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/split_plan.h"
#include "kernels/params.h"
#include "kernels/workers.h"

namespace fp8kvd::kernels::cpu {

// Query heads that are worked on together, at most: their sums stay in registers.
inline constexpr int32_t kColumnsMax = 8;
// Floats from one column to the next, of q and of the scores of a page: off a power of two, so that
// columns fall to different cache sets.
inline constexpr int32_t kQueryStride = kHeadDimMax + kTile;
inline constexpr int32_t kScoreStride = kPageTokens + kTile;

// Scores are kept in units of ln 2 inside a launch, so that each exponential is a power of two.
inline constexpr float kLn2 = 0.693147180559945309F;

// Codes are widened to their value times 2^-8 (decode-inl.h says why).
inline constexpr float kCodeUnit = 256.0F;

// The partial result of some keys for all columns (query tokens x heads of one KV head) of one row.
struct Partial {
  float* max;  // [columns] largest score in units of ln 2, -inf: no key
  float* sum;  // [columns] of 2^(score - max)
  float* o;    // [columns, head_dim] of 2^(score - max) v, in units of the codes
};

// Memory of a launch, taken once.
class DecodeWorkspace {
 public:
  // For launches of up to rows_max rows, of up to columns_max query tokens x group size, on up to
  // threads threads. Keeps what an earlier Reserve took where that is more.
  void Reserve(int32_t rows_max, int32_t columns_max, int32_t head_dim_max, int32_t threads);

  int32_t columns_max() const { return columns_max_; }
  int32_t head_dim_max() const { return head_dim_max_; }

  SplitPlan plan;
  // A unit that several threads share, by the thread that began it; row -1: none.
  std::vector<UnitPart> cuts;

  float* q(int32_t thread) const { return Thread(thread); }
  float* scores(int32_t thread) const { return Thread(thread) + q_floats_; }
  Partial total(int32_t thread) const { return At(scores(thread) + score_floats_); }
  Partial split(int32_t thread) const {
    return At(scores(thread) + score_floats_ + partial_floats_);
  }
  // Of split `split` of the unit that `owner` began.
  Partial shared(int32_t owner, int32_t split) const {
    return At(shared_ + (int64_t{owner} * kSplitsMax + split) * partial_floats_);
  }

 private:
  struct AlignedDelete {
    void operator()(float* floats) const {
      ::operator delete[](floats, std::align_val_t{kAlignment});
    }
  };
  static constexpr size_t kAlignment = 64;  // a cache line and the widest vector

  float* Thread(int32_t thread) const { return memory_.get() + thread * thread_floats_; }
  Partial At(float* floats) const {
    return {floats, floats + column_floats_, floats + 2 * column_floats_};
  }

  std::unique_ptr<float[], AlignedDelete> memory_;
  float* shared_ = nullptr;
  int64_t q_floats_ = 0;
  int64_t score_floats_ = 0;
  int64_t column_floats_ = 0;
  int64_t partial_floats_ = 0;
  int64_t thread_floats_ = 0;
  int32_t columns_max_ = 0;
  int32_t head_dim_max_ = 0;
  int32_t threads_ = 0;
};

// params are within what workspace was reserved for. Allocates nothing. The answer is the same for
// any number of threads and whatever other rows are in the launch.
void Decode(const DecodeParams& params, DecodeWorkspace& workspace, Workers& workers);

}  // namespace fp8kvd::kernels::cpu
