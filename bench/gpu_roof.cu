#include "bench/gpu_roof.h"
#include "kernels/cuda/sm90/decode/ring.cuh"

namespace fp8kvd::bench {
namespace {

using kernels::cuda::BulkRing;
using kernels::cuda::UnitSource;

constexpr int32_t kThreads = 128;
constexpr int32_t kBlockBytes = 16 * 1024;
constexpr int32_t kStages = 4;

// Each CTA reads one contiguous part and looks at every byte, so that no read can be left out.
__global__ void __launch_bounds__(kThreads)
    ReadKernel(const uint8_t* from, int64_t blocks, uint32_t* sink) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t full[kStages];
  const int64_t share = (blocks + gridDim.x - 1) / gridDim.x;
  const int64_t first = share * blockIdx.x;
  const int64_t count = min(share, blocks - first);
  const auto issue = [&](int64_t i) {
    const UnitSource source = {from + (first + i) * kBlockBytes, kBlockBytes};
    BulkRing::Copy(ring + i % kStages * kBlockBytes, source, 0, 0, full + i % kStages);
  };
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < kStages; ++s) BulkRing::Init(full + s);
    BulkRing::FenceInit();
    for (int64_t i = 0; i < kStages && i < count; ++i) issue(i);
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    BulkRing::Wait(full + i % kStages, i / kStages % 2);
    const auto* block = reinterpret_cast<const uint4*>(ring + i % kStages * kBlockBytes);
    for (int32_t j = threadIdx.x; j < kBlockBytes / 16; j += kThreads) {
      sum ^= block[j].x ^ block[j].y ^ block[j].z ^ block[j].w;
    }
    __syncthreads();
    if (threadIdx.x == 0 && i + kStages < count) issue(i + kStages);
  }
  if (sum == 0x12345678U) *sink = sum;
}

}  // namespace

cudaError_t LaunchRead(const uint8_t* from, int64_t bytes, uint32_t* sink, cudaStream_t stream) {
  int32_t device = 0;
  int32_t multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  constexpr int32_t kShared = kStages * kBlockBytes;
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(ReadKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  }
  if (error != cudaSuccess) return error;
  ReadKernel<<<2 * multiprocessors, kThreads, kShared, stream>>>(from, bytes / kBlockBytes, sink);
  return cudaGetLastError();
}

}  // namespace fp8kvd::bench
