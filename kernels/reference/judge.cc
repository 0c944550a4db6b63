#include "kernels/reference/judge.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fp8kvd::kernels::reference {
namespace {

constexpr int kMismatchesNamed = 5;

// An allowance below which no value matters: attention may treat such as zero.
constexpr double kTiny = 0x1p-100;

// Collects what is wrong: the first few by name, the rest by number.
class Mismatches {
 public:
  void Add(const std::string& what, int64_t at, double got, double want, double allowed) {
    if (++count_ > kMismatchesNamed) return;
    text_ += what + "[" + std::to_string(at) + "] is " + std::to_string(got) + ", right is " +
             std::to_string(want) + " +- " + std::to_string(allowed) + "; ";
  }
  std::string Text() const {
    return count_ == 0 ? "" : text_ + std::to_string(count_) + " elements are off; ";
  }

 private:
  int64_t count_ = 0;
  std::string text_;
};

void JudgeElements(const Answer& answer, const DecodeOutput& right, bool is_bf16, Verdict& verdict,
                   Mismatches& mismatches) {
  for (size_t i = 0; i < right.out.size(); ++i) {
    const double got = static_cast<double>(answer.out[i]);
    const double output_rounding = is_bf16 ? std::fabs(right.out[i]) : 0.0;
    const double allowed = 1.1 * 0x1p-8 * (right.out_abs[i] + output_rounding) + kTiny;
    const double error = std::fabs(got - right.out[i]);
    if (!(error <= allowed)) {
      mismatches.Add("out", static_cast<int64_t>(i), got, right.out[i], allowed);
    }
    verdict.worst_element = std::max(verdict.worst_element, error / allowed);
  }
}

void JudgeLse(const Answer& answer, const DecodeOutput& right, Mismatches& mismatches) {
  if (answer.lse.empty()) return;
  for (size_t i = 0; i < right.lse.size(); ++i) {
    const double got = static_cast<double>(answer.lse[i]);
    if (got == right.lse[i]) continue;  // both -inf
    const double allowed = 0x1p-18 * right.score_abs[i] + 0x1p-16 * std::fabs(right.lse[i]) + 1e-5;
    if (!(std::fabs(got - right.lse[i]) <= allowed) || std::isinf(right.lse[i])) {
      mismatches.Add("lse", static_cast<int64_t>(i), got, right.lse[i], allowed);
    }
  }
}

}  // namespace

Verdict Judge(const Answer& answer, const DecodeOutput& right, OutType out_type) {
  Verdict verdict;
  if (answer.out.size() != right.out.size() ||
      (!answer.lse.empty() && answer.lse.size() != right.lse.size())) {
    verdict.holds = false;
    verdict.why = "the answer has another size than the right one";
    return verdict;
  }
  const bool is_bf16 = out_type == OutType::kBf16;
  Mismatches mismatches;
  JudgeElements(answer, right, is_bf16, verdict, mismatches);
  JudgeLse(answer, right, mismatches);
  verdict.why = mismatches.Text();

  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < right.out.size(); ++i) {
    const double off = static_cast<double>(answer.out[i]) - right.out[i];
    error += off * off;
    norm += right.out[i] * right.out[i];
  }
  const double floor = kTiny * std::sqrt(static_cast<double>(right.out.size()));
  verdict.relative_l2 = std::sqrt(error) / (std::sqrt(norm) + floor);
  const double allowed = is_bf16 ? 3e-3 : 2e-3;
  if (!(std::sqrt(error) <= allowed * std::sqrt(norm) + floor)) {
    verdict.why += "relative L2 is " + std::to_string(verdict.relative_l2) + ", allowed is " +
                   std::to_string(allowed);
  }
  verdict.holds = verdict.why.empty();
  return verdict;
}

Verdict JudgeTwoBackends(const std::vector<float>& a, const std::vector<float>& b) {
  constexpr double kAllowed = 4e-3;
  Verdict verdict;
  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double off = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    error += off * off;
    norm += static_cast<double>(a[i]) * static_cast<double>(a[i]);
  }
  const double floor = kTiny * std::sqrt(static_cast<double>(a.size()));
  verdict.relative_l2 = std::sqrt(error) / (std::sqrt(norm) + floor);
  if (a.size() != b.size() || !(std::sqrt(error) <= kAllowed * std::sqrt(norm) + floor)) {
    verdict.holds = false;
    verdict.why = "relative L2 between two backends is " + std::to_string(verdict.relative_l2) +
                  ", allowed is " + std::to_string(kAllowed);
  }
  return verdict;
}

void AppendTo(DecodeOutput& a, const DecodeOutput& b) {
  a.out.insert(a.out.end(), b.out.begin(), b.out.end());
  a.out_abs.insert(a.out_abs.end(), b.out_abs.begin(), b.out_abs.end());
  a.lse.insert(a.lse.end(), b.lse.begin(), b.lse.end());
  a.score_abs.insert(a.score_abs.end(), b.score_abs.begin(), b.score_abs.end());
}

}  // namespace fp8kvd::kernels::reference
