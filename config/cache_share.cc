#include "config/cache_share.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "config/model.h"

namespace fp8kvd::config {
namespace {

double Share(double part, double kv_bytes, double other_bytes) {
  const double all = kv_bytes + other_bytes;
  return all > 0 ? part / all : 0.0;
}

int64_t TokensSeen(const LayerGroup& group, int64_t tokens) {
  return group.window > 0 ? std::min<int64_t>(tokens, group.window) : tokens;
}

// Tokens of K and V that one step reads in all layers of a group together, for the whole batch.
double TokensRead(const LayerGroup& group, int64_t batch, int64_t tokens) {
  return static_cast<double>(std::max<int64_t>(batch, 0)) *
         static_cast<double>(std::max<int64_t>(TokensSeen(group, tokens), 0)) *
         static_cast<double>(group.layers.size());
}

double GroupBytes(const LayerGroup& group, Precision precision, int64_t batch, int64_t tokens) {
  return TokensRead(group, batch, tokens) * group.kv_heads *
         static_cast<double>(KvBytesPerToken(precision, group.head_dim));
}

double ConvertibleBytes(const ModelGeometry& geometry, int64_t batch, int64_t tokens) {
  double bytes = 0;
  for (const LayerGroup& group : geometry.groups) {
    if (group.precision != Precision::kFp8Kv) continue;
    bytes += GroupBytes(group, Precision::kBf16, batch, tokens);
  }
  return bytes;
}

// Sets r and where it is from.
void SetRatio(const ModelGeometry& geometry, const PolicyOptions& policy,
              const Calibration* calibration, PrecisionDecision* d) {
  const bool given = policy.fp8_bf16_ratio > 0;
  d->ratio = given ? policy.fp8_bf16_ratio : BytesRatio(geometry.head_dim);
  d->ratio_source = given ? RatioSource::kGiven : RatioSource::kBytes;
  if (calibration == nullptr) return;
  double bytes = 0;
  double fp8_kv_bytes = 0;  // bf16 bytes x r: time in units of what bf16 takes for a byte
  for (const LayerGroup& group : geometry.groups) {
    if (group.precision != Precision::kFp8Kv) continue;
    const std::optional<double> ratio = MeasuredRatio(*calibration, group, geometry.group_size(),
                                                      d->batch, TokensSeen(group, d->tokens));
    if (!ratio.has_value()) return;
    const double group_bytes = GroupBytes(group, Precision::kBf16, d->batch, d->tokens);
    bytes += group_bytes;
    fp8_kv_bytes += group_bytes * *ratio;
  }
  if (bytes <= 0) return;
  d->ratio = fp8_kv_bytes / bytes;
  d->ratio_source = RatioSource::kMeasured;
}

// Sets the calls' cost and the speed-up with it, as far as they are known.
void SetCalls(int32_t layers, const PolicyOptions& policy, const Calibration* calibration,
              PrecisionDecision* d) {
  const auto known = [](double given, double calibrated) {
    return given > 0 ? std::optional(given)
                     : (calibrated > 0 ? std::optional(calibrated) : std::nullopt);
  };
  d->rpc_us = known(policy.rpc_us, calibration != nullptr ? calibration->call_us : 0);
  d->read_bytes_per_s =
      known(policy.read_gb_s * 1e9, calibration != nullptr ? calibration->read_bytes_per_s : 0);
  if (d->rpc_us.has_value() && d->read_bytes_per_s.has_value()) {
    d->speedup_with_calls = SpeedupWithCalls(*d, layers, *d->rpc_us, *d->read_bytes_per_s);
  }
}

// The numbers that do not depend on what is asked.
PrecisionDecision Numbers(const ModelGeometry& geometry, const Workload& workload,
                          const PolicyOptions& policy, const Calibration* calibration) {
  PrecisionDecision d;
  d.batch = workload.batch;
  d.tokens = workload.tokens;
  d.kv_bytes = KvBytesReadBf16(geometry, workload.batch, workload.tokens);
  d.kv_bytes_fp8_kv = KvBytesRead(geometry, workload.batch, workload.tokens);
  d.convertible_bytes = ConvertibleBytes(geometry, workload.batch, workload.tokens);
  d.other_bytes = workload.other_bytes;
  if (d.other_bytes.has_value()) {
    d.cache_share = Share(d.kv_bytes, d.kv_bytes, *d.other_bytes);
    d.convertible_share = Share(d.convertible_bytes, d.kv_bytes, *d.other_bytes);
  }
  d.cache_share_min = policy.cache_share_min;
  SetRatio(geometry, policy, calibration, &d);
  d.predicted_speedup = PredictedSpeedup(d.convertible_share, d.ratio);
  d.attention_speedup = PredictedSpeedup(Share(d.convertible_bytes, d.kv_bytes, 0), d.ratio);
  SetCalls(geometry.layers, policy, calibration, &d);
  return d;
}

std::string NumbersText(const PrecisionDecision& d) {
  std::string text = absl::StrFormat("batch %d x %d tokens read %.4g bytes of K and V", d.batch,
                                     d.tokens, d.kv_bytes);
  if (d.convertible_bytes < d.kv_bytes) {
    absl::StrAppendFormat(&text, " (%.4g without bf16_layers)", d.convertible_bytes);
  }
  if (d.other_bytes.has_value()) {
    absl::StrAppendFormat(&text, " and %.4g others, cache_share %.4f", *d.other_bytes,
                          d.cache_share);
  } else {
    absl::StrAppend(&text, " and an unknown number of others");
  }
  if (d.convertible_share < d.cache_share) {
    absl::StrAppendFormat(&text, " (%.4f without bf16_layers)", d.convertible_share);
  }
  absl::StrAppendFormat(&text, ", cache_share_min %.4g, r %.4f (%s)", d.cache_share_min, d.ratio,
                        RatioSourceName(d.ratio_source));
  if (d.other_bytes.has_value()) {
    absl::StrAppendFormat(&text, ", predicted step speed-up %.3fx", d.predicted_speedup);
  }
  absl::StrAppendFormat(&text, ", attention alone %.3fx", d.attention_speedup);
  if (d.speedup_with_calls.has_value()) {
    absl::StrAppendFormat(&text, ", step with a call of %.4g us a layer at %.4g GB/s %.3fx",
                          *d.rpc_us, *d.read_bytes_per_s * 1e-9, *d.speedup_with_calls);
  } else {
    absl::StrAppend(&text,
                    ", with the calls' cost unknown (calibrate, or set rpc_us and read_gb_s)");
  }
  return text;
}

// What the calls leave of fp8_kv's gain, where that is less than the least that was wanted of it.
std::string CallsCaveat(const PrecisionDecision& d) {
  if (d.precision != Precision::kFp8Kv || !d.speedup_with_calls.has_value()) return "";
  const double least = PredictedSpeedup(d.cache_share_min, d.ratio);
  if (*d.speedup_with_calls >= least) return "";
  return absl::StrFormat(
      ", though with the calls' own cost the step gains %.3fx only (cache_share_min stands for "
      "%.3fx): it gives room rather than speed",
      *d.speedup_with_calls, least);
}

// The choice of auto, and why.
std::pair<Precision, const char*> ChooseAuto(const PrecisionDecision& d, bool allow_fp8_kv) {
  if (!allow_fp8_kv) {
    return {Precision::kBf16, "bf16 because allow_fp8_kv is false"};
  }
  if (d.convertible_bytes <= 0) {
    return {Precision::kBf16, "bf16 because no layer's cache bytes could be fp8_kv"};
  }
  if (!d.other_bytes.has_value()) {
    return {Precision::kBf16, "bf16 because other_bytes is unknown (set it, or give hf_config)"};
  }
  if (d.ratio >= 1) {
    return {Precision::kBf16, "bf16 because fp8_kv is not faster at this shape (r >= 1)"};
  }
  if (d.tokens < kShortTokens && d.ratio_source == RatioSource::kBytes) {
    return {Precision::kBf16,
            "bf16 because so few tokens are bound by latency and r was not measured there"};
  }
  if (d.convertible_share < d.cache_share_min) {
    return {Precision::kBf16, "bf16 because the cache's share is below cache_share_min"};
  }
  return {Precision::kFp8Kv, "fp8_kv because the cache's share reaches cache_share_min and r < 1"};
}

}  // namespace

double kv_cache_share(int64_t batch, int64_t tokens, int64_t layers, int64_t kv_heads,
                      int64_t head_dim, int64_t other_bytes) {
  double kv_bytes = 2 * sizeof(uint16_t);
  for (const int64_t factor : {batch, tokens, layers, kv_heads, head_dim}) {
    kv_bytes *= static_cast<double>(std::max<int64_t>(factor, 0));
  }
  return Share(kv_bytes, kv_bytes, static_cast<double>(std::max<int64_t>(other_bytes, 0)));
}

double KvBytesRead(const ModelGeometry& geometry, int64_t batch, int64_t tokens) {
  double bytes = 0;
  for (const LayerGroup& group : geometry.groups) {
    bytes += GroupBytes(group, group.precision, batch, tokens);
  }
  return bytes;
}

double KvBytesReadBf16(const ModelGeometry& geometry, int64_t batch, int64_t tokens) {
  double bytes = 0;
  for (const LayerGroup& group : geometry.groups) {
    bytes += GroupBytes(group, Precision::kBf16, batch, tokens);
  }
  return bytes;
}

double BytesRatio(int32_t head_dim) {
  return static_cast<double>(KvBytesPerToken(Precision::kFp8Kv, head_dim)) /
         static_cast<double>(KvBytesPerToken(Precision::kBf16, head_dim));
}

double PredictedSpeedup(double share, double ratio) { return 1.0 / (1.0 - share * (1.0 - ratio)); }

const char* RatioSourceName(RatioSource source) {
  constexpr const char* kNames[] = {"bytes", "given", "measured"};
  return kNames[static_cast<int>(source)];
}

const char* PrecisionName(Precision precision) {
  return precision == Precision::kFp8Kv ? "fp8_kv" : "bf16";
}

absl::StatusOr<PrecisionDecision> DecidePrecision(const ModelGeometry& geometry,
                                                  PrecisionChoice choice, const Workload& workload,
                                                  const PolicyOptions& policy,
                                                  const Calibration* calibration) {
  if (choice == PrecisionChoice::kFp8Kv && !policy.allow_fp8_kv) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model \"", absl::CEscape(geometry.name), "\": precision fp8_kv is lossy and needs the ",
        "opt-in allow_fp8_kv, which is false; set policy { allow_fp8_kv: true } in the file or ",
        "start with --allow_fp8_kv, or ask for bf16 or auto"));
  }
  PrecisionDecision decision = Numbers(geometry, workload, policy, calibration);
  std::pair<Precision, const char*> chosen;
  switch (choice) {
    case PrecisionChoice::kAuto:
      chosen = ChooseAuto(decision, policy.allow_fp8_kv);
      break;
    case PrecisionChoice::kBf16:
      chosen = {Precision::kBf16, "bf16 because the configuration says so"};
      break;
    case PrecisionChoice::kFp8Kv:
      chosen = {Precision::kFp8Kv, "fp8_kv because the configuration says so"};
      break;
  }
  decision.precision = chosen.first;
  decision.reason = absl::StrCat(chosen.second, CallsCaveat(decision), ": ", NumbersText(decision));
  return decision;
}

