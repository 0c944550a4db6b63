#include "kernels/cuda/any/copy.h"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads) CopyPagesKernel(const PageCopy* copies) {
  WaitForPreviousLaunch();
  LetNextLaunchStart();
  const PageCopy copy = copies[blockIdx.y];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * 16;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 16; i < copy.bytes;
       i += stride) {
    *reinterpret_cast<uint4*>(copy.to + i) = *reinterpret_cast<const uint4*>(copy.from + i);
  }
}

// edits: null: near.
__global__ void __launch_bounds__(kThreads)
    TableEditsKernel(const TableEdit* edits, int32_t count,
                     const __grid_constant__ NearEdits near) {
  WaitForPreviousLaunch();
  LetNextLaunchStart();
  const int32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const TableEdit edit = edits == nullptr ? near.edits[i] : edits[i];
  *edit.at = edit.page;
}

}  // namespace

cudaError_t LaunchCopyPages(const PageCopy* copies, int32_t count, int64_t bytes_max,
                            cudaStream_t stream) {
  if (count == 0 || bytes_max == 0) return cudaSuccess;  // a grid has to have a CTA
  constexpr int64_t kBlockBytes = int64_t{kThreads} * 16 * 8;
  constexpr int64_t kBlocksMax = 1024;
  const int64_t blocks = (bytes_max + kBlockBytes - 1) / kBlockBytes;
  const dim3 grid(static_cast<uint32_t>(blocks < kBlocksMax ? blocks : kBlocksMax), count);
  return LaunchAfterPrevious(CopyPagesKernel, grid, dim3(kThreads), 0, stream, copies);
}

cudaError_t LaunchTableEdits(const TableEdit* edits, int32_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return LaunchAfterPrevious(TableEditsKernel, dim3((count + kThreads - 1) / kThreads),
                             dim3(kThreads), 0, stream, edits, count, NearEdits{});
}

cudaError_t LaunchNearEdits(const NearEdits& near, int32_t count, cudaStream_t stream) {
  return LaunchAfterPrevious(TableEditsKernel, dim3(1), dim3(kThreads), 0, stream,
                             static_cast<const TableEdit*>(nullptr), count, near);
}

}  // namespace fp8kvd::kernels::cuda
