// kernels/cuda/step_shape.h: how a step launch (step_args.h) is laid over the device, and which
// steps get one. Plain arithmetic, tested without a GPU.
#pragma once

#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/launch_shape.h"

namespace fp8kvd::kernels::cuda {

// False where the work is too long for a cluster a pair: then an append and a decode launch of
// their own are faster, or as fast.
bool StepShapeFor(const DecodeKernel& kernel, const DeviceLimits& device, const LaunchWork& work,
                  LaunchShape& shape);

}  // namespace fp8kvd::kernels::cuda
