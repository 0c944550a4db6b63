// server/engine/staging.h: pinned host memory that a message's tensors are copied into once, and
// that the device reads and writes. All of it is taken at start, in slots of a few fixed sizes.
//
// Promises: Acquire and Release are O(1), take no memory, and wait for nobody but a holder of the
//   same short lock. A slot's bytes are its holder's alone until Release. slots_used() is 0 when
//   nobody holds one (a leak shows).
// Sizes: the largest is half of all bytes, one slot, so that the largest message and its reply
//   always have a place. The other half goes in equal parts to sizes of 64 KiB, 256 KiB, 1 MiB ...
//   (powers of four below the largest; as many as get a slot). A message that finds its own size
//   taken may use the next larger one, but no more than that: small messages never block the large.
// Tenants: each holds its part of the slots of a size at most, one at least.
// Does not manage: what lies in a slot; when the device is done with it (the engine answers after
//   its fence has passed).
// Threads: any, guarded by one mutex per size.
// Errors: RESOURCE_EXHAUSTED when no slot of a sufficient size is free; INVALID_ARGUMENT beyond the
//   largest size.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "cache/ids.h"
#include "kernels/backend.h"

namespace fp8kvd::engine {

struct StagingSlot {
  uint8_t* bytes = nullptr;  // 256-byte aligned
  int64_t size = 0;
  int32_t size_class = -1;
  int32_t index = -1;
  cache::TenantId tenant{0};  // who holds it
};

class Staging {
 public:
  static constexpr int64_t kSlotBytesMin = int64_t{64} << 10;

  // Takes `bytes` (at least 4 * kSlotBytesMin) from the backend, in at most `slots_max` slots.
  static absl::StatusOr<std::unique_ptr<Staging>> Make(kernels::Backend* backend, int64_t bytes,
                                                       int32_t slots_max, int32_t tenants = 1);

  absl::StatusOr<StagingSlot> Acquire(int64_t bytes, cache::TenantId tenant = cache::TenantId{0});
  void Release(const StagingSlot& slot);  // held; giving one back twice is a bug: aborts

  int64_t slot_bytes_max() const;
  int64_t slots_total() const { return slots_total_; }
  int64_t slots_used() const;

 private:
  struct SizeClass {
    SizeClass(int64_t slot_size, uint8_t* first, int32_t slots, int32_t tenants);
    const int64_t size;
    uint8_t* const bytes;
    const int32_t count;
    const int32_t tenant_max;  // slots of one tenant
    mutable std::mutex mutex;
    std::vector<int32_t> free;  // guarded by mutex; the last is the warmest
    std::vector<bool> is_held;  // guarded by mutex
    std::vector<int32_t> held;  // guarded by mutex; by tenant
  };

  Staging() = default;
  bool Take(SizeClass& size_class, int32_t index_of_class, StagingSlot* slot);  // its tenant is set

  std::vector<std::unique_ptr<SizeClass>> classes_;  // ascending by size
  int64_t slots_total_ = 0;
};

}  // namespace fp8kvd::engine
