// tests/kernels/cuda/append_checks.h: what an append leaves in the pool, bit by bit.
#pragma once

#include <string>

#include "kernels/backend.h"
#include "tests/kernels/backend_device.h"

namespace fp8kvd::kernels::cuda {

// Each: empty when it holds.
std::string AppendEqualsTheReference(Backend& backend, cases::BackendDevice& device);
std::string EveryCodeOfEveryScale(Backend& backend, cases::BackendDevice& device);

}  // namespace fp8kvd::kernels::cuda
