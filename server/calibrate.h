// server/calibrate.h: times attention in both precisions on a device, over batch and context, for
// the shapes of the configured models: where the precision policy gets r from (fp8kvd --calibrate).
//
// Promises: both precisions of a point take turns, so that what else the machine does meets them
//   alike, and of each the lower quartile counts; a launch reads other memory than the few before
//   it, as the layers of a model do.
// Cost: seconds. Takes pools, tables and staging of the backend that end with it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "config/base/geometry.h"
#include "config/calibration.h"
#include "kernels/backend.h"
#include "server/engine/clock.h"

namespace fp8kvd {

struct CalibrateArgs {
  kernels::Backend* backend = nullptr;
  const engine::Clock* clock = nullptr;
  absl::Span<const ModelGeometry> models;
  // Of K and V in bf16 that the largest launch reads, at most.
  int64_t launch_bytes_max = 0;
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};

// As much as fills a second or two: 128 MiB on a processor, 4 GiB on a GPU, and never more than an
// eighth of what is free.
int64_t CalibrationLaunchBytes(const kernels::DeviceInfo& device);

// Without version and call_us, which the caller knows. The backend's errors; RESOURCE_EXHAUSTED
// where its memory is too small.
absl::StatusOr<config::Calibration> Calibrate(const CalibrateArgs& args);

}  // namespace fp8kvd
