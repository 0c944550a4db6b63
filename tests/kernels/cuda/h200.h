// tests/kernels/cuda/h200.h: what an H200 has, for tests of launch shapes.
#pragma once

#include "kernels/cuda/launch_shape.h"

namespace fp8kvd::kernels::cuda {

inline constexpr DeviceLimits kH200 = {132, 233472, 232448};

}  // namespace fp8kvd::kernels::cuda
