// kernels/cuda/sm90/decode/cluster.cuh: the machine instructions of thread block clusters: CTAs
// that run at the same time and reach each other's shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

__device__ __forceinline__ int32_t ClusterCtas() {
  int32_t ctas;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ctas));
  return ctas;
}
__device__ __forceinline__ int32_t ClusterRank() {
  int32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  return rank;
}
// Along x, which clusters lie along.
__device__ __forceinline__ int32_t ClusterIndex() {
  int32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// All threads of the cluster arrive and then wait, warps as one. After the wait all have started,
// and the barriers are seen that a thread made before Ring::FenceInit and its arrival; other stores
// are not (a release would wait for all that is under way).
__device__ __forceinline__ void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitForCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where a place in this CTA's shared memory is in that of CTA `rank`.
__device__ __forceinline__ uint32_t AddressInCta(const void* here, int32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(SharedAddress(here)), "r"(rank));
  return there;
}
// Stores there; `full`, a barrier of that CTA, counts the bytes.
__device__ __forceinline__ void SendToCluster(uint32_t address, float4 x, uint32_t full) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(full)
      : "memory");
}
__device__ __forceinline__ void SendToCluster(uint32_t address, float2 x, uint32_t full) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::
          "r"(address),
      "f"(x.x), "f"(x.y), "r"(full)
      : "memory");
}

}  // namespace fp8kvd::kernels::cuda