std::optional<double> SpeedupWithCalls(const PrecisionDecision& decision, int32_t layers,
                                       double rpc_us, double bytes_per_s) {
  if (!decision.other_bytes.has_value() || !(bytes_per_s > 0)) return std::nullopt;
  const double calls_s = layers * rpc_us * 1e-6;
  const double bf16_s = (decision.kv_bytes + *decision.other_bytes) / bytes_per_s + calls_s;
  const double saved_s = decision.convertible_bytes * (1 - decision.ratio) / bytes_per_s;
  return bf16_s > 0 ? bf16_s / (bf16_s - saved_s) : 1.0;
}

std::optional<int64_t> CrossoverTokens(const ModelGeometry& geometry, int64_t batch,
                                       double other_bytes, double share_min) {
  const auto reaches = [&](int64_t tokens) {
    return Share(ConvertibleBytes(geometry, batch, tokens),
                 KvBytesReadBf16(geometry, batch, tokens), other_bytes) >= share_min;
  };
  // Between two windows the share is a t + b over c t + d, so it only rises or only falls there.
  std::set<int64_t> ends = {kSeqLenMax};
  for (const LayerGroup& group : geometry.groups) {
    if (group.window > 0) ends.insert(group.window);
  }
  int64_t below = 0;  // does not reach
  for (int64_t reached : ends) {
    if (!reaches(reached)) {
      below = reached;
      continue;
    }
    while (reached - below > 1) {
      const int64_t middle = below + (reached - below) / 2;
      (reaches(middle) ? reached : below) = middle;
    }
    return reached;
  }
  return std::nullopt;
}

absl::StatusOr<PlannedModel> PlanModel(const ModelOptions& options, const PolicyOptions& policy,
                                       const Calibration* calibration) {
  auto geometry = MakeGeometry(options, Precision::kFp8Kv);
  if (!geometry.ok()) return geometry.status();
  Workload workload = {.batch = options.expected_seqs,
                       .tokens = options.expected_tokens,
                       .other_bytes = std::nullopt};
  if (options.other_bytes.has_value()) {
    workload.other_bytes = static_cast<double>(*options.other_bytes);
  }
  auto decision = DecidePrecision(*geometry, options.precision, workload, policy, calibration);
  if (!decision.ok()) return decision.status();
  if (decision->precision == Precision::kBf16) geometry = MakeGeometry(options, Precision::kBf16);
  if (!geometry.ok()) return geometry.status();
  return PlannedModel{*std::move(geometry), *std::move(decision)};
}

}  // namespace fp8kvd::config
