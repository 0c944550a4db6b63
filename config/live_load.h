// config/live_load.h: what the precision policy says of the load that a daemon really served, and
// whether that contradicts what it decided for the configured one.
//
// A step reads each layer once, so a model's decode requests divided by its layers are its steps,
// and the items of a request its batch: an engine that sends the sequences of one step in several
// requests looks like so many engines with weights of their own.
// Pure functions, any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"

#include "config/cache_share.h"
#include "config/calibration.h"
#include "config/options.h"

namespace fp8kvd::config {

// One model's decodes over a time, as counted.
struct ServedLoad {
  double seconds = 0;
  double requests = 0;       // each is one layer of one step
  double items = 0;          // sequences in them
  double seq_tokens = 0;     // sum over the items of their sequence's length, the query's included
  double kv_bf16_bytes = 0;  // that bf16 would have read for them
};

struct LiveVerdict {
  double seconds = 0;
  double steps = 0;
  double batch = 0;        // sequences in a step
  double tokens = 0;       // of each
  double cache_share = 0;  // of what bf16 would have read; 0 while other_bytes is unknown
  // For that batch and those tokens, as if allow_fp8_kv were set: what fp8_kv would win is told to
  // whoever has not opted in, too.
  PrecisionDecision decision;
  // The running precision is not the decision's, and is not bf16 by an explicit wish.
  bool contradicts = false;
  std::string hint;  // one sentence, where it contradicts
};

// load.items > 0. options: the model's, with hf_config imported; running: what was decided for
// them.
absl::StatusOr<LiveVerdict> JudgeServedLoad(const ModelOptions& options,
                                            const PrecisionDecision& running,
                                            const PolicyOptions& policy,
                                            const Calibration* calibration, const ServedLoad& load);

}  // namespace fp8kvd::config
