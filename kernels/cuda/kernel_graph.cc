#include "kernels/cuda/kernel_graph.h"

namespace fp8kvd::kernels::cuda {
namespace {

cudaKernelNodeParams NodeParams(const KernelLaunch& launch) {
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(launch.kernel);
  params.gridDim = launch.grid;
  params.blockDim = dim3(launch.threads);
  params.sharedMemBytes = launch.shared_bytes;
  params.kernelParams = launch.params;
  return params;
}

}  // namespace

cudaError_t KernelGraph::Init(const KernelLaunch& launch, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaError_t error = cudaGraphCreate(&graph, 0);
  if (error != cudaSuccess) return error;
  graph_.reset(graph);
  const cudaKernelNodeParams params = NodeParams(launch);
  error = cudaGraphAddKernelNode(&node_, graph, nullptr, 0, &params);
  if (error != cudaSuccess) return error;
  if (launch.cluster > 1) {
    cudaLaunchAttributeValue value{};
    value.clusterDim.x = launch.cluster;
    value.clusterDim.y = value.clusterDim.z = 1;
    error = cudaGraphKernelNodeSetAttribute(node_, cudaLaunchAttributeClusterDimension, &value);
    if (error != cudaSuccess) return error;
  }
  cudaGraphExec_t exec = nullptr;
  error = cudaGraphInstantiate(&exec, graph, 0);
  if (error != cudaSuccess) return error;
  exec_.reset(exec);
  return cudaGraphUpload(exec, stream);
}

cudaError_t KernelGraph::Launch(const KernelLaunch& launch, cudaStream_t stream) {
  const cudaKernelNodeParams params = NodeParams(launch);
  const cudaError_t error = cudaGraphExecKernelNodeSetParams(exec_.get(), node_, &params);
  return error != cudaSuccess ? error : cudaGraphLaunch(exec_.get(), stream);
}

}  // namespace fp8kvd::kernels::cuda
