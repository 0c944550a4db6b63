// server/engine/append_rows.h: the appends of one launch, from plans in page ids to rows of
// addresses.
//
// Between Begin and Launch, each Plan asks the store, turns the plan into rows and commits it.
// Commit comes before the launch that it belongs to: nobody but this thread sees the store, and
// within this turn the launch is queued before any work that could read what was committed. The
// backend cannot refuse it (WarmUp has seen every shape) but for a device fault, and after that
// nothing in the store is used again. So "committed" always means "queued" to whoever looks. Order
// on the device: whole-page copies, block table entries, appends. A plan that copies a shared page
// gives its owner up at Commit, and a later plan of the same launch may then write that page in
// place: the copies have all run before.
// Threads: the engine's. No allocation once constructed, for launches within the bounds given.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "cache/append_plan.h"
#include "kernels/params.h"
#include "server/engine/step_context.h"

namespace fp8kvd::engine {

class AppendRows {
 public:
  enum class Outcome : uint8_t {
    kPlanned,  // committed, and part of the launch
    kReplay,   // these tokens were there: nothing to do
    kWait,     // needs a page that this launch may still read: goes into the next one
  };

  enum class Purpose : uint8_t {
    kStore,  // a bulk append
    kQuery,  // a decode: queries at the same tokens follow, and must find every key that they see
  };

  // A launch has rows_max rows and tokens_max tokens at most.
  AppendRows(const StepContext& context, int32_t rows_max, int64_t tokens_max);

  void Begin();
  // k and v: the rows of args.n tokens. Errors are PlanAppend's and, with kQuery, CheckVisible's;
  // they leave everything as it was. A replay is not checked for queries.
  absl::StatusOr<Outcome> Plan(Purpose purpose, cache::SeqIndex seq, const cache::AppendArgs& args,
                               const uint16_t* k, const uint16_t* v);
  bool empty() const { return rows_.empty(); }
  // All rows are of one head_dim and precision. An error is a device fault.
  // is_brought: Backend::Bring has brought their k and v.
  absl::Status Launch(int32_t head_dim, Precision precision, bool is_brought = false);

 private:
  const StepContext context_;
  std::vector<kernels::PageCopy> copies_;
  std::vector<kernels::TableEdit> edits_;
  std::vector<kernels::AppendRow> rows_;
};

}  // namespace fp8kvd::engine
