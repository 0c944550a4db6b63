#include "kernels/reference/accuracy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

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

Stored StoredBy(const AttentionRows& rows, const Numbers& exact, Way way) {
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

RowsProfile Profile(const AttentionRows& rows, const Numbers& exact) {
  const size_t dim = rows.head_dim;
  const size_t heads = rows.kv_heads;
  const Stored stored = StoredBy(rows, exact, Way::kRow);
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

}  // namespace

const char* WayName(Way way) {
  constexpr const char* kNames[kWays] = {"row",    "row_k_only", "row_v_only",  "head",
                                         "tensor", "scale_1.0",  "transformers"};
  return kNames[static_cast<int>(way)];
}

AccuracyMeasurement::AccuracyMeasurement(AttentionRows rows)
    : rows_(std::move(rows)), k_(Widened(rows_.k)), v_(Widened(rows_.v)) {
  FP8KVD_CHECK(!rows_.positions.empty() && rows_.positions.back() < rows_.tokens());
  FP8KVD_CHECK(k_.size() == v_.size());
}

bool AccuracyMeasurement::Continue() {
  const bool is_exact = round_ == 0;
  const bool is_scores = round_ == kWays + 1;
  const Way way = static_cast<Way>(round_ - 1);
  if (is_scores) {
    MeasureScores(step_);
  } else if (is_exact) {
    AttendStep(k_, v_);
  } else {
    if (step_ == 0) Store(way);
    AttendStep(k_stored_, v_stored_);
  }
  if (++step_ < rows_.positions.size()) return true;
  step_ = 0;
  ++round_;
  if (is_exact) {
    exact_out_.swap(out_);
  } else if (!is_scores) {
    EndWay(way);
  } else {
    accuracy_.k = Profile(rows_, k_);
    accuracy_.v = Profile(rows_, v_);
    accuracy_.score_spread = Median(spreads_);
    accuracy_.effective_keys = Median(effective_);
  }
  out_.clear();
  return !is_scores;
}

void AccuracyMeasurement::Store(Way way) {
  Stored k = StoredBy(rows_, k_, way);
  Stored v = StoredBy(rows_, v_, way);
  WayError& error = accuracy_.ways[static_cast<size_t>(way)];
  const double elements = static_cast<double>(k_.size() + v_.size());
  error.saturated = (k.saturated + v.saturated) / elements;
  error.subnormal = (k.subnormal + v.subnormal) / elements;
  k_stored_ = std::move(k.numbers);
  v_stored_ = std::move(v.numbers);
  if (way == Way::kRowVOnly) k_stored_ = k_;
  if (way == Way::kRowKOnly) v_stored_ = v_;
  error.k = RelativeL2(k_stored_, k_);
  error.v = RelativeL2(v_stored_, v_);
}

void AccuracyMeasurement::AttendStep(const std::vector<double>& k, const std::vector<double>& v) {
  DecodeInput input;
  input.kv_heads = rows_.kv_heads;
  input.group = rows_.group;
  input.head_dim = rows_.head_dim;
  input.window = rows_.window;
  input.sm_scale = rows_.sm_scale;
  input.softcap = rows_.softcap;
  input.q = &rows_.q[step_ * rows_.kv_heads * rows_.group * rows_.head_dim];
  input.pos = rows_.positions[step_];
  const DecodeOutput one = DecodeNumbers(input, k, v);
  out_.insert(out_.end(), one.out.begin(), one.out.end());
}

void AccuracyMeasurement::EndWay(Way way) {
  WayError& error = accuracy_.ways[static_cast<size_t>(way)];
  error.op = RelativeL2(out_, exact_out_);
  error.op_worst_row = WorstRow(out_, exact_out_, rows_.head_dim);
}

void AccuracyMeasurement::MeasureScores(size_t step) {
  const size_t dim = rows_.head_dim;
  const size_t q_heads = size_t{1} * rows_.kv_heads * rows_.group;
  const int32_t last = rows_.positions[step];
  const int32_t first = rows_.window == 0 ? 0 : std::max(0, last - rows_.window + 1);
  std::vector<double> scores;
  for (size_t head = 0; head < q_heads; ++head) {
    const uint16_t* const q = &rows_.q[(step * q_heads + head) * dim];
    const size_t kv_head = head / rows_.group;
    scores.clear();
    double sum = 0;
    double squares = 0;
    for (int32_t token = first; token <= last; ++token) {
      double dot = 0;
      for (size_t i = 0; i < dim; ++i) {
        dot += double{Bf16ToFloat(q[i])} *
               k_[(size_t{1} * token * rows_.kv_heads + kv_head) * dim + i];
      }
      double score = dot * double{rows_.sm_scale};
      if (rows_.softcap > 0) score = rows_.softcap * std::tanh(score / rows_.softcap);
      scores.push_back(score);
      sum += score;
      squares += score * score;
    }
    const double n = static_cast<double>(scores.size());
    spreads_.push_back(std::sqrt(std::max(0.0, squares / n - sum / n * (sum / n))));
    const double largest = *std::max_element(scores.begin(), scores.end());
    double p_sum = 0;
    double p_squares = 0;
    for (const double score : scores) {
      const double p = std::exp(score - largest);
      p_sum += p;
      p_squares += p * p;
    }
    effective_.push_back(p_sum * p_sum / p_squares);
  }
}

Accuracy MeasureAccuracy(const AttentionRows& rows) {
  AccuracyMeasurement measurement(rows);
  while (measurement.Continue()) {
  }
  return measurement.accuracy();
}

}  // namespace fp8kvd::kernels::reference
