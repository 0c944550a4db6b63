// kernels/backend.h: what a device does for the engine, over bytes and pointers. Implemented by
// kernels/cpu (runs a launch inside the call) and kernels/cuda (queues it on one stream).
//
// Promises: work runs in the order of the calls, so a later launch sees what an earlier one wrote.
//   Rows and arrays given to a call are copied before it returns; staging memory that rows point
//   into stays untouched by the caller until a fence taken afterwards has passed.
// Does not manage: which page belongs to whom (cache/), which rows go together (server/engine).
// Threads: one caller at a time for everything. Alloc* only before the daemon is ready: afterwards
//   no call allocates device, pinned or growing host memory (allocations() stands still).
// Errors: UNIMPLEMENTED for a shape without a kernel, naming those that exist; RESOURCE_EXHAUSTED
//   from Alloc*; a device fault is INTERNAL from this or any later call, and is final for the
//   process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/params.h"

namespace fp8kvd::kernels {

struct DeviceInfo {
  std::string kind;         // "cuda", "cpu" or a test's name
  std::string name;         // as the vendor or the processor says it, with the instruction set used
  int64_t bytes_total = 0;  // device memory
  int64_t bytes_free = 0;   // when asked
  // Launches are queued and return within microseconds: any thread can afford to make one.
  bool returns_at_once = false;
  int32_t threads = 1;          // that share the work of a launch made inside the call
  std::string pci_bus_id = {};  // of a GPU, as its driver's tools take it; else empty
};

// A place in the order of a backend's work; fences pass in the order in which they were taken.
struct FenceId {
  uint64_t value = 0;
};

// Rows on their way to the device; they arrive in the order in which they set out.
struct BringId {
  uint64_t value = 0;
};

// One shape that Append or Decode may be called with, for WarmUp.
struct KernelShape {
  int32_t head_dim = 0;
  int32_t group = 0;
  Precision precision = Precision::kBf16;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual DeviceInfo Device() const = 0;

  // Bytes of one (page, layer, KV head) block in this backend's layout, a multiple of 16.
  virtual int64_t BlockBytes(Precision precision, int32_t head_dim) const = 0;

  // Memory for pools (zeroed), for block tables, and for staging (host memory that the device can
  // read and write). Freed with the backend.
  virtual absl::StatusOr<uint8_t*> AllocPool(int64_t bytes) = 0;
  virtual absl::StatusOr<int32_t*> AllocTable(int64_t entries) = 0;
  virtual absl::StatusOr<uint8_t*> AllocStaging(int64_t bytes) = 0;

  // Loads kernels and takes every workspace that launches of these shapes can need, up to
  // rows_max rows of q_len_max query tokens and q_heads_max heads. UNIMPLEMENTED names a shape that
  // lacks.
  virtual absl::Status WarmUp(absl::Span<const KernelShape> shapes, int32_t rows_max,
                              int32_t q_len_max, int32_t q_heads_max) = 0;

  virtual absl::Status UpdateTables(absl::Span<const TableEdit> edits) = 0;
  virtual absl::Status CopyPages(absl::Span<const PageCopy> copies) = 0;
  // Sets out to bring the rows of an Append to come to the device, beside all that is queued. Once
  // they are there (Brought, which never waits) that Append, with is_brought, keeps no work behind
  // it waiting for the bus. Of the rows only k, v, n and kv_heads are read. Null: the Append does
  // as well by itself.
  virtual absl::StatusOr<std::optional<BringId>> Bring(const AppendParams& /*params*/) {
    return std::optional<BringId>();
  }
  virtual absl::StatusOr<bool> Brought(BringId /*bring*/) { return true; }
  virtual absl::Status Append(const AppendParams& params) = 0;
  virtual absl::Status Decode(const DecodeParams& params) = 0;
  // Fills bytes with 0xFF (NaN as e4m3, bf16 and fp32): what a freed page holds in tests.
  virtual absl::Status Poison(uint8_t* pool_bytes, int64_t bytes) = 0;

  // Pool bytes to and from host memory, in this backend's layout; they wait for the device.
  virtual absl::Status Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) = 0;
  virtual absl::Status Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) = 0;

  // A fence after all work so far; Passed never waits.
  virtual absl::StatusOr<FenceId> Fence() = 0;
  virtual absl::StatusOr<bool> Passed(FenceId fence) = 0;

  // Calls that took device, pinned or growing host memory so far.
  virtual int64_t allocations() const = 0;
};

}  // namespace fp8kvd::kernels
