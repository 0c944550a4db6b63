// kernels/reference/accuracy.h: what fp8_kv does to one layer's real attention, beside other ways
// to keep K and V in e4m3: errors of the output, of K and of V, and where they come from. All in
// double precision, so that an error is the format's own and no kernel's.
//
// Errors are relative L2, ||x - exact|| / ||exact||, over all steps and heads; exact is attention
// over the bf16 rows. The Python package has the same as fp8kvd.measure_accuracy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fp8kvd::kernels::reference {

// K and V of a sequence's tokens, and queries that attend to them. Rows as the model makes them.
struct AttentionRows {
  std::vector<uint16_t> k;         // bf16 [tokens, kv_heads, head_dim]
  std::vector<uint16_t> v;         // as k
  std::vector<uint16_t> q;         // bf16 [steps, kv_heads * group, head_dim]
  std::vector<int32_t> positions;  // [steps] where each query stands, below tokens, ascending
  int32_t kv_heads = 1;
  int32_t group = 1;
  int32_t head_dim = 0;
  int32_t window = 0;  // 0: all
  float sm_scale = 1.0F;
  float softcap = 0.0F;  // 0: off

  int32_t tokens() const {
    return static_cast<int32_t>(k.size() / (size_t{1} * kv_heads * head_dim));
  }
};

// A way to keep K and V in e4m3. Static ones know the tokens before the first step, which a server
// would have seen when it fixed its scales, and clip what comes later and is larger.
enum class Way : uint8_t {
  kRow = 0,       // ours: a scale for each (token, KV head), amax / 448
  kRowKOnly,      // the same for K alone, V exact
  kRowVOnly,      // and for V alone
  kHead,          // a static scale for each KV head
  kTensor,        // one static scale for K, one for V
  kUnit,          // scale 1.0
  kTransformers,  // by the rule of transformers 5.24: kTensor, frozen at the first update, which is
                  // all that stands before the first step; what is read back is rounded to bf16
};
inline constexpr int kWays = 7;
const char* WayName(Way way);  // "row", "row_k_only", …

struct WayError {
  double op = 0;            // of the attention output
  double op_worst_row = 0;  // the worst (step, query head)
  double k = 0;
  double v = 0;
  // Of all elements of K and V: larger than 448 x scale, so clipped; below 2^-6 x scale, so
  // kept with fewer bits, or as zero.
  double saturated = 0;
  double subnormal = 0;
};

struct OutlierRow {
  int32_t token = 0;
  int32_t kv_head = 0;
  double error = 0;  // of this row of codes x scale
  double amax = 0;
};

// Of K or of V, under a scale for each row.
struct RowsProfile {
  double amax = 0;
  double amax_over_rms = 0;       // of a row, median: how far its largest element stands out
  double channel_amax_ratio = 0;  // the largest channel's amax over the median channel's
  double subnormal = 0;           // share of elements below 2^-6 x scale
  std::vector<OutlierRow> worst;  // by error, worst first, kOutlierRows at most
};
inline constexpr int kOutlierRows = 5;

struct Accuracy {
  std::array<WayError, kWays> ways;  // by Way
  RowsProfile k;
  RowsProfile v;
  // Standard deviation of the scores over the keys that a (step, head) sees, median; and
  // 1 / sum p^2, the keys that it averages, median.
  double score_spread = 0;
  double effective_keys = 0;

  const WayError& of(Way way) const { return ways[static_cast<int>(way)]; }
};

// Of finite rows, with one step at least. Cost: steps x query heads x tokens x head_dim x 2 x
// (kWays + 2) multiplications; memory 32 bytes for each element of K and V, 16 for each of Q.
Accuracy MeasureAccuracy(const AttentionRows& rows);

// The same in pieces, for whoever has other things to do in between.
class AccuracyMeasurement {
 public:
  explicit AccuracyMeasurement(AttentionRows rows);

  // The attention of one step in one way of storing, and what belongs to it; true: there is more.
  bool Continue();
  const Accuracy& accuracy() const { return accuracy_; }  // once there is no more

 private:
  void Store(Way way);
  void AttendStep(const std::vector<double>& k, const std::vector<double>& v);
  void EndWay(Way way);
  void MeasureScores(size_t step);

  const AttentionRows rows_;
  const std::vector<double> k_;  // [tokens, kv_heads, head_dim]
  const std::vector<double> v_;
  std::vector<double> k_stored_;  // as read back
  std::vector<double> v_stored_;
  std::vector<double> exact_out_;  // [steps, q_heads, head_dim]
  std::vector<double> out_;        // of the way at hand, as far as it is
  std::vector<double> spreads_;    // of the scores, [steps, q_heads]
  std::vector<double> effective_;
  Accuracy accuracy_;
  int32_t round_ = 0;  // exact, then each way, then scores
  size_t step_ = 0;    // in the round
};

}  // namespace fp8kvd::kernels::reference
