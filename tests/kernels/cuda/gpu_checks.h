// tests/kernels/cuda/gpu_checks.h: what the GPU test asks of the backend beside the shared table of
// cases: bits instead of tolerances, and what only a device can get wrong.
#pragma once

#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/kernels/backend_device.h"

namespace fp8kvd::kernels::cuda {

struct Check {
  const char* name;
  // Empty when it holds.
  std::string (*run)(Backend& backend, cases::BackendDevice& device);
  bool is_long = false;  // so many or so large launches that a sanitizer takes minutes
};

const std::vector<Check>& GpuChecks();

}  // namespace fp8kvd::kernels::cuda
