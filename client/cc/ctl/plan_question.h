// client/cc/ctl/plan_question.h: what fp8kvctl plan is asked about a described model, and its
// answers at any batch and context.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

#include "client/cc/ctl/invocation.h"
#include "config/cache_share.h"
#include "config/calibration.h"
#include "config/hf_config.h"

namespace fp8kvd::ctl {

struct Question {
  config::HfModel model;
  ModelGeometry geometry;  // as if fp8_kv had been chosen
  int64_t batch = 0;
  int64_t tokens = 0;
  std::optional<double> weight_bytes;  // given: the whole of other_bytes
  config::PolicyOptions policy;
  std::optional<config::Calibration> calibration;
  std::string gpu;       // of the table, or "given"
  double gpu_bytes = 0;  // its memory

  std::optional<double> OtherBytes(int64_t of_batch) const;
  absl::StatusOr<config::PrecisionDecision> Decide(int64_t of_batch, int64_t of_tokens) const;

  // Fewest tokens from which fp8_kv is chosen for that batch where it is allowed; nothing when no
  // length gets there.
  std::optional<int64_t> Crossover(int64_t of_batch) const;

  // What the model's weights take on a device; nothing while unknown.
  std::optional<double> WeightBytes() const;
  // Sequences of `tokens` tokens beside them in gpu_bytes.
  std::optional<double> SeqsThatFit(const config::PrecisionDecision& decision,
                                    double kv_bytes) const;
};

// Reads the flags and the files that they name.
absl::StatusOr<Question> AskQuestion(const Invocation& invocation);

}  // namespace fp8kvd::ctl
