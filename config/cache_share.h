// config/cache_share.h: how much of a step's bytes the cache is, what fp8_kv would win by it, and
// the choice of precision that follows, with every number and a sentence that says why.
//
//   kv_bytes = batch * sum over layers of
//              (tokens, at most the window) * 2 * kv_heads * head_dim * 2
//   share    = kv_bytes / (kv_bytes + other_bytes), of what a bf16 step reads
//   r        = fp8_kv / bf16 time of attention at that batch and context: calibrated
//              (calibration.h; of groups that see unequal contexts the mean by their bytes), else
//              given, else (head_dim + 4) / (2 * head_dim), the ratio of the bytes, which holds
//              where attention is bound by reading them
//   speed-up of a step = 1 / (1 - share * (1 - r))
//   with calls = the same of (kv_bytes + other_bytes) / read_bytes_per_s + layers * rpc_us
//
// Layers that stay bf16 (bf16_layers) are part of kv_bytes and win nothing: their bytes leave the
// share that decides and that the speed-up is made of. Numbers are doubles: exact to 2^53 bytes,
// and no batch is so large that one overflows. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

#include "config/base/geometry.h"
#include "config/calibration.h"
#include "config/options.h"

namespace fp8kvd::config {

// The share for a model whose layers are alike and see all tokens. A negative argument counts as 0;
// with no bytes at all the share is 0. Spelt as in Python: kernels/reference/format.h says why.
double kv_cache_share(int64_t batch, int64_t tokens, int64_t layers, int64_t kv_heads,
                      int64_t head_dim, int64_t other_bytes);

// Bytes of K and V that a step of the model reads, each layer limited by its window, without page
// rounding: in the precision of each of its groups, or as if all were bf16.
double KvBytesRead(const ModelGeometry& geometry, int64_t batch, int64_t tokens);
double KvBytesReadBf16(const ModelGeometry& geometry, int64_t batch, int64_t tokens);

// Bytes in fp8_kv over bytes in bf16.
double BytesRatio(int32_t head_dim);

// 1 / (1 - share * (1 - ratio)).
double PredictedSpeedup(double share, double ratio);

// What one step is. Not given other_bytes: unknown.
struct Workload {
  int64_t batch = 0;   // sequences
  int64_t tokens = 0;  // of each
  std::optional<double> other_bytes;
};

// Where r is from.
enum class RatioSource : uint8_t { kBytes = 0, kGiven = 1, kMeasured = 2 };
const char* RatioSourceName(RatioSource source);  // "bytes", "given", "measured"
const char* PrecisionName(Precision precision);   // "bf16", "fp8_kv"

struct PrecisionDecision {
  Precision precision = Precision::kBf16;
  std::string reason;  // one sentence with every number below

  int64_t batch = 0;
  int64_t tokens = 0;
  double kv_bytes = 0;           // of a bf16 step
  double kv_bytes_fp8_kv = 0;    // of an fp8_kv step, bf16_layers as they are
  double convertible_bytes = 0;  // kv_bytes without those of bf16_layers
  std::optional<double> other_bytes;
  double cache_share = 0;  // kv_bytes / (kv_bytes + other_bytes); 0 while other_bytes is unknown
  double convertible_share = 0;  // the same of convertible_bytes: what decides
  double cache_share_min = 0;
  double ratio = 0;  // r
  RatioSource ratio_source = RatioSource::kBytes;
  // For fp8_kv, whichever was chosen: of a step, and of attention alone.
  double predicted_speedup = 1;
  double attention_speedup = 1;
  // Of a step whose every layer costs a call besides; nothing while one of the two before is
  // unknown.
  std::optional<double> rpc_us;
  std::optional<double> read_bytes_per_s;
  std::optional<double> speedup_with_calls;
};

// Decides for a model whose geometry was made with Precision::kFp8Kv: its bf16 groups are those
// that stay bf16. auto takes fp8_kv when it is allowed, r < 1, and the convertible share of a known
// step reaches cache_share_min; below kShortTokens a calibrated or given r is needed too.
// calibration: of the device in use, or null. INVALID_ARGUMENT for fp8_kv without allow_fp8_kv, and
// says how to opt in.
absl::StatusOr<PrecisionDecision> DecidePrecision(const ModelGeometry& geometry,
                                                  PrecisionChoice choice, const Workload& workload,
                                                  const PolicyOptions& policy,
                                                  const Calibration* calibration);

// Below two pages of tokens a launch is bound by its latency, not by bytes, so their ratio predicts
// nothing: a published kernel ran at 0.90x of bf16 at 77 tokens.
inline constexpr int64_t kShortTokens = 2 * kPageTokens;

// Speed-up of the step when each layer also costs a call of rpc_us microseconds, on a device that
// reads bytes_per_s. Nothing when other_bytes is unknown or bytes_per_s is not positive.
std::optional<double> SpeedupWithCalls(const PrecisionDecision& decision, int32_t layers,
                                       double rpc_us, double bytes_per_s);

// Fewest tokens at which the convertible share of this batch reaches share_min; nothing when no
// sequence of kSeqLenMax does.
std::optional<int64_t> CrossoverTokens(const ModelGeometry& geometry, int64_t batch,
                                       double other_bytes, double share_min);

// A model's options brought to an end: its precision and the geometry that has it.
struct PlannedModel {
  ModelGeometry geometry;
  PrecisionDecision decision;
};
absl::StatusOr<PlannedModel> PlanModel(const ModelOptions& options, const PolicyOptions& policy,
                                       const Calibration* calibration);

}  // namespace fp8kvd::config
