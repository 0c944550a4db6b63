#include "kernels/cuda/decode_table.h"

#include "kernels/cuda/any/decode/traits.h"
#include "kernels/cuda/sm80/decode/decode.h"
#include "kernels/cuda/sm90/decode/decode.h"
#include "kernels/cuda/sm90/step/step.h"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr Precision kFp8 = Precision::kFp8Kv;
constexpr Precision kBf16 = Precision::kBf16;

template <class T, template <Precision, int32_t, int32_t> class Decode>
constexpr DecodeKernel Row(int32_t sm, StepFunctions step) {
  using Functions = Decode<T::kPrecision, T::kHeadDim, T::kColumns>;
  using P = PairsTraits<T::kPrecision, T::kHeadDim, T::kColumns>;
  return {sm,
          T::kPrecision,
          T::kHeadDim,
          T::kGrain,
          T::kWarpsMax,
          T::kWorkersMax,
          T::kWorkerWarps,
          T::kUnitBytes,
          P::kUnitTokens,
          P::kPairCtas,
          Functions::Shared,
          Functions::Prepare,
          Functions::Launch,
          step};
}

template <Precision precision, int32_t head_dim, int32_t columns>
constexpr DecodeKernel Sm80() {
  return Row<DecodeTraits<precision, head_dim, columns>, sm80::Decode>(80, {});
}

#if FP8KVD_CUDA_SM90
template <Precision precision, int32_t head_dim, int32_t columns>
constexpr DecodeKernel Sm90() {
  StepFunctions step{};
  if constexpr (columns == kStepColumnsMax) {
    using Functions = sm90::Step<precision, head_dim>;
    step = {PairsTraits<precision, head_dim, columns>::kUnitTokens, Functions::Shared,
            Functions::Kernel};
  }
  return Row<DecodeTraits<precision, head_dim, columns>, sm90::Decode>(90, step);
}

constexpr DecodeKernel Sm90Wide() { return Row<WideTraits, sm90::WideDecode>(90, {}); }
#endif

// Of one shape the columns ascend. The wide kernel comes first of those with as many: rows of more
// columns, which are cut into blocks, go to the other one.
constexpr DecodeKernel kTable[] = {
#if FP8KVD_CUDA_SM90
    Sm90<kFp8, 64, 8>(),    Sm90<kFp8, 64, 16>(),   Sm90<kFp8, 64, 32>(),   Sm90<kFp8, 80, 8>(),
    Sm90<kFp8, 80, 16>(),   Sm90<kFp8, 80, 32>(),   Sm90<kFp8, 96, 8>(),    Sm90<kFp8, 96, 16>(),
    Sm90<kFp8, 96, 32>(),   Sm90<kFp8, 128, 8>(),   Sm90<kFp8, 128, 16>(),  Sm90Wide(),
    Sm90<kFp8, 128, 32>(),  Sm90<kFp8, 192, 8>(),   Sm90<kFp8, 192, 16>(),  Sm90<kFp8, 256, 8>(),
    Sm90<kFp8, 256, 16>(),  Sm90<kBf16, 64, 8>(),   Sm90<kBf16, 64, 16>(),  Sm90<kBf16, 64, 32>(),
    Sm90<kBf16, 80, 8>(),   Sm90<kBf16, 80, 16>(),  Sm90<kBf16, 80, 32>(),  Sm90<kBf16, 96, 8>(),
    Sm90<kBf16, 96, 16>(),  Sm90<kBf16, 96, 32>(),  Sm90<kBf16, 128, 8>(),  Sm90<kBf16, 128, 16>(),
    Sm90<kBf16, 128, 32>(), Sm90<kBf16, 192, 8>(),  Sm90<kBf16, 192, 16>(), Sm90<kBf16, 256, 8>(),
    Sm90<kBf16, 256, 16>(),
#endif
    Sm80<kFp8, 64, 8>(),    Sm80<kFp8, 64, 16>(),   Sm80<kFp8, 80, 8>(),    Sm80<kFp8, 80, 16>(),
    Sm80<kFp8, 96, 8>(),    Sm80<kFp8, 96, 16>(),   Sm80<kFp8, 128, 8>(),   Sm80<kFp8, 128, 16>(),
    Sm80<kFp8, 192, 8>(),   Sm80<kFp8, 192, 16>(),  Sm80<kFp8, 256, 8>(),   Sm80<kFp8, 256, 16>(),
    Sm80<kBf16, 64, 8>(),   Sm80<kBf16, 64, 16>(),  Sm80<kBf16, 80, 8>(),   Sm80<kBf16, 80, 16>(),
    Sm80<kBf16, 96, 8>(),   Sm80<kBf16, 96, 16>(),  Sm80<kBf16, 128, 8>(),  Sm80<kBf16, 128, 16>(),
    Sm80<kBf16, 192, 8>(),  Sm80<kBf16, 192, 16>(), Sm80<kBf16, 256, 8>(),  Sm80<kBf16, 256, 16>(),
};

}  // namespace

std::span<const DecodeKernel> DecodeTable() { return kTable; }

const DecodeKernel* FindDecodeKernel(int32_t sm, Precision precision, int32_t head_dim,
                                     int32_t columns) {
  const DecodeKernel* found = nullptr;
  for (const DecodeKernel& kernel : kTable) {
    if (kernel.sm != sm || kernel.precision != precision || kernel.head_dim != head_dim) continue;
    if (found == nullptr || found->grain.columns < columns) found = &kernel;
  }
  return found;
}

}  // namespace fp8kvd::kernels::cuda
