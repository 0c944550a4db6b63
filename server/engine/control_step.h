// server/engine/control_step.h: create, fork, truncate, free, renew, stat, list.
//
// Runs between launches. A fork's children get their block tables on the device at once; all other
// operations change host state alone (pages that they free may still be read by launches in flight:
// freed_pages.h). Allocates: none of it is on the decode path.
// Threads: the engine's.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "server/engine/step_context.h"

namespace fp8kvd::engine {

class ControlStep {
 public:
  explicit ControlStep(const StepContext& context) : context_(context) {}

  // Fills the request's status and outputs. An error returned is a device fault.
  absl::Status Run(ControlRequest* request, int64_t now_ms);
  // Puts the pages that a sequence has into its block tables on the device.
  absl::Status FillTables(cache::SeqIndex seq);

 private:
  absl::Status Create(ControlRequest* request, int64_t now_ms);
  absl::Status Fork(ControlRequest* request, int64_t now_ms);
  void ForEachHandle(ControlRequest* request, int64_t now_ms);
  absl::Status RunOne(ControlRequest* request, size_t i, cache::SeqIndex seq, int64_t now_ms);
  void List(ControlRequest* request, int64_t now_ms);
  SequenceInfo InfoOf(const cache::SeqHandle& handle, cache::SeqIndex seq, int64_t now_ms) const;
  absl::StatusOr<int64_t> TtlOf(const ControlRequest& request, int64_t ttl_ms_default) const;

  const StepContext context_;
};

}  // namespace fp8kvd::engine
