// tests/kernels/cuda/append_checks.h: what appends and page copies leave in the pool, bit by bit.
#pragma once

#include <string>

#include "kernels/backend.h"
#include "tests/kernels/backend_device.h"

namespace fp8kvd::kernels::cuda {

// Each: empty when it holds.
std::string AppendEqualsTheReference(Backend& backend, cases::BackendDevice& device);
std::string BroughtRowsAreAppended(Backend& backend, cases::BackendDevice& device);
std::string EveryCodeOfEveryScale(Backend& backend, cases::BackendDevice& device);
std::string CopiedPagesAreEqual(Backend& backend, cases::BackendDevice& device);

}  // namespace fp8kvd::kernels::cuda
