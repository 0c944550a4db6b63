// kernels/cuda/any/launch.h: a kernel launch that may begin while the one before it ends
// (programmatic dependent launch; WaitForPreviousLaunch in ptx.cuh is its other half).
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

namespace fp8kvd::kernels::cuda {

// How such a launch is laid out. It points into itself, so it is not copied.
class AfterPrevious {
 public:
  // cluster: CTAs of a cluster, along x.
  AfterPrevious(dim3 grid, dim3 block, int32_t cluster, size_t shared_bytes, cudaStream_t stream) {
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    attributes_[1].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].val.clusterDim.x = cluster;
    attributes_[1].val.clusterDim.y = 1;
    attributes_[1].val.clusterDim.z = 1;
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    config_.numAttrs = cluster > 1 ? 2 : 1;
  }
  AfterPrevious(const AfterPrevious&) = delete;
  AfterPrevious& operator=(const AfterPrevious&) = delete;

  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2]{};
  cudaLaunchConfig_t config_{};
};

template <class... Params, class... Args>
cudaError_t LaunchClustersAfterPrevious(void (*kernel)(Params...), dim3 grid, dim3 block,
                                        int32_t cluster, size_t shared_bytes, cudaStream_t stream,
                                        Args... args) {
  const AfterPrevious launch(grid, block, cluster, shared_bytes, stream);
  return cudaLaunchKernelEx(launch.config(), kernel, static_cast<Params>(args)...);
}

template <class... Params, class... Args>
cudaError_t LaunchAfterPrevious(void (*kernel)(Params...), dim3 grid, dim3 block,
                                size_t shared_bytes, cudaStream_t stream, Args... args) {
  return LaunchClustersAfterPrevious(kernel, grid, block, 1, shared_bytes, stream, args...);
}

}  // namespace fp8kvd::kernels::cuda
