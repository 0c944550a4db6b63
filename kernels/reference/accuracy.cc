#include "kernels/reference/accuracy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "config/base/check.h"
#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "kernels/e4m3.h"
#include "kernels/reference/decode.h"

namespace fp8kvd::kernels::reference {
namespace {

constexpr double kSmallestNormal = 0x1p-6;  // of e4m3

// K or V as numbers, [tokens, kv_heads, head_dim].
using Numbers = std::vector<double>;

Numbers Widened(const std::vector<uint16_t>& rows) {
  Numbers numbers(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) numbers[i] = double{Bf16ToFloat(rows[i])};
  return numbers;
}

double Largest(const Numbers& numbers, size_t begin, size_t end) {
  double largest = 0;
  for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(numbers[i]));
  return largest;
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The scale of each (token, KV head) as fp32, the way a cache keeps it.
std::vector<float> ScalesOf(const AttentionRows& rows, const Numbers& exact, Way way) {
  const size_t dim = rows.head_dim;
  const size_t heads = rows.kv_heads;
  const size_t known = size_t{1} * rows.positions[0] * heads * dim;  // before the first step
  std::vector<float> scales(exact.size() / dim, 1.0F);
  const auto scale_of = [](double amax) { return static_cast<float>(amax) / kE4m3Max; };
  if (way == Way::kUnit) return scales;
  if (way == Way::kTensor || way == Way::kTransformers) {
    std::fill(scales.begin(), scales.end(), scale_of(Largest(exact, 0, known)));
    return scales;
  }
  std::vector<double> head_amax(heads, 0.0);
  for (size_t row = 0; row < known / dim; ++row) {
    double& amax = head_amax[row % heads];
    amax = std::max(amax, Largest(exact, row * dim, (row + 1) * dim));
  }
  for (size_t row = 0; row < scales.size(); ++row) {
    scales[row] = scale_of(way == Way::kHead ? head_amax[row % heads]
                                             : Largest(exact, row * dim, (row + 1) * dim));
  }
  return scales;
}

struct Stored {
  Numbers numbers;  // as read back
  double saturated = 0;
  double subnormal = 0;
};

Stored Store(const AttentionRows& rows, const Numbers& exact, Way way) {
  const std::vector<float> scales = ScalesOf(rows, exact, way);
  Stored stored;
  stored.numbers.resize(exact.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    const float scale = scales[i / rows.head_dim];
    if (scale == 0.0F) continue;  // nothing but zeros was known
    const float scaled = static_cast<float>(exact[i]) / scale;
    const double size = std::fabs(double{scaled});
    stored.saturated += size > double{kE4m3Max} ? 1 : 0;
    stored.subnormal += size < kSmallestNormal ? 1 : 0;
    const float value = E4m3Value(E4m3Encode(scaled));
    stored.numbers[i] = way == Way::kTransformers ? double{Bf16ToFloat(FloatToBf16(value * scale))}
                                                  : double{value} * double{scale};
  }
  return stored;
}

double RelativeL2(const Numbers& x, const Numbers& exact) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += (x[i] - exact[i]) * (x[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : 0.0;
}

using IsCancelled = std::function<bool()>;

// Attention of all steps, [steps, q_heads, head_dim]; of fewer once cancelled.
Numbers Attend(const AttentionRows& rows, const Numbers& k, const Numbers& v,
               const IsCancelled& is_cancelled) {
  DecodeInput input;
  input.kv_heads = rows.kv_heads;
  input.group = rows.group;
  input.head_dim = rows.head_dim;
  input.window = rows.window;
  input.sm_scale = rows.sm_scale;
  input.softcap = rows.softcap;
  const size_t q_row = size_t{1} * rows.kv_heads * rows.group * rows.head_dim;
  Numbers out;
  for (size_t step = 0; step < rows.positions.size() && !is_cancelled(); ++step) {
    input.q = &rows.q[step * q_row];
    input.pos = rows.positions[step];
    const DecodeOutput one = DecodeNumbers(input, k, v);
    out.insert(out.end(), one.out.begin(), one.out.end());
  }
  return out;
}

double WorstRow(const Numbers& x, const Numbers& exact, size_t head_dim) {
  double worst = 0;
  for (size_t begin = 0; begin < exact.size(); begin += head_dim) {
    const auto part = [&](const Numbers& of) {
      const auto at = of.begin() + static_cast<ptrdiff_t>(begin);
      return Numbers(at, at + static_cast<ptrdiff_t>(head_dim));
    };
    const double error = RelativeL2(part(x), part(exact));
    worst = std::max(worst, error);
  }
  return worst;
}

WayError MeasureWay(const AttentionRows& rows, const Numbers& k, const Numbers& v,
                    const Numbers& exact_out, Way way, const IsCancelled& is_cancelled) {
  Stored k_stored = Store(rows, k, way);
  Stored v_stored = Store(rows, v, way);
  WayError error;
  const double elements = static_cast<double>(k.size() + v.size());
  error.saturated = (k_stored.saturated + v_stored.saturated) / elements;
  error.subnormal = (k_stored.subnormal + v_stored.subnormal) / elements;
  if (way == Way::kRowKOnly) v_stored.numbers = v;
  if (way == Way::kRowVOnly) k_stored.numbers = k;
  error.k = RelativeL2(k_stored.numbers, k);
  error.v = RelativeL2(v_stored.numbers, v);
  const Numbers out = Attend(rows, k_stored.numbers, v_stored.numbers, is_cancelled);
  if (out.size() != exact_out.size()) return error;  // cancelled
  error.op = RelativeL2(out, exact_out);
  error.op_worst_row = WorstRow(out, exact_out, rows.head_dim);
  return error;
}

RowsProfile Profile(const AttentionRows& rows, const Numbers& exact) {
  const size_t dim = rows.head_dim;
  const size_t heads = rows.kv_heads;
  const Stored stored = Store(rows, exact, Way::kRow);
  RowsProfile profile;
  profile.amax = Largest(exact, 0, exact.size());
  profile.subnormal = stored.subnormal / static_cast<double>(exact.size());
  std::vector<double> channel_amax(heads * dim, 0.0);
  std::vector<double> amax_over_rms;
  for (size_t row = 0; row < exact.size() / dim; ++row) {
    double error = 0;
    double norm = 0;
    double amax = 0;
    for (size_t i = 0; i < dim; ++i) {
      const double x = exact[row * dim + i];
      const double off = stored.numbers[row * dim + i] - x;
      error += off * off;
      norm += x * x;
      amax = std::max(amax, std::fabs(x));
      double& channel = channel_amax[row % heads * dim + i];
      channel = std::max(channel, std::fabs(x));
    }
    if (norm == 0) continue;
    amax_over_rms.push_back(amax / std::sqrt(norm / static_cast<double>(dim)));
    profile.worst.push_back({static_cast<int32_t>(row / heads), static_cast<int32_t>(row % heads),
                             std::sqrt(error / norm), amax});
  }
  profile.amax_over_rms = Median(amax_over_rms);
  const double median = Median(channel_amax);
  const double largest = *std::max_element(channel_amax.begin(), channel_amax.end());
  profile.channel_amax_ratio = median > 0 ? largest / median : 0;
  std::stable_sort(profile.worst.begin(), profile.worst.end(),
                   [](const OutlierRow& a, const OutlierRow& b) { return a.error > b.error; });
  if (profile.worst.size() > kOutlierRows) profile.worst.resize(kOutlierRows);
  return profile;
}

// Fills in score_spread and effective_keys.
void MeasureScores(const AttentionRows& rows, const Numbers& k, Accuracy* accuracy) {
  const size_t dim = rows.head_dim;
  const size_t q_heads = size_t{1} * rows.kv_heads * rows.group;
  std::vector<double> spreads;
  std::vector<double> effective;
  std::vector<double> scores;
  for (size_t at = 0; at < rows.positions.size() * q_heads; ++at) {
    const int32_t last = rows.positions[at / q_heads];
    const int32_t first = rows.window == 0 ? 0 : std::max(0, last - rows.window + 1);
    const size_t kv_head = at % q_heads / rows.group;
    scores.clear();
    double sum = 0;
    double squares = 0;
    for (int32_t token = first; token <= last; ++token) {
      double dot = 0;
      for (size_t i = 0; i < dim; ++i) {
        dot += double{Bf16ToFloat(rows.q[at * dim + i])} *
               k[(size_t{1} * token * rows.kv_heads + kv_head) * dim + i];
      }
      double score = dot * double{rows.sm_scale};
      if (rows.softcap > 0) score = rows.softcap * std::tanh(score / rows.softcap);
      scores.push_back(score);
      sum += score;
      squares += score * score;
    }
    const double n = static_cast<double>(scores.size());
    spreads.push_back(std::sqrt(std::max(0.0, squares / n - sum / n * (sum / n))));
    const double largest = *std::max_element(scores.begin(), scores.end());
    double p_sum = 0;
    double p_squares = 0;
    for (const double score : scores) {
      const double p = std::exp(score - largest);
      p_sum += p;
      p_squares += p * p;
    }
    effective.push_back(p_sum * p_sum / p_squares);
  }
  accuracy->score_spread = Median(spreads);
  accuracy->effective_keys = Median(effective);
}

}  // namespace

const char* WayName(Way way) {
  constexpr const char* kNames[kWays] = {"row",    "row_k_only", "row_v_only",  "head",
                                         "tensor", "scale_1.0",  "transformers"};
  return kNames[static_cast<int>(way)];
}

Accuracy MeasureAccuracy(const AttentionRows& rows) {
  return *MeasureAccuracy(rows, [] { return false; });
}

std::optional<Accuracy> MeasureAccuracy(const AttentionRows& rows,
                                        const std::function<bool()>& is_cancelled) {
  FP8KVD_CHECK(!rows.positions.empty() && rows.positions.back() < rows.tokens());
  FP8KVD_CHECK(rows.k.size() == rows.v.size());
  const Numbers k = Widened(rows.k);
  const Numbers v = Widened(rows.v);
  const Numbers exact_out = Attend(rows, k, v, is_cancelled);
  Accuracy accuracy;
  for (int way = 0; way < kWays && !is_cancelled(); ++way) {
    accuracy.ways[way] = MeasureWay(rows, k, v, exact_out, static_cast<Way>(way), is_cancelled);
  }
  if (is_cancelled()) return std::nullopt;
  accuracy.k = Profile(rows, k);
  accuracy.v = Profile(rows, v);
  MeasureScores(rows, k, &accuracy);
  return accuracy;
}

}  // namespace fp8kvd::kernels::reference
