// server/engine/staging.h: pinned host memory that a message's tensors are copied into once, and that
// the device reads and writes. All of it is taken at start, in slots of a few fixed sizes.
//
// Promises: Acquire and Release are O(1), take no memory, and never wait. A slot's bytes are its
//   holder's alone until Release. slots_used() is 0 when nobody holds one (a leak shows).
// Does not manage: what lies in a slot; when the device is done with it (the engine answers after
//   its fence has passed).
// Threads: any, guarded by one mutex per size.
// Errors: RESOURCE_EXHAUSTED when no slot of a sufficient size is free; INVALID_ARGUMENT beyond the
//   largest size.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace fp8kvd::engine {

struct StagingSlot {
  uint8_t* bytes = nullptr;  // 256-byte aligned
  int64_t size = 0;
  int32_t size_class = -1;
  int32_t index = -1;
};

}  // namespace fp8kvd::engine
