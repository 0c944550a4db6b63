// server/device.h: the one place that picks what the engine computes on.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "config/options.h"
#include "kernels/backend.h"
#include "kernels/workers.h"

namespace fp8kvd {

struct Device {
  std::unique_ptr<kernels::Workers> workers;  // of the CPU backend; null for a GPU
  std::unique_ptr<kernels::Backend> backend;
  std::string why_no_gpu;  // where auto chose the CPU
};

// auto: a GPU if the build and the machine have one, else the CPU. UNAVAILABLE where cuda is asked
// for and there is none; UNIMPLEMENTED, or what the driver says, for a GPU that cannot be used.
absl::StatusOr<Device> MakeDevice(const config::EngineOptions& options);

}  // namespace fp8kvd
