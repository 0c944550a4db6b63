// tests/kernels/cuda/invariant_checks.h: batch_invariant where a warp has many items, so that those
// of a pair are folded as they come, cut between warps and cut between CTAs.
#pragma once

#include <string>

#include "kernels/backend.h"
#include "tests/kernels/backend_device.h"

namespace fp8kvd::kernels::cuda {

// Empty when it holds.
std::string ItemsOfManyRowsOrOfFew(Backend& backend, cases::BackendDevice& device);

}  // namespace fp8kvd::kernels::cuda
