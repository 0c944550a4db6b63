// kernels/cuda/sm90/decode/decode.h: the decode kernel for Hopper: bulk copies.
#pragma once

#include "kernels/cuda/decode_args.h"

namespace fp8kvd::kernels::cuda::sm90 {

// For pairs of up to `columns` query columns (a row with more has several pairs for each KV head).
// inst/ has the instantiations, one precision and head_dim a file.
template <Precision precision, int32_t head_dim, int32_t columns>
struct Decode {
  static cudaError_t Prepare(int32_t shared_bytes);
  static int32_t Shared(int32_t rows_count, const LaunchShape& shape);  // bytes of a CTA
  static cudaError_t Launch(const DecodeArgs& args, const LaunchShape& shape, cudaStream_t stream);
};

// The same with a warpgroup for each pair where units are cut (WideTraits).
template <Precision precision, int32_t head_dim, int32_t columns>
struct WideDecode {
  static cudaError_t Prepare(int32_t shared_bytes);
  static int32_t Shared(int32_t rows_count, const LaunchShape& shape);
  static cudaError_t Launch(const DecodeArgs& args, const LaunchShape& shape, cudaStream_t stream);
};

}  // namespace fp8kvd::kernels::cuda::sm90
