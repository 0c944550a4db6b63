// server/engine/append_step.h: a bulk append (a chunk of a client's stream) in slices.
//
// A chunk is [layers_count, n] tokens. It is cut into pieces of slice_tokens tokens of one layer,
// the layer running fastest, so that no layer gets further ahead of the others than one piece (a
// windowed group allows little). One turn takes as many pieces as fit append_slice_bytes_max, one
// at least, into one launch: a slice. Each piece commits alone and is replayed alone; the first
// that fails ends the chunk, and what was committed before stays. Threads: the engine's. No
// allocation but for error texts.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/engine/append_rows.h"
#include "server/engine/step_context.h"

namespace fp8kvd::engine {

// Tokens of one piece for a chunk of these layers: as many as fit append_slice_bytes_max of K and
// V, and no more than a windowed group lets one layer be ahead of the others; at least 1. Callers
// put it into AppendRequest::slice_tokens and digest the rows of each piece. The layers have one
// kv_heads and head_dim.
int32_t AppendSliceTokens(const config::EngineOptions& options,
                          const config::CacheOptions& cache_options, const ModelGeometry& geometry,
                          int32_t layer, int32_t layers_count);

int32_t AppendPieces(const AppendRequest& request);

class AppendStep {
 public:
  AppendStep(const StepContext& context, AppendRows* appends);

  // Pieces of the next slice, behind those that are coming.
  int32_t NextPieces(const AppendRequest& request) const;
  // Sets out to bring the rows of so many pieces behind those that are coming. Null: not needed. An
  // error is a device fault, as that of Run.
  absl::StatusOr<std::optional<kernels::BringId>> Bring(const AppendRequest& request,
                                                        int32_t pieces);
  // Launches the request's next pieces, if there is anything to launch (those that are replays need
  // nothing); *has_launched says so. Afterwards book.waiting pieces are left; it is 0 when the
  // chunk is done or has failed, then with request->status.
  absl::Status Run(AppendRequest* request, int32_t pieces, bool is_brought, bool* has_launched);

 private:
  const LayerGroup& GroupOf(const AppendRequest& request, int32_t piece) const;
  absl::StatusOr<AppendRows::Outcome> PlanPiece(const AppendRequest& request);

  const StepContext context_;
  AppendRows* const appends_;
  std::vector<kernels::AppendRow> rows_;  // room for batch_rows_max
};

}  // namespace fp8kvd::engine
