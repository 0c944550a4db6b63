#include "client/cc/ctl/plan_map.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cc/ctl/output.h"
#include "client/cc/ctl/svg.h"

namespace fp8kvd::ctl {
namespace {

std::string Short(int64_t count) {
  if (count >= 1024 && count % 1024 == 0) return absl::StrCat(count / 1024, "k");
  return absl::StrCat(count);
}

// Darker is faster.
const char* Shade(double speedup) {
  if (speedup < 1.10) return " ";
  if (speedup < 1.25) return "░";
  if (speedup < 1.40) return "▒";
  if (speedup < 1.60) return "▓";
  return "█";
}

// From pale to deep blue over 1.0 … 2.0, and to red below 1.
std::string Colour(double speedup) {
  const double part = std::clamp(std::fabs(speedup - 1.0), 0.0, 1.0);
  const auto mix = [part](int pale, int deep) {
    return static_cast<int>(std::lround(pale + part * (deep - pale)));
  };
  if (speedup < 1.0) return absl::StrFormat("#%02x%02x%02x", 255, mix(240, 90), mix(236, 70));
  return absl::StrFormat("#%02x%02x%02x", mix(236, 6), mix(243, 62), mix(251, 140));
}

constexpr double kLeft = 70;
constexpr double kTop = 62;
constexpr double kCellWidth = 62;
constexpr double kCellHeight = 30;

}  // namespace

absl::StatusOr<PlanMap> MakePlanMap(const Question& question) {
  PlanMap map;
  for (int64_t batch = 1; batch <= 256; batch *= 2) map.batches.push_back(batch);
  for (int64_t tokens = 256; tokens <= 131072; tokens *= 2) map.contexts.push_back(tokens);
  for (const int64_t batch : map.batches) {
    std::vector<double>& row = map.speedups.emplace_back();
    for (const int64_t tokens : map.contexts) {
      absl::StatusOr<config::PrecisionDecision> decision = question.Decide(batch, tokens);
      if (!decision.ok()) return decision.status();
      row.push_back(decision->predicted_speedup);
    }
    map.crossovers.push_back(question.Crossover(batch));
  }
  return map;
}

void PrintPlanMap(const PlanMap& map, std::ostream& out) {
  out << "\npredicted speed-up of a step by fp8_kv ( <1.10  ░<1.25  ▒<1.40  ▓<1.60  █ more; "
         "right of | it is chosen)\n"
      << absl::StrFormat("%-14s", "batch \\ tokens");
  for (const int64_t tokens : map.contexts) out << absl::StrFormat("%7s ", Short(tokens));
  out << "  fp8_kv from\n";
  for (size_t b = 0; b < map.batches.size(); ++b) {
    out << absl::StrFormat("%14d", map.batches[b]);
    const std::optional<int64_t>& crossover = map.crossovers[b];
    for (size_t t = 0; t < map.contexts.size(); ++t) {
      const bool chosen = crossover.has_value() && map.contexts[t] >= *crossover;
      const bool first = chosen && (t == 0 || map.contexts[t - 1] < *crossover);
      out << (first ? " |" : "  ") << absl::StrFormat("%5.2f", map.speedups[b][t])
          << Shade(map.speedups[b][t]);
    }
    out << "  " << (crossover.has_value() ? absl::StrCat(*crossover, " tokens") : "never") << '\n';
  }
}

std::string PlanMapSvg(const PlanMap& map, const Question& question) {
  const double width = kLeft + kCellWidth * static_cast<double>(map.contexts.size()) + 20;
  const double height = kTop + kCellHeight * static_cast<double>(map.batches.size()) + 66;
  Svg svg(width, height);
  svg.Text(14, 24,
           absl::StrCat("Predicted speed-up of a step by fp8_kv: ", question.model.model_type),
           Anchor::kStart, "ink", 16);
  const ModelGeometry& g = question.geometry;
  svg.Text(
      14, 44,
      absl::StrFormat("%d layers, %d q_heads, %d kv_heads, head_dim %d; fp8_kv is chosen right "
                      "of the line (share of the cache >= %.2g)",
                      g.layers, g.q_heads, g.kv_heads, g.head_dim, question.policy.cache_share_min),
      Anchor::kStart, "muted");
  const auto x_of = [&](double tokens) {
    return kLeft + kCellWidth * (std::log2(tokens / static_cast<double>(map.contexts[0])) + 0.5);
  };
  const double right = kLeft + kCellWidth * static_cast<double>(map.contexts.size());
  std::vector<std::pair<double, double>> line;
  for (size_t b = 0; b < map.batches.size(); ++b) {
    const double y = kTop + kCellHeight * static_cast<double>(b);
    svg.Text(kLeft - 8, y + 20, absl::StrCat(map.batches[b]), Anchor::kEnd);
    for (size_t t = 0; t < map.contexts.size(); ++t) {
      const double x = kLeft + kCellWidth * static_cast<double>(t);
      const double speedup = map.speedups[b][t];
      svg.Rect(x + 1, y + 1, kCellWidth - 2, kCellHeight - 2, Colour(speedup));
      svg.Text(x + kCellWidth / 2, y + 20, Fixed(speedup, 2), Anchor::kMiddle,
               speedup > 1.45 ? "#ffffff" : "#1f2328");
    }
    const double at = map.crossovers[b].has_value()
                          ? std::clamp(x_of(static_cast<double>(*map.crossovers[b])), kLeft, right)
                          : right;
    line.emplace_back(at, y);
    line.emplace_back(at, y + kCellHeight);
  }
  svg.Path(line, "s1", 3);
  const double bottom = kTop + kCellHeight * static_cast<double>(map.batches.size());
  for (size_t t = 0; t < map.contexts.size(); ++t) {
    svg.Text(kLeft + kCellWidth * (static_cast<double>(t) + 0.5), bottom + 18,
             Short(map.contexts[t]), Anchor::kMiddle);
  }
  svg.Text((kLeft + right) / 2, bottom + 38, "tokens of each sequence", Anchor::kMiddle, "muted");
  svg.Text(14, kTop - 4, "batch", Anchor::kStart, "muted");
  svg.Text(14, bottom + 58, "From the bytes of a step; not a measurement of one.", Anchor::kStart,
           "muted", 11);
  return svg.str();
}

}  // namespace fp8kvd::ctl
