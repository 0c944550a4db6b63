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

// All threads of the cluster arrive and then wait, warps as one. What they stored before they
// arrived is seen after the wait.
__device__ __forceinline__ void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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
__device__ __forceinline__ void StoreToCluster(uint32_t address, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void StoreToCluster(uint32_t address, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x.x), "f"(x.y)
               : "memory");
}

}  // namespace fp8kvd::kernels::cuda
