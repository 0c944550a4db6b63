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

#include "absl/status/status.h"

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

  // Launches the request's next slice, if there is one to launch (pieces that are replays need
  // none); *has_launched says so. Afterwards book.waiting pieces are left; it is 0 when the chunk
  // is done or has failed, then with request->status. An error returned is a device fault.
  absl::Status Run(AppendRequest* request, bool* has_launched);

 private:
  absl::StatusOr<AppendRows::Outcome> PlanPiece(const AppendRequest& request);

  const StepContext context_;
  AppendRows* const appends_;
};

}  // namespace fp8kvd::engine
