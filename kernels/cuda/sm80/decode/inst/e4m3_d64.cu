#include "kernels/cuda/sm80/decode/decode.cuh"

namespace fp8kvd::kernels::cuda::sm80 {

template struct Decode<Precision::kFp8Kv, 64, 8>;
template struct Decode<Precision::kFp8Kv, 64, 16>;

}  // namespace fp8kvd::kernels::cuda::sm80
