#include "config/calibration.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "config/json.h"
#include "config/tree_fields.h"

namespace fp8kvd::config {
namespace {

constexpr int64_t kPointsMax = 4096;

// Logarithms of r by those of an abscissa.
using Curve = std::map<double, double>;

// Straight between two neighbours, constant beyond the ends; the curve has a point.
double At(const Curve& curve, double x) {
  const auto above = curve.lower_bound(x);
  if (above == curve.end()) return std::prev(above)->second;
  if (above == curve.begin() || above->first == x) return above->second;
  const auto below = std::prev(above);
  const double part = (x - below->first) / (above->first - below->first);
  return below->second + part * (above->second - below->second);
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  }
  return quoted + "\"";
}

void RequireMember(const Tree& tree, const char* name, TreeFields& fields) {
  if (fields.Has(name)) return;
  fields.Refuse(tree,
                absl::StrCat("\"", name, "\" is missing; make the file anew, with --calibrate"));
}

// A time, positive and finite.
double Time(TreeFields& fields, absl::string_view name, const Tree& of) {
  const double us = fields.Number(name, 0);
  if (!(us > 0) || !std::isfinite(us)) fields.Refuse(of, absl::StrCat(name, " must be above 0"));
  return us;
}

absl::StatusOr<CalibrationPoint> ReadPoint(const Tree& tree) {
  TreeFields fields(tree);
  CalibrationPoint point;
  point.head_dim = static_cast<int32_t>(fields.Int({"head_dim"}, 0, 1, kHeadDimMax));
  point.group = static_cast<int32_t>(fields.Int({"group"}, 0, 1, kGroupMax));
  point.kv_heads = static_cast<int32_t>(fields.Int({"kv_heads"}, 0, 1, kKvHeadsMax));
  point.batch = fields.Int({"batch"}, 0, 1, kSeqsMax);
  point.tokens = fields.Int({"tokens"}, 0, 1, kSeqLenMax);
  for (const char* name : {"head_dim", "group", "kv_heads", "batch", "tokens"}) {
    RequireMember(tree, name, fields);
  }
  point.bf16_us = Time(fields, "bf16_us", tree);
  point.fp8_kv_us = Time(fields, "fp8_kv_us", tree);
  if (!fields.status().ok()) return fields.status();
  return point;
}

}  // namespace

absl::StatusOr<Calibration> ParseCalibration(absl::string_view json) {
  const absl::StatusOr<Tree> tree = ParseJson(json);
  if (!tree.ok()) return tree.status();
  TreeFields fields(*tree);
  Calibration calibration;
  calibration.version = fields.Text("version");
  calibration.device_kind = fields.Text("device_kind");
  calibration.device_name = fields.Text("device_name");
  calibration.read_bytes_per_s = fields.Number("read_bytes_per_s", 0);
  calibration.call_us = fields.Number("call_us", 0);
  for (const char* name : {"version", "device_name", "read_bytes_per_s", "points"}) {
    RequireMember(*tree, name, fields);
  }
  if (!(calibration.read_bytes_per_s >= 0) || !(calibration.call_us >= 0)) {
    fields.Refuse(*tree, "read_bytes_per_s and call_us must not be negative");
  }
  const Tree* const points = fields.Array("points");
  if (!fields.status().ok()) return fields.status();
  if (static_cast<int64_t>(points->children.size()) > kPointsMax) {
    fields.Refuse(*points, absl::StrCat("at most ", kPointsMax, " points are read"));
    return fields.status();
  }
  for (const Tree& child : points->children) {
    absl::StatusOr<CalibrationPoint> point = ReadPoint(child);
    if (!point.ok()) return point.status();
    calibration.points.push_back(*point);
  }
  return calibration;
}

std::string FormatCalibration(const Calibration& calibration) {
  std::string text = absl::StrFormat(
      "{\n  \"version\": %s,\n  \"device_kind\": %s,\n  \"device_name\": %s,\n"
      "  \"read_bytes_per_s\": %.4g,\n  \"call_us\": %.4g,\n  \"points\": [",
      Quoted(calibration.version), Quoted(calibration.device_kind), Quoted(calibration.device_name),
      calibration.read_bytes_per_s, calibration.call_us);
  const char* separator = "\n";
  for (const CalibrationPoint& p : calibration.points) {
    absl::StrAppendFormat(
        &text,
        "%s    {\"head_dim\": %d, \"group\": %d, \"kv_heads\": %d, \"batch\": %d, "
        "\"tokens\": %d, \"bf16_us\": %.6g, \"fp8_kv_us\": %.6g}",
        separator, p.head_dim, p.group, p.kv_heads, p.batch, p.tokens, p.bf16_us, p.fp8_kv_us);
    separator = ",\n";
  }
  return text + "\n  ]\n}\n";
}

std::optional<double> MeasuredRatio(const Calibration& calibration, const LayerGroup& layer_group,
                                    int32_t group, int64_t batch, int64_t tokens) {
  const auto shape_fits = [&](const CalibrationPoint& p) {
    return p.head_dim == layer_group.head_dim && p.group == group;
  };
  // One number of kv_heads: the nearest that was measured.
  const auto distance = [&](const CalibrationPoint& p) {
    return std::fabs(std::log2(static_cast<double>(p.kv_heads) / layer_group.kv_heads));
  };
  const CalibrationPoint* nearest = nullptr;
  for (const CalibrationPoint& p : calibration.points) {
    if (shape_fits(p) && (nearest == nullptr || distance(p) < distance(*nearest))) nearest = &p;
  }
  if (nearest == nullptr) return std::nullopt;

  std::map<double, Curve> by_batch;
  for (const CalibrationPoint& p : calibration.points) {
    if (!shape_fits(p) || p.kv_heads != nearest->kv_heads) continue;
    by_batch[std::log2(static_cast<double>(p.batch))][std::log2(static_cast<double>(p.tokens))] =
        std::log2(p.fp8_kv_us / p.bf16_us);
  }
  const double x = std::log2(static_cast<double>(std::max<int64_t>(tokens, 1)));
  const double y = std::log2(static_cast<double>(std::max<int64_t>(batch, 1)) *
                             layer_group.kv_heads / nearest->kv_heads);
  Curve at_tokens;
  for (const auto& [log_batch, curve] : by_batch) at_tokens[log_batch] = At(curve, x);
  return std::exp2(At(at_tokens, y));
}

}  // namespace fp8kvd::config
