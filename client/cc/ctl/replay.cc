#include "client/cc/ctl/replay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "client/cc/ctl/handles.h"

namespace fp8kvd::ctl {
namespace {

constexpr size_t kChunkTokens = 256;
constexpr float kSmScaleTolerance = 1e-6F;  // a configuration may write 1/sqrt(d) with few digits

bool Fits(const client::ModelInfo& model, const client::LayerGroupInfo& group, const Capture& c) {
  return model.q_heads == static_cast<uint32_t>(c.q_heads) &&
         model.kv_heads == static_cast<uint32_t>(c.kv_heads) &&
         model.head_dim == static_cast<uint32_t>(c.head_dim) &&
         std::abs(model.sm_scale - c.sm_scale) <= kSmScaleTolerance &&
         group.window == static_cast<uint32_t>(c.window) && group.softcap == c.softcap &&
         !group.has_sinks && !group.layers.empty();
}

// Decodes every captured step once. In the first round each brings its own K and V.
absl::Status DecodeSteps(client::Client& client, const Capture& c, const ReplayTarget& target,
                         const client::Handle& handle, bool append, std::vector<float>& out,
                         std::vector<double>& call_ms) {
  const size_t kv_row = static_cast<size_t>(c.kv_row());
  const size_t q_row = static_cast<size_t>(c.q_row());
  for (size_t step = 0; step < c.positions.size(); ++step) {
    const auto pos = static_cast<uint64_t>(c.positions[step]);
    client::DecodeArgs args{.model = target.model,
                            .layer = target.layer,
                            .handles = {&handle, 1},
                            .positions = {&pos, 1},
                            .q = absl::MakeConstSpan(c.q).subspan(step * q_row, q_row),
                            .out_type = client::OutType::kFp32};
    if (append) {
      args.k = absl::MakeConstSpan(c.k).subspan(pos * kv_row, kv_row);
      args.v = absl::MakeConstSpan(c.v).subspan(pos * kv_row, kv_row);
    }
    const auto begin = std::chrono::steady_clock::now();
    absl::StatusOr<client::DecodeReply> reply = client.Decode(args);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    if (!reply.ok()) return reply.status();
    if (!reply->item_errors.empty()) return reply->item_errors[0].status;
    call_ms.push_back(took.count());
    out.insert(out.end(), reply->out_fp32.begin(), reply->out_fp32.end());
  }
  return absl::OkStatus();
}

absl::Status AppendPrompt(client::Client& client, const Capture& c, const ReplayTarget& target,
                          const client::Handle& handle) {
  const auto prompt = static_cast<size_t>(c.positions[0]);
  const auto kv_row = static_cast<size_t>(c.kv_row());
  for (size_t pos = 0; pos < prompt; pos += kChunkTokens) {
    const size_t n = std::min(kChunkTokens, prompt - pos);
    for (const uint32_t layer : target.group_layers) {
      absl::Status status =
          client.Append({.model = target.model,
                         .handle = handle,
                         .layer = layer,
                         .pos = pos,
                         .n = n,
                         .k = absl::MakeConstSpan(c.k).subspan(pos * kv_row, n * kv_row),
                         .v = absl::MakeConstSpan(c.v).subspan(pos * kv_row, n * kv_row)});
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> CacheBytes(client::Client& client, const client::Handle& handle) {
  absl::StatusOr<client::StatReply> stat = client.StatSequences({&handle, 1});
  if (!stat.ok()) return stat.status();
  if (!stat->item_errors.empty()) return stat->item_errors[0].status;
  if (stat->sequences.size() != 1) return absl::InternalError("stat of one sequence gave none");
  return stat->sequences[0].bytes;
}

}  // namespace

absl::StatusOr<std::vector<ReplayTarget>> FindTargets(const client::ServerInfo& info,
                                                      const Capture& capture,
                                                      const std::string& model,
                                                      client::Precision precision) {
  std::vector<ReplayTarget> targets;
  for (const client::ModelInfo& candidate : info.models) {
    if (!model.empty() && candidate.name != model) continue;
    for (const client::LayerGroupInfo& group : candidate.groups) {
      bool have = false;
      for (const ReplayTarget& t : targets) have = have || t.precision == group.precision;
      const bool wanted =
          precision == client::Precision::kUnspecified || precision == group.precision;
      if (have || !wanted || !Fits(candidate, group, capture)) continue;
      const auto captured =
          std::find(group.layers.begin(), group.layers.end(), static_cast<uint32_t>(capture.layer));
      targets.push_back({candidate.name,
                         captured == group.layers.end() ? group.layers[0] : *captured,
                         group.precision, group.layers});
    }
  }
  if (targets.empty()) {
    return absl::NotFoundError(absl::StrCat(
        "no ", precision == client::Precision::kUnspecified ? "" : PrecisionName(precision),
        " model", model.empty() ? "" : " named ", model, " of the daemon has ", capture.q_heads,
        " q_heads, ", capture.kv_heads, " kv_heads, head_dim ", capture.head_dim, ", sm_scale ",
        capture.sm_scale, " and a layer with window ", capture.window,
        "; start fp8kvd with deploy/example.textproto, or choose with --model"));
  }
  return targets;
}

absl::StatusOr<ReplayResult> Replay(client::Client& client, const Capture& capture,
                                    const ReplayTarget& target, int64_t rounds) {
  absl::StatusOr<std::vector<client::Sequence>> created = client.CreateSequences(
      {.model = target.model, .expected_tokens = static_cast<uint64_t>(capture.tokens)});
  if (!created.ok()) return created.status();
  if (created->size() != 1) return absl::InternalError("creating one sequence gave none");
  client::Sequence& sequence = created->front();
  absl::Status status = AppendPrompt(client, capture, target, sequence.handle());
  if (!status.ok()) return status;
  ReplayResult result;
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<float> out;
    status = DecodeSteps(client, capture, target, sequence.handle(), /*append=*/round == 0, out,
                         result.call_ms);
    if (!status.ok()) return status;
    result.rel_l2 = std::max(result.rel_l2, RelativeL2(out, capture.out));
  }
  absl::StatusOr<uint64_t> bytes = CacheBytes(client, sequence.handle());
  if (!bytes.ok()) return bytes.status();
  result.cache_bytes = *bytes;
  if (status = sequence.Free(); !status.ok()) return status;
  return result;
}

ErrorBounds AllowedError(client::Precision precision, double expected_fp8) {
  if (precision == client::Precision::kBf16) return {0, kBf16ErrorMax};
  return {expected_fp8 * (1 - kFp8ErrorTolerance), expected_fp8 * (1 + kFp8ErrorTolerance)};
}

double RelativeL2(absl::Span<const float> x, absl::Span<const float> exact) {
  if (x.size() != exact.size() || exact.empty()) return std::numeric_limits<double>::infinity();
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (double{x[i]} - exact[i]) * (double{x[i]} - exact[i]);
    norm += double{exact[i]} * exact[i];
  }
  const double error = std::sqrt(difference / norm);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

}  // namespace fp8kvd::ctl
