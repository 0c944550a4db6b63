// kernels/cuda/any/append.h: quantises new tokens and places them (kernels/params.h), and brings
// queries from the host to the device beside that, on any architecture from sm_80 on. Queues one
// launch and returns; the caller checks shapes and pointers.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace fp8kvd::kernels::cuda {

// `bytes` that nobody else writes or reads meanwhile; a multiple of 16, and so are the addresses.
struct RangeCopy {
  uint8_t* to;
  const uint8_t* from;
  int64_t bytes;
};

// What travels with a launch itself, where there is so little of it that an upload would cost more.
struct NearAppends {
  static constexpr int32_t kMax = 16;
  AppendRow rows[kMax];
  RangeCopy copies[kMax];
};

// Nothing to do launches nothing.
struct AppendLaunch {
  // rows is device memory, and so is all that rows point to (or pinned host memory, for k and v).
  AppendParams params;
  // The largest kv_heads * (16-token tiles that [pos, pos + n) touches) of a row: it sizes the
  // grid, and rows that need more are still done whole.
  int32_t tiles_max = 0;
  bool tables_settled = false;        // the launch before this one writes no table
  const RangeCopy* copies = nullptr;  // device memory
  int32_t copies_count = 0;
  int64_t copy_bytes_max = 0;
  // Host memory: rows and copies are these, and params.rows and copies are not read.
  const NearAppends* near = nullptr;
};
cudaError_t LaunchAppend(const AppendLaunch& launch, cudaStream_t stream);

}  // namespace fp8kvd::kernels::cuda
