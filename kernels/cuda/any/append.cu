// Grid: for each row as many CTAs as the tiles of the longest want, then for each copy as many as
// the longest wants.
#include "kernels/cuda/any/append.h"
#include "kernels/cuda/any/append_tile.cuh"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr int32_t kWarps = 4;
constexpr int32_t kThreads = kWarps * kWarpLanes;
constexpr int32_t kCopyLoads = 4;  // of 16 bytes, that a thread has under way
constexpr int64_t kCopyBlockBytes = int64_t{kThreads} * kCopyLoads * 16;

// Needs no wait: what it reads and writes belongs to no launch before.
__device__ __forceinline__ void CopyRange(const RangeCopy& copy, int32_t at, int32_t ctas) {
  for (int64_t first = at * kCopyBlockBytes; first < copy.bytes; first += ctas * kCopyBlockBytes) {
    uint4 x[kCopyLoads];
    const auto byte = [&](int32_t i) { return first + (i * kThreads + threadIdx.x) * int64_t{16}; };
#pragma unroll
    for (int32_t i = 0; i < kCopyLoads; ++i) {
      if (byte(i) < copy.bytes) x[i] = __ldg(reinterpret_cast<const uint4*>(copy.from + byte(i)));
    }
#pragma unroll
    for (int32_t i = 0; i < kCopyLoads; ++i) {
      if (byte(i) < copy.bytes) *reinterpret_cast<uint4*>(copy.to + byte(i)) = x[i];
    }
  }
}

struct AppendArgs {
  const AppendRow* rows;  // null: near
  const RangeCopy* copies;
  int32_t rows_count;
  int32_t row_ctas;   // of each row
  int32_t copy_ctas;  // of each copy
  bool tables_settled;
};

template <Precision kPrecision, int32_t kHeadDim>
__global__ void __launch_bounds__(kThreads) AppendKernel(const __grid_constant__ AppendArgs args,
                                                         const __grid_constant__ NearAppends near) {
  if (!args.tables_settled) WaitForPreviousLaunch();
  LetNextLaunchStart();
  const int32_t cta = blockIdx.x;
  const int32_t copies_from = args.rows_count * args.row_ctas;
  if (cta < copies_from) {
    const int32_t i = cta / args.row_ctas;
    const AppendRow row = args.rows == nullptr ? near.rows[i] : args.rows[i];
    const int32_t warp = (cta - i * args.row_ctas) * kWarps + threadIdx.x / kWarpLanes;
    AppendTiles<kPrecision, kHeadDim>(row, warp, args.row_ctas * kWarps);
  } else {
    const int32_t i = (cta - copies_from) / args.copy_ctas;
    const int32_t at = cta - copies_from - i * args.copy_ctas;
    CopyRange(args.copies == nullptr ? near.copies[i] : args.copies[i], at, args.copy_ctas);
  }
  WaitForPreviousLaunch();  // also where there was nothing to do: the next launch counts on it
}

template <Precision kPrecision, int32_t kHeadDim>
cudaError_t Launch(const AppendLaunch& launch, cudaStream_t stream) {
  // A warp's work is short; several tiles each keep the grid of a bulk append in a few waves.
  constexpr int64_t kCtasMax = 2048;  // of a row, or a copy
  const auto ctas_for = [](int64_t work, int64_t of_cta) {
    const int64_t wanted = (work + of_cta - 1) / of_cta;
    return static_cast<int32_t>(wanted < 1 ? 1 : wanted < kCtasMax ? wanted : kCtasMax);
  };
  const bool is_near = launch.near != nullptr;
  const AppendArgs args = {is_near ? nullptr : launch.params.rows,
                           is_near ? nullptr : launch.copies,
                           launch.params.rows_count,
                           ctas_for(2 * int64_t{launch.tiles_max}, kWarps),
                           ctas_for(launch.copy_bytes_max, kCopyBlockBytes),
                           launch.tables_settled};
  const int32_t ctas = args.rows_count * args.row_ctas + launch.copies_count * args.copy_ctas;
  if (ctas == 0) return cudaSuccess;  // a grid has to have a CTA
  return LaunchAfterPrevious(AppendKernel<kPrecision, kHeadDim>, dim3(ctas), dim3(kThreads), 0,
                             stream, args, is_near ? *launch.near : NearAppends{});
}

template <Precision kPrecision>
cudaError_t LaunchDim(const AppendLaunch& launch, cudaStream_t stream) {
  switch (launch.params.head_dim) {
    case 64:
      return Launch<kPrecision, 64>(launch, stream);
    case 80:
      return Launch<kPrecision, 80>(launch, stream);
    case 96:
      return Launch<kPrecision, 96>(launch, stream);
    case 128:
      return Launch<kPrecision, 128>(launch, stream);
    case 192:
      return Launch<kPrecision, 192>(launch, stream);
    case 256:
      return Launch<kPrecision, 256>(launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchAppend(const AppendLaunch& launch, cudaStream_t stream) {
  return launch.params.precision == Precision::kFp8Kv ? LaunchDim<Precision::kFp8Kv>(launch, stream)
                                                      : LaunchDim<Precision::kBf16>(launch, stream);
}

}  // namespace fp8kvd::kernels::cuda
