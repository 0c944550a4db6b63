#include "kernels/cuda/sm90/decode/decode.cuh"
#include "kernels/cuda/sm90/step/step.cuh"

namespace fp8kvd::kernels::cuda::sm90 {

template struct Decode<Precision::kFp8Kv, 80, 8>;
template struct Decode<Precision::kFp8Kv, 80, 16>;
template struct Decode<Precision::kFp8Kv, 80, 32>;
template struct Step<Precision::kFp8Kv, 80>;

}  // namespace fp8kvd::kernels::cuda::sm90
