// kernels/cuda/sm90/decode/decode.cuh: the kernels and their launcher. any/decode/decode_cta.cuh
// and pairs.cuh say what a CTA does, ring.cuh how bytes reach shared memory.
#pragma once

#include "kernels/cuda/any/decode/decode_cta.cuh"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/near_and_done.cuh"
#include "kernels/cuda/sm90/decode/decode.h"
#include "kernels/cuda/sm90/decode/pairs.cuh"
#include "kernels/cuda/sm90/decode/ring.cuh"

namespace fp8kvd::kernels::cuda::sm90 {

template <class T>
__global__ void __launch_bounds__(T::kWarpsMax* kWarpLanes, 1)
    DecodeKernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ NearRows near,
                 int32_t stages, bool lets_next_late) {
  if constexpr (T::kColumns <= NearRows::kColumnsMax) {
    DecodeCta<T, BulkRing>(WithNearRows(args, near), stages, lets_next_late);
  } else {
    DecodeCta<T, BulkRing>(args, stages, lets_next_late);
  }
  SignalDone(args.done);
}

template <class T>
__global__ void __launch_bounds__(T::kWarpsMax* kWarpLanes, T::kPairCtas)
    PairsKernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ NearRows near,
                int32_t row_pairs, int32_t stages, bool lets_next_late) {
  if constexpr (T::kColumns <= NearRows::kColumnsMax) {
    DecodePair<T, BulkRing>(WithNearRows(args, near), row_pairs, stages, lets_next_late);
  } else {
    DecodePair<T, BulkRing>(args, row_pairs, stages, lets_next_late);
  }
  SignalDone(args.done);
}

template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t Decode<precision, head_dim, columns>::Prepare(int32_t shared_bytes) {
  using T = DecodeTraits<precision, head_dim, columns>;
  using P = PairsTraits<precision, head_dim, columns>;
  using F = FewTilesTraits<precision, head_dim, columns>;
  cudaError_t error = cudaSuccess;
  for (const void* kernel : {reinterpret_cast<const void*>(DecodeKernel<T>),
                             reinterpret_cast<const void*>(PairsKernel<P>),
                             reinterpret_cast<const void*>(PairsKernel<F>)}) {
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  return error;
}

template <Precision precision, int32_t head_dim, int32_t columns>
int32_t Decode<precision, head_dim, columns>::Shared(int32_t rows_count, const LaunchShape& shape) {
  using T = DecodeTraits<precision, head_dim, columns>;
  using P = PairsTraits<precision, head_dim, columns>;
  using F = FewTilesTraits<precision, head_dim, columns>;
  if (shape.cluster == 0) return LayoutOf<T>(rows_count, shape.warps, shape.stages).total;
  return shape.few_tiles ? PairsLayoutOf<F>(shape.warps, shape.stages, shape.cluster).total
                         : PairsLayoutOf<P>(shape.warps, shape.stages, shape.cluster).total;
}

template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t Decode<precision, head_dim, columns>::Launch(const DecodeArgs& args,
                                                         const LaunchShape& shape,
                                                         cudaStream_t stream) {
  using T = DecodeTraits<precision, head_dim, columns>;
  using P = PairsTraits<precision, head_dim, columns>;
  using F = FewTilesTraits<precision, head_dim, columns>;
  const dim3 threads(shape.warps * kWarpLanes);
  const int32_t shared = Shared(args.rows_count, shape);
  if (shape.cluster > 0) {
    return LaunchClustersAfterPrevious(shape.few_tiles ? PairsKernel<F> : PairsKernel<P>,
                                       dim3(shape.ctas), threads, shape.cluster, shared, stream,
                                       args, NearRowsOf(args), shape.row_pairs, shape.stages,
                                       shape.lets_next_late);
  }
  return LaunchAfterPrevious(DecodeKernel<T>, dim3(shape.ctas), threads, shared, stream, args,
                             NearRowsOf(args), shape.stages, shape.lets_next_late);
}

}  // namespace fp8kvd::kernels::cuda::sm90
