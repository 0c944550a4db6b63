// kernels/cuda/sm80/decode/decode.cuh: the kernel and its launcher. any/decode/decode_cta.cuh says
// what a CTA does; only how bytes reach shared memory is this folder's (ring.cuh).
#pragma once

#include "kernels/cuda/any/decode/decode_cta.cuh"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/near_and_done.cuh"
#include "kernels/cuda/sm80/decode/decode.h"
#include "kernels/cuda/sm80/decode/ring.cuh"

namespace fp8kvd::kernels::cuda::sm80 {

template <class T>
__global__ void __launch_bounds__(T::kWarpsMax* kWarpLanes, 1)
    DecodeKernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ NearRows near,
                 int32_t stages, bool lets_next_late) {
  if constexpr (T::kColumns <= NearRows::kColumnsMax) {
    DecodeCta<T, LaneRing>(WithNearRows(args, near), stages, lets_next_late);
  } else {
    DecodeCta<T, LaneRing>(args, stages, lets_next_late);
  }
  SignalDone(args.done);
}

template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t Decode<precision, head_dim, columns>::Prepare(int32_t shared_bytes) {
  return cudaFuncSetAttribute(DecodeKernel<DecodeTraits<precision, head_dim, columns>>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

template <Precision precision, int32_t head_dim, int32_t columns>
int32_t Decode<precision, head_dim, columns>::Shared(int32_t rows_count, const LaunchShape& shape) {
  using T = DecodeTraits<precision, head_dim, columns>;
  return LayoutOf<T>(rows_count, shape.warps, shape.stages).total;
}

template <Precision precision, int32_t head_dim, int32_t columns>
cudaError_t Decode<precision, head_dim, columns>::Launch(const DecodeArgs& args,
                                                         const LaunchShape& shape,
                                                         cudaStream_t stream) {
  using T = DecodeTraits<precision, head_dim, columns>;
  return LaunchAfterPrevious(DecodeKernel<T>, dim3(shape.ctas), dim3(shape.warps * kWarpLanes),
                             Shared(args.rows_count, shape), stream, args, NearRowsOf(args),
                             shape.stages, shape.lets_next_late);
}

}  // namespace fp8kvd::kernels::cuda::sm80
