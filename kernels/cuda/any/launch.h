// kernels/cuda/any/launch.h: a kernel launch that may begin while the one before it ends
// (programmatic dependent launch; WaitForPreviousLaunch in ptx.cuh is its other half).
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace fp8kvd::kernels::cuda {

// cluster: CTAs of a cluster, along x.
template <class... Params, class... Args>
cudaError_t LaunchClustersAfterPrevious(void (*kernel)(Params...), dim3 grid, dim3 block,
                                        int32_t cluster, size_t shared_bytes, cudaStream_t stream,
                                        Args... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

template <class... Params, class... Args>
cudaError_t LaunchAfterPrevious(void (*kernel)(Params...), dim3 grid, dim3 block,
                                size_t shared_bytes, cudaStream_t stream, Args... args) {
  return LaunchClustersAfterPrevious(kernel, grid, block, 1, shared_bytes, stream, args...);
}

}  // namespace fp8kvd::kernels::cuda
