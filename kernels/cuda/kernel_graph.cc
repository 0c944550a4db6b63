#include "kernels/cuda/kernel_graph.h"

namespace fp8kvd::kernels::cuda {
namespace {

// The driver's versions of the functions that are asked for by name.
constexpr unsigned int kDriverVersion = 12000;

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
  error = cudaGraphUpload(exec, stream);
  if (error != cudaSuccess) return error;
  error = cudaGetFuncBySymbol(&function_, launch.kernel);
  if (error != cudaSuccess) return error;
  void* set_params = nullptr;
  cudaDriverEntryPointQueryResult found{};
  error = cudaGetDriverEntryPointByVersion("cuGraphExecKernelNodeSetParams", &set_params,
                                           kDriverVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorCallRequiresNewerDriver;
  set_params_ = reinterpret_cast<SetParams>(set_params);
  return cudaSuccess;
}

cudaError_t KernelGraph::Launch(const KernelLaunch& launch, cudaStream_t stream) {
  CUDA_KERNEL_NODE_PARAMS params{};
  params.func = function_;
  params.gridDimX = launch.grid.x;
  params.gridDimY = launch.grid.y;
  params.gridDimZ = launch.grid.z;
  params.blockDimX = static_cast<unsigned int>(launch.threads);
  params.blockDimY = params.blockDimZ = 1;
  params.sharedMemBytes = static_cast<unsigned int>(launch.shared_bytes);
  params.kernelParams = launch.params;
  // The numbers of the driver's errors are the runtime's.
  const auto error = static_cast<cudaError_t>(set_params_(exec_.get(), node_, &params));
  return error != cudaSuccess ? error : cudaGraphLaunch(exec_.get(), stream);
}

}  // namespace fp8kvd::kernels::cuda
