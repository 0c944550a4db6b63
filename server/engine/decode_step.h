// server/engine/decode_step.h: a picked batch into one launch.
//
// Each item is looked up once, its append planned (append_rows.h), its query checked, and its row
// written; then appends and decode are launched. An item that fails gets its Status and harms no
// other. A planned item cannot fail any more: its query ends with the tokens it appended. When an
// append has to wait (AppendRows::kWait), it and all items behind it stay waiting, so that order
// holds. Threads: the engine's. No allocation but for error texts.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "server/engine/append_rows.h"
#include "server/engine/step_context.h"

namespace fp8kvd::engine {

class DecodeStep {
 public:
  DecodeStep(const StepContext& context, AppendRows* appends);

  // Afterwards the items that run are kRunning and in launch->items; those that failed are
  // kAnswered with their status and in failed(); the others still wait. An error is a device fault.
  absl::Status Run(const Batcher::Pick& pick, TimeUs now, Launch* launch);
  const std::vector<BatchItem>& failed() const { return failed_; }

 private:
  enum class Outcome : uint8_t { kRuns, kFailed, kWaits };
  Outcome Prepare(const BatchItem& batch_item);
  void AddRow(const DecodeRequest& request, const DecodeItem& item);
  void Count(const DecodeRequest& request, const DecodeItem& item);

  const StepContext context_;
  AppendRows* const appends_;
  std::vector<kernels::DecodeRow> rows_;
  std::vector<BatchItem> failed_;
};

}  // namespace fp8kvd::engine
