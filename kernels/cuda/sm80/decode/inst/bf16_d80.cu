#include "kernels/cuda/sm80/decode/decode.cuh"

namespace fp8kvd::kernels::cuda::sm80 {

template struct Decode<Precision::kBf16, 80, 8>;
template struct Decode<Precision::kBf16, 80, 16>;

}  // namespace fp8kvd::kernels::cuda::sm80
