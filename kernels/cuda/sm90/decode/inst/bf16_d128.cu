#include "kernels/cuda/sm90/decode/decode.cuh"
#include "kernels/cuda/sm90/step/step.cuh"

namespace fp8kvd::kernels::cuda::sm90 {

template struct Decode<Precision::kBf16, 128, 8>;
template struct Decode<Precision::kBf16, 128, 16>;
template struct Decode<Precision::kBf16, 128, 32>;
template struct Step<Precision::kBf16, 128>;

}  // namespace fp8kvd::kernels::cuda::sm90
