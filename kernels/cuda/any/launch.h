// kernels/cuda/any/launch.h: a kernel launch that may begin while the one before it ends
// (programmatic dependent launch; WaitForPreviousLaunch in ptx.cuh is its other half).
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace fp8kvd::kernels::cuda {

template <class... Params, class... Args>
cudaError_t LaunchAfterPrevious(void (*kernel)(Params...), dim3 grid, dim3 block,
                                size_t shared_bytes, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace fp8kvd::kernels::cuda
