// config/calibration.h: what fp8kvd --calibrate measured on a device: times of attention in both
// precisions over batch and tokens. From them follows r, the ratio that the precision policy
// (cache_share.h) decides with, at the shape and the context that are asked about.
//
// A file holds one device's measurements as JSON; it counts for that device and the version of
// fp8kvd that wrote it, and for nothing else (Fits).
// Errors: INVALID_ARGUMENT "line N: …" for a file that is not one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "config/base/geometry.h"

namespace fp8kvd::config {

// One decode launch of `batch` sequences of `tokens` tokens, one layer, one query token each.
struct CalibrationPoint {
  int32_t head_dim = 0;
  int32_t group = 0;  // q_heads / kv_heads
  int32_t kv_heads = 0;
  int64_t batch = 0;
  int64_t tokens = 0;
  double bf16_us = 0;
  double fp8_kv_us = 0;
};

struct Calibration {
  std::string version;  // of the fp8kvd that measured
  std::string device_kind;
  std::string device_name;
  double read_bytes_per_s = 0;  // of K and V, by the largest bf16 launches
  double call_us = 0;           // one decode call over loopback, its launch included; 0: unknown
  std::vector<CalibrationPoint> points;

  bool Fits(absl::string_view of_version, absl::string_view of_device_name) const {
    return version == of_version && device_name == of_device_name;
  }
};

absl::StatusOr<Calibration> ParseCalibration(absl::string_view json);
std::string FormatCalibration(const Calibration& calibration);

// r of a layer group of a model with so many query heads per KV head, where each of `batch`
// sequences sees `tokens` tokens: measured at this head_dim and group, by the geometric mean
// between the nearest batches and tokens around it, and the nearest beyond the outermost. A model
// with other kv_heads is taken as that many more or fewer sequences. Nothing when no point has this
// head_dim and group.
std::optional<double> MeasuredRatio(const Calibration& calibration, const LayerGroup& layer_group,
                                    int32_t group, int64_t batch, int64_t tokens);

}  // namespace fp8kvd::config
