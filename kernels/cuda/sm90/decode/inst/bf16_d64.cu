#include "kernels/cuda/sm90/decode/decode.cuh"
#include "kernels/cuda/sm90/step/step.cuh"

namespace fp8kvd::kernels::cuda::sm90 {

template struct Decode<Precision::kBf16, 64, 8>;
template struct Decode<Precision::kBf16, 64, 16>;
template struct Decode<Precision::kBf16, 64, 32>;
template struct Step<Precision::kBf16, 64>;

}  // namespace fp8kvd::kernels::cuda::sm90
