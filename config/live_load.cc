#include "config/live_load.h"

#include <cmath>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "config/model.h"

namespace fp8kvd::config {
namespace {

std::string Hint(const ModelOptions& options, const PrecisionDecision& running,
                 const PolicyOptions& policy, const LiveVerdict& v) {
  std::string hint = absl::StrFormat(
      "model \"%s\" is %s for the configured %d x %d tokens, but over %.3g s it served %.4g x %.0f "
      "tokens a step: cache_share %.4f, predicted step speed-up of fp8_kv %.3fx, so %s would be "
      "the "
      "choice; if this load is to stay, set expected_seqs: %.0f expected_tokens: %.0f",
      absl::CEscape(options.name), PrecisionName(running.precision), running.batch, running.tokens,
      v.seconds, v.batch, v.tokens, v.cache_share, v.decision.predicted_speedup,
      PrecisionName(v.decision.precision), std::ceil(v.batch), std::ceil(v.tokens));
  if (v.decision.precision == Precision::kFp8Kv && !policy.allow_fp8_kv) {
    absl::StrAppend(&hint, " and, if its error is acceptable, allow_fp8_kv: true");
  }
  if (options.precision == PrecisionChoice::kFp8Kv) absl::StrAppend(&hint, " and precision: auto");
  return hint;
}

}  // namespace

absl::StatusOr<LiveVerdict> JudgeServedLoad(const ModelOptions& options,
                                            const PrecisionDecision& running,
                                            const PolicyOptions& policy,
                                            const Calibration* calibration,
                                            const ServedLoad& load) {
  absl::StatusOr<ModelGeometry> geometry = MakeGeometry(options, Precision::kFp8Kv);
  if (!geometry.ok()) return geometry.status();
  LiveVerdict v;
  v.seconds = load.seconds;
  v.steps = load.requests / geometry->layers;
  v.batch = load.items / load.requests;
  v.tokens = load.seq_tokens / load.items;
  Workload workload = {.batch = std::llround(v.batch),
                       .tokens = std::llround(v.tokens),
                       .other_bytes = std::nullopt};
  if (options.other_bytes.has_value()) {
    workload.other_bytes = static_cast<double>(*options.other_bytes);
    const double all = load.kv_bf16_bytes + v.steps * *workload.other_bytes;
    v.cache_share = all > 0 ? load.kv_bf16_bytes / all : 0;
  }
  PolicyOptions allowed = policy;
  allowed.allow_fp8_kv = true;
  absl::StatusOr<PrecisionDecision> decision =
      DecidePrecision(*geometry, PrecisionChoice::kAuto, workload, allowed, calibration);
  if (!decision.ok()) return decision.status();
  v.decision = *std::move(decision);
  v.contradicts = v.decision.precision != running.precision &&
                  options.precision != PrecisionChoice::kBf16 && workload.other_bytes.has_value();
  if (v.contradicts) v.hint = Hint(options, running, policy, v);
  return v;
}

}  // namespace fp8kvd::config
