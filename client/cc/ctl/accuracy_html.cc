#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cc/ctl/accuracy.h"
#include "client/cc/ctl/svg.h"

namespace fp8kvd::ctl {
namespace {

using kernels::reference::Way;

struct Shown {
  Way way;
  const char* name;
  const char* style;
};
constexpr Shown kShown[] = {{Way::kRow, "fp8_kv, a scale per (token, KV head)", "s0"},
                            {Way::kHead, "static scale per KV head", "s2"},
                            {Way::kTensor, "static scale per tensor", "s3"},
                            {Way::kUnit, "scale 1.0", "s5"},
                            {Way::kTransformers, "transformers' fp8 cache layer", "s1"}};

constexpr char kPageStyle[] =
    ":root{color-scheme:light dark;--ink:#1f2328;--paper:#ffffff;--muted:#656d76;--line:#d8dee4;"
    "--good:#1a7f37;--bad:#cf222e}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--muted:#8d96a0;"
    "--line:#30363d;--good:#3fb950;--bad:#ff7b72}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);"
    "max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}"
    "p.note{color:var(--muted);margin:.3rem 0}table{border-collapse:collapse;font-size:.85rem}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right}"
    "th:first-child,td:first-child{text-align:left;white-space:nowrap}"
    "th{font-weight:600;vertical-align:bottom}"
    ".scroll{overflow-x:auto}svg{max-width:100%;height:auto}"
    ".good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}";

std::string LayerName(const LayerAccuracy& layer) {
  constexpr size_t kModelMax = 22;
  const std::string& model = layer.capture.model;
  return absl::StrCat(model.size() <= kModelMax ? model : model.substr(0, kModelMax - 3) + "...",
                      " layer ", layer.capture.layer);
}

// A linear axis from 0 to a round number above `largest`.
double RoundUp(double largest) {
  const double unit = std::pow(10, std::floor(std::log10(std::max(largest, 1e-9))));
  for (const double step : {1.0, 2.0, 5.0, 10.0}) {
    if (step * unit >= largest) return step * unit;
  }
  return 10 * unit;
}

// One row a layer: a dot for each way, and the near-lossless tier.
std::string ErrorPlot(const std::vector<LayerAccuracy>& layers) {
  constexpr double kLeft = 230;
  constexpr double kWidth = 620;
  constexpr double kTop = 76;
  constexpr double kRow = 26;
  double largest = kNearLosslessMax;
  for (const LayerAccuracy& layer : layers) {
    for (const Shown& shown : kShown) largest = std::max(largest, layer.accuracy.of(shown.way).op);
  }
  const double end = RoundUp(largest);
  const double bottom = kTop + kRow * static_cast<double>(layers.size());
  Svg svg(kLeft + kWidth + 30, bottom + 44);
  const auto x = [&](double op) { return kLeft + kWidth * op / end; };
  double key_x = 12;
  double key_y = 18;
  for (const Shown& shown : kShown) {
    svg.Dot(key_x, key_y - 4, shown.style, shown.name);
    svg.Text(key_x + 9, key_y, shown.name);
    key_x += 290;
    if (key_x > 700) {
      key_x = 12;
      key_y += 20;
    }
  }
  for (int tick = 0; tick <= 5; ++tick) {
    const double at = x(end * tick / 5);
    svg.Line(at, kTop - 6, at, bottom, "grid");
    svg.Text(at, bottom + 16, absl::StrFormat("%.3g", end * tick / 5), Anchor::kMiddle, "muted");
  }
  svg.Line(x(kNearLosslessMax), kTop - 12, x(kNearLosslessMax), bottom, "s4", 1.5);
  svg.Text(x(kNearLosslessMax) + 4, kTop - 10, "near-lossless up to here", Anchor::kStart, "s4",
           11);
  for (size_t i = 0; i < layers.size(); ++i) {
    const double y = kTop + kRow * (static_cast<double>(i) + 0.5);
    svg.Text(kLeft - 10, y + 4, LayerName(layers[i]), Anchor::kEnd);
    svg.Line(kLeft, y, kLeft + kWidth, y, "grid");
    for (auto shown = std::rbegin(kShown); shown != std::rend(kShown); ++shown) {
      const double op = layers[i].accuracy.of(shown->way).op;
      svg.Dot(x(op), y, shown->style, absl::StrFormat("%s: %.4f", shown->name, op));
    }
  }
  svg.Text(kLeft + kWidth / 2, bottom + 36, "relative L2 of the attention output", Anchor::kMiddle,
           "muted");
  return svg.str();
}

// K's and V's own part in the error of the output.
std::string PartsPlot(const std::vector<LayerAccuracy>& layers) {
  constexpr double kLeft = 230;
  constexpr double kWidth = 620;
  constexpr double kRow = 34;
  double largest = 0;
  for (const LayerAccuracy& layer : layers) {
    largest = std::max(
        {largest, layer.accuracy.of(Way::kRowKOnly).op, layer.accuracy.of(Way::kRowVOnly).op});
  }
  const double end = RoundUp(largest);
  const double bottom = 30 + kRow * static_cast<double>(layers.size());
  Svg svg(kLeft + kWidth + 60, bottom + 20);
  svg.Text(kLeft, 18, "K in fp8_kv, V exact", Anchor::kStart, "s0");
  svg.Text(kLeft + 190, 18, "V in fp8_kv, K exact", Anchor::kStart, "s1");
  for (size_t i = 0; i < layers.size(); ++i) {
    const double y = 30 + kRow * static_cast<double>(i);
    svg.Text(kLeft - 10, y + 20, LayerName(layers[i]), Anchor::kEnd);
    double offset = 3;
    for (const auto& [way, style] : {std::pair(Way::kRowKOnly, "s0"), {Way::kRowVOnly, "s1"}}) {
      const double op = layers[i].accuracy.of(way).op;
      svg.Rect(kLeft, y + offset, kWidth * op / end, 12, style);
      svg.Text(kLeft + kWidth * op / end + 5, y + offset + 10, absl::StrFormat("%.4f", op),
               Anchor::kStart, "muted", 11);
      offset += 14;
    }
  }
  return svg.str();
}

using Cells = std::vector<std::string>;

std::string HtmlTable(const Cells& head, const std::vector<Cells>& rows) {
  std::string html = "<div class=\"scroll\"><table><tr>";
  for (const std::string& cell : head) absl::StrAppend(&html, "<th>", EscapeXml(cell), "</th>");
  html += "</tr>\n";
  for (const Cells& row : rows) {
    html += "<tr>";
    for (const std::string& cell : row) absl::StrAppend(&html, "<td>", cell, "</td>");
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string YesNo(bool good) {
  return good ? "<span class=\"good\">yes</span>" : "<span class=\"bad\">NO</span>";
}

std::string Number(double value) { return absl::StrFormat("%.4f", value); }

std::string TableOf(const std::vector<LayerAccuracy>& layers, const Cells& head,
                    const std::function<Cells(const LayerAccuracy&)>& cells) {
  std::vector<Cells> rows;
  for (const LayerAccuracy& layer : layers) {
    rows.push_back({EscapeXml(LayerName(layer))});
    const Cells more = cells(layer);
    rows.back().insert(rows.back().end(), more.begin(), more.end());
  }
  return HtmlTable(head, rows);
}

std::string ErrorTable(const std::vector<LayerAccuracy>& layers) {
  return TableOf(layers,
                 {"layer", "fp8_kv", "worst (step, head)", "per head", "per tensor", "scale 1.0",
                  "transformers", "expected", "near-lossless"},
                 [](const LayerAccuracy& layer) -> Cells {
                   const auto op = [&](Way way) { return Number(layer.accuracy.of(way).op); };
                   return {op(Way::kRow),
                           Number(layer.accuracy.of(Way::kRow).op_worst_row),
                           op(Way::kHead),
                           op(Way::kTensor),
                           op(Way::kUnit),
                           op(Way::kTransformers),
                           layer.expected_op.has_value() ? Number(*layer.expected_op) : "-",
                           YesNo(layer.near_lossless())};
                 });
}

std::string CauseTable(const std::vector<LayerAccuracy>& layers) {
  return TableOf(layers,
                 {"layer", "K error", "V error", "K subnormal", "V subnormal", "clipped per tensor",
                  "subnormal per tensor", "K channel outlier", "V channel outlier", "score spread",
                  "keys averaged"},
                 [](const LayerAccuracy& layer) -> Cells {
                   const kernels::reference::Accuracy& a = layer.accuracy;
                   return {Number(a.of(Way::kRow).k),
                           Number(a.of(Way::kRow).v),
                           Percent(a.k.subnormal),
                           Percent(a.v.subnormal),
                           Percent(a.of(Way::kTensor).saturated),
                           Percent(a.of(Way::kTensor).subnormal),
                           absl::StrFormat("%.1fx", a.k.channel_amax_ratio),
                           absl::StrFormat("%.1fx", a.v.channel_amax_ratio),
                           absl::StrFormat("%.2f", a.score_spread),
                           absl::StrFormat("%.1f", a.effective_keys)};
                 });
}

std::string OutlierTable(const std::vector<LayerAccuracy>& layers) {
  std::vector<Cells> rows;
  for (const LayerAccuracy& layer : layers) {
    for (const auto& [name, profile] :
         {std::pair("K", &layer.accuracy.k), std::pair("V", &layer.accuracy.v)}) {
      for (const kernels::reference::OutlierRow& row : profile->worst) {
        rows.push_back({EscapeXml(LayerName(layer)), name, absl::StrCat(row.token),
                        absl::StrCat(row.kv_head), Number(row.error),
                        absl::StrFormat("%.4g", row.amax)});
      }
    }
  }
  return HtmlTable({"layer", "of", "token", "KV head", "error", "largest element"}, rows);
}

std::string KernelTable(const std::vector<LayerAccuracy>& layers) {
  return TableOf(
      layers,
      {"layer", "pairs", "fp32 out (2e-3)", "bf16 out (3e-3)", "worst element",
       "control: V scale x 1.05", "control: one scale for all", "controls refused", "held"},
      [](const LayerAccuracy& layer) -> Cells {
        const KernelCheck& k = *layer.kernel;
        return {absl::StrCat(k.pairs),
                absl::StrFormat("%.2e", k.rel_l2_fp32),
                absl::StrFormat("%.2e", k.rel_l2_bf16),
                Percent(k.worst_element),
                absl::StrFormat("%.3f", k.control_v_scale),
                absl::StrFormat("%.3f", k.control_one_scale),
                YesNo(k.controls_refused),
                YesNo(k.held)};
      });
}

std::string KernelPart(const std::vector<LayerAccuracy>& layers) {
  const bool checked =
      std::all_of(layers.begin(), layers.end(), [](const auto& l) { return l.kernel.has_value(); });
  if (!checked) {
    return "<p class=\"note\">Measured by a daemon, whose kernels fp8kvctl replay checks.</p>\n";
  }
  return absl::StrCat(
      "<h2>The kernel</h2>\n", KernelTable(layers),
      "<p class=\"note\">The CPU kernel against double precision on the same codes and scales. The "
      "controls are broken on purpose: a judge that let them pass would prove nothing.</p>\n");
}

std::string VerdictLine(const std::vector<LayerAccuracy>& layers) {
  const auto by_op = [](const LayerAccuracy& a, const LayerAccuracy& b) { return a.op() < b.op(); };
  const auto [least, most] = std::minmax_element(layers.begin(), layers.end(), by_op);
  const auto lossy = std::count_if(layers.begin(), layers.end(), [](const LayerAccuracy& layer) {
    return !layer.near_lossless();
  });
  std::string text = absl::StrFormat(
      "<p>The attention output is off by <b>%.1f %% to %.1f %%</b> (relative L2) with K and V in "
      "fp8_kv. ",
      100 * least->op(), 100 * most->op());
  if (lossy == 0) {
    text += "<span class=\"good\">Every layer is near-lossless</span> (at most 8 %).</p>\n";
  } else {
    absl::StrAppendFormat(&text,
                          "<span class=\"bad\">%d of %d layers are above the near-lossless 8 %%"
                          "</span>: keep those bf16 (bf16_layers in the configuration).</p>\n",
                          lossy, layers.size());
  }
  return text;
}

}  // namespace

std::string AccuracyHtml(const std::vector<LayerAccuracy>& layers) {
  return absl::StrCat(
      "<!doctype html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
      "<title>fp8_kv on captured attention</title>\n<style>",
      kPageStyle, "</style></head>\n<body>\n<h1>fp8_kv on captured attention</h1>\n",
      VerdictLine(layers), "<h2>Error of the attention output</h2>\n", ErrorPlot(layers),
      "<p class=\"note\">Against attention over the bf16 rows, in double precision: the formats' "
      "own "
      "errors, no kernel's. Static scales know the tokens before the first step and clip what "
      "comes "
      "later and is larger.</p>\n",
      ErrorTable(layers), "<h2>K's part and V's</h2>\n", PartsPlot(layers),
      "<p class=\"note\">K moves the scores, and with them which tokens count; V's error averages "
      "out over the tokens that do.</p>\n<h2>Where it comes from</h2>\n",
      CauseTable(layers),
      "<p class=\"note\">Subnormal: elements below 2<sup>-6</sup> of a row's scale, kept with "
      "fewer "
      "bits. Channel outlier: the largest channel's largest element over the median channel's. "
      "Score spread: standard deviation of the scores over the keys seen; the same error of K "
      "weighs more where it is large. Keys averaged: 1 / sum p<sup>2</sup>.</p>\n"
      "<h2>Rows that suffer most</h2>\n",
      OutlierTable(layers), KernelPart(layers), "</body>\n</html>\n");
}

}  // namespace fp8kvd::ctl
