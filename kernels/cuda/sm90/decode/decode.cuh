// kernels/cuda/sm90/decode/decode.cuh: the kernels and their launcher. any/decode/decode_cta.cuh
// and pairs.cuh say what a CTA does, ring.cuh how bytes reach shared memory.
#pragma once

#include <type_traits>

#include "kernels/cuda/any/decode/decode_cta.cuh"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/near_and_done.cuh"
#include "kernels/cuda/sm90/decode/decode.h"
#include "kernels/cuda/sm90/decode/pairs.cuh"
#include "kernels/cuda/sm90/decode/ring.cuh"
#include "kernels/cuda/sm90/decode/wide.cuh"

namespace fp8kvd::kernels::cuda::sm90 {

template <class T>
using RingOf = std::conditional_t<T::kWorkerWarps == 1, BulkRing, WarpgroupRing>;

template <class T>
__global__ void __launch_bounds__(T::kWorkersMax* T::kWorkerWarps* kWarpLanes, 1)
    DecodeKernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ NearRows near,
                 int32_t stages, bool lets_next_late) {
  if constexpr (T::kColumns <= NearRows::kColumnsMax) {
    DecodeCta<T, RingOf<T>>(WithNearRows(args, near), stages, lets_next_late);
  } else {
    DecodeCta<T, RingOf<T>>(args, stages, lets_next_late);
  }
  SignalDone(args.done);
}

template <class T>
__global__ void __launch_bounds__(T::kWarpsMax* kWarpLanes, T::kPairCtas)
    PairsKernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ NearRows near,
                int32_t row_pairs, int32_t stages, int32_t near_units, bool lets_next_late) {
  if constexpr (T::kColumns <= NearRows::kColumnsMax) {
    DecodePair<T, BulkRing>(WithNearRows(args, near), row_pairs, stages, near_units,
                            lets_next_late);
  } else {
    DecodePair<T, BulkRing>(args, row_pairs, stages, near_units, lets_next_late);
  }
  SignalDone(args.done);
}

// The kernels of a shape. T: where units are cut; P and F: where each pair has a cluster.
template <class T>
struct KernelsOf {
  using P = PairsTraits<T::kPrecision, T::kHeadDim, T::kColumns>;
  using F = FewTilesTraits<T::kPrecision, T::kHeadDim, T::kColumns>;

  static cudaError_t Prepare(int32_t shared_bytes) {
    cudaError_t error = cudaSuccess;
    for (const void* kernel : {reinterpret_cast<const void*>(DecodeKernel<T>),
                               reinterpret_cast<const void*>(PairsKernel<P>),
                               reinterpret_cast<const void*>(PairsKernel<F>)}) {
      if (error != cudaSuccess) return error;
      error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
    return error;
  }

  static int32_t Shared(int32_t rows_count, const LaunchShape& shape) {
    if (shape.cluster == 0) return LayoutOf<T>(rows_count, shape.warps, shape.stages).total;
    return shape.few_tiles ? PairsLayoutOf<F>(shape.warps, shape.stages, shape.cluster).total
                           : PairsLayoutOf<P>(shape.warps, shape.stages, shape.cluster).total;
  }

  static cudaError_t Launch(const DecodeArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    const int32_t shared = Shared(args.rows_count, shape);
    if (shape.cluster > 0) {
      return LaunchClustersAfterPrevious(
          shape.few_tiles ? PairsKernel<F> : PairsKernel<P>, dim3(shape.ctas),
          dim3(shape.warps * kWarpLanes), shape.cluster, shared, stream, args, NearRowsOf(args),
          shape.row_pairs, shape.stages, shape.near_units, shape.lets_next_late);
    }
    return LaunchAfterPrevious(DecodeKernel<T>, dim3(shape.ctas),
                               dim3(shape.warps * T::kWorkerWarps * kWarpLanes), shared, stream,
                               args, NearRowsOf(args), shape.stages, shape.lets_next_late);
  }
};

template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t Decode<precision, head_dim, columns>::Prepare(int32_t shared_bytes) {
  return KernelsOf<DecodeTraits<precision, head_dim, columns>>::Prepare(shared_bytes);
}
template <Precision precision, int32_t head_dim, int32_t columns>
int32_t Decode<precision, head_dim, columns>::Shared(int32_t rows_count, const LaunchShape& shape) {
  return KernelsOf<DecodeTraits<precision, head_dim, columns>>::Shared(rows_count, shape);
}
template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t Decode<precision, head_dim, columns>::Launch(const DecodeArgs& args,
                                                         const LaunchShape& shape,
                                                         cudaStream_t stream) {
  return KernelsOf<DecodeTraits<precision, head_dim, columns>>::Launch(args, shape, stream);
}

template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t WideDecode<precision, head_dim, columns>::Prepare(int32_t shared_bytes) {
  return KernelsOf<WideTraits>::Prepare(shared_bytes);
}
template <Precision precision, int32_t head_dim, int32_t columns>
int32_t WideDecode<precision, head_dim, columns>::Shared(int32_t rows_count,
                                                         const LaunchShape& shape) {
  return KernelsOf<WideTraits>::Shared(rows_count, shape);
}
template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t WideDecode<precision, head_dim, columns>::Launch(const DecodeArgs& args,
                                                             const LaunchShape& shape,
                                                             cudaStream_t stream) {
  return KernelsOf<WideTraits>::Launch(args, shape, stream);
}

}  // namespace fp8kvd::kernels::cuda::sm90
