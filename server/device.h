// server/device.h: the one place that picks what the engines compute on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "config/options.h"
#include "kernels/backend.h"
#include "kernels/workers.h"

namespace fp8kvd {

struct Device {
  std::string name;                           // "cuda:0"
  std::unique_ptr<kernels::Workers> workers;  // of the CPU backend; null for a GPU
  std::unique_ptr<kernels::Backend> backend;
};

struct Devices {
  std::vector<Device> all;  // one at least
  std::string why_no_gpu;   // where auto chose the CPU
};

// auto: GPUs if the build and the machine have one, else the CPU. Of the kind those that
// options.devices names, or all GPUs; several CPU devices share the cores. UNAVAILABLE where cuda
// is asked for and there is none, or not one that is named; UNIMPLEMENTED, or what the driver says,
// for a GPU that cannot be used.
absl::StatusOr<Devices> MakeDevices(const config::EngineOptions& options);

}  // namespace fp8kvd
