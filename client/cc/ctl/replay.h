// client/cc/ctl/replay.h: sends a capture through a daemon and compares what comes back with what
// the model had: the accuracy contract, end to end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cc/client.h"
#include "client/cc/ctl/capture.h"

namespace fp8kvd::ctl {

// bf16: fp32 softmax over the same rows differs by summation alone. The kernel's own bound.
inline constexpr double kBf16ErrorMax = 2e-3;
// fp8_kv: the error that the format is known to make on this layer, met within 2 %.
inline constexpr double kFp8ErrorTolerance = 0.02;

// A configured model that can serve a capture: the same shape, and a layer of the same window.
struct ReplayTarget {
  std::string model;
  uint32_t layer = 0;  // the captured one where the model has it, else the first that fits
  client::Precision precision = client::Precision::kUnspecified;
  std::vector<uint32_t> group_layers = {};  // those that share its pages
};

// All that fit, of one model (empty: of every model) and precision (kUnspecified: any), one for
// each precision. NOT_FOUND says what was looked for.
absl::StatusOr<std::vector<ReplayTarget>> FindTargets(const client::ServerInfo& info,
                                                      const Capture& capture,
                                                      const std::string& model,
                                                      client::Precision precision);

struct ReplayResult {
  double rel_l2 = 0;  // of the decoded steps against the captured output
  // Of the sequence's pages once all tokens are in: every layer of the group.
  uint64_t cache_bytes = 0;
  std::vector<double> call_ms;  // one decode call each
};

// Creates a sequence, appends all but the decoded steps in chunks, to every layer of the group (the
// pages hold them all, and a window lets none run far ahead), decodes those steps one by one in the
// target's layer, then `rounds` - 1 times more without appending (for the latencies), frees. The
// worst round's output counts.
absl::StatusOr<ReplayResult> Replay(client::Client& client, const Capture& capture,
                                    const ReplayTarget& target, int64_t rounds);

// What is allowed: {0, kBf16ErrorMax}, or the expected error and 2 % around it.
struct ErrorBounds {
  double min = 0;
  double max = 0;
};
ErrorBounds AllowedError(client::Precision precision, double expected_fp8);

// ||x - exact|| / ||exact|| in double; infinity when the sizes differ or something is not finite.
double RelativeL2(absl::Span<const float> x, absl::Span<const float> exact);

}  // namespace fp8kvd::ctl
