// server/engine/launches.h: what was handed to the device and has not passed its fence, oldest
// first: launches_max of them, then it is full, and one slice of an upload that a full ring would
// keep out for ever. No allocation once constructed. Threads: the engine's.
#pragma once

#include <cstdint>
#include <vector>

#include "server/engine/step_context.h"

namespace fp8kvd::engine {

class Launches {
 public:
  Launches(int32_t launches_max, int32_t rows_max) : ring_(launches_max + 1) {
    for (Launch& launch : ring_) launch.items.reserve(rows_max);
  }

  bool empty() const { return count_ == 0; }
  bool is_full() const { return count_ >= ring_.size() - 1; }
  int64_t count() const { return static_cast<int64_t>(count_); }
  size_t rows() const { return rows_; }  // of decodes, in all of them

  Launch& Free() { return At(count_); }  // the place of the next launch, to be filled
  void Push() {                          // Free() was launched
    rows_ += At(count_).items.size();
    ++count_;
  }
  Launch& Oldest() { return At(0); }                                                    // not empty
  const Launch& Newest() const { return ring_[(first_ + count_ - 1) % ring_.size()]; }  // not empty
  void Pop() {
    rows_ -= At(0).items.size();
    first_ = (first_ + 1) % ring_.size();
    --count_;
  }

 private:
  Launch& At(size_t i) { return ring_[(first_ + i) % ring_.size()]; }

  std::vector<Launch> ring_;
  size_t first_ = 0;
  size_t count_ = 0;
  size_t rows_ = 0;
};

}  // namespace fp8kvd::engine
