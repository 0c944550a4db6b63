// kernels/cuda/staging_twins.h: pinned host memory for messages, each block with a device block of
// its size. What lies at an offset of the one has its copy at the same offset of the other, so a
// copy needs no place of its own: whoever holds a slot of staging holds its twin.
// Does not manage: what was copied when. Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/cuda/memory.h"

namespace fp8kvd::kernels::cuda {

class StagingTwins {
 public:
  absl::StatusOr<uint8_t*> Alloc(int64_t bytes);  // the host's

  // The device's address of a host address; null if it is not in a block of ours.
  template <class T>
  T* Of(T* host) const {
    const auto* address = reinterpret_cast<const uint8_t*>(host);
    for (const Block& block : blocks_) {
      const int64_t offset = address - block.host.get();
      if (offset >= 0 && offset < block.bytes) {
        return reinterpret_cast<T*>(block.device.get() + offset);
      }
    }
    return nullptr;
  }

 private:
  struct Block {
    PinnedBytes host;
    DeviceBytes device;
    int64_t bytes;
  };
  std::vector<Block> blocks_;
};

}  // namespace fp8kvd::kernels::cuda
