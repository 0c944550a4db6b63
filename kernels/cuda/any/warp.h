// kernels/cuda/any/warp.h: how many threads run as one, for host and device.
#pragma once

#include <cstdint>

namespace fp8kvd::kernels::cuda {

inline constexpr int32_t kWarpLanes = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFU;

}  // namespace fp8kvd::kernels::cuda
