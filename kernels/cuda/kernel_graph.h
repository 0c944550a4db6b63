// kernels/cuda/kernel_graph.h: a kernel as a graph of one node, made once and launched with other
// parameters each time. On an idle stream such a launch costs the host half of what a plain one
// does, and the device begins sooner; it begins beside no launch before it. A new grid or shared
// memory costs two microseconds, so keep one for each. Parameters cost by the stretch from the
// first to the last byte that is another than in the launch before: 0.7 us for 90, nothing for 16.
// Threads: one caller at a time. Cost: Launch allocates nothing.
#pragma once

#include <cstdint>
#include <memory>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fp8kvd::kernels::cuda {

// What a launch is laid out by.
struct KernelLaunch {
  const void* kernel;
  dim3 grid;
  int32_t threads;  // of a CTA
  int32_t cluster;  // CTAs, along x
  int32_t shared_bytes;
  void** params;  // pointers to each parameter of the kernel
};

class KernelGraph {
 public:
  // With the launch's kernel and cluster for good. Takes the device's memory that launches need.
  cudaError_t Init(const KernelLaunch& launch, cudaStream_t stream);
  cudaError_t Launch(const KernelLaunch& launch, cudaStream_t stream);

 private:
  struct Destroy {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
    void operator()(cudaGraphExec_t exec) const { cudaGraphExecDestroy(exec); }
  };

  // The driver's own, since the runtime's looks the kernel up each time.
  using SetParams = decltype(&cuGraphExecKernelNodeSetParams);

  std::unique_ptr<CUgraph_st, Destroy> graph_;
  std::unique_ptr<CUgraphExec_st, Destroy> exec_;
  cudaGraphNode_t node_ = nullptr;  // of graph_
  cudaFunction_t function_ = nullptr;
  SetParams set_params_ = nullptr;
};

}  // namespace fp8kvd::kernels::cuda
