// server/engine/coming_slices.h: slices of bulk appends that wait for their rows to reach the
// device (kernels::Backend::Bring), in the order in which they will be launched. A fixed ring: no
// allocation once constructed. Threads: the engine's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/backend.h"
#include "server/engine/messages.h"

namespace fp8kvd::engine {

struct ComingSlice {
  AppendRequest* append = nullptr;             // runs until the slice is launched or dropped
  int32_t pieces = 0;                          // of it
  std::optional<kernels::BringId> bring = {};  // null: it waits only for those before it

  // The append was cancelled, was late or failed: the slice is dropped, once its rows are there.
  bool has_ended() const { return append->book.waiting == 0; }
};

class ComingSlices {
 public:
  bool empty() const { return count_ == 0; }
  bool is_full() const { return count_ == kSlices; }
  void Push(const ComingSlice& slice) {  // not full
    ring_[(first_ + count_) % kSlices] = slice;
    ++count_;
  }
  ComingSlice& Oldest() { return ring_[first_]; }  // not empty
  void Pop() {
    first_ = (first_ + 1) % kSlices;
    --count_;
  }

 private:
  // One crosses the bus, the next stands behind it, and one has come.
  static constexpr size_t kSlices = 3;

  std::array<ComingSlice, kSlices> ring_;
  size_t first_ = 0;
  size_t count_ = 0;
};

}  // namespace fp8kvd::engine
