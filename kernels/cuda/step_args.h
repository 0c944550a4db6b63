// kernels/cuda/step_args.h: what a step launcher takes: decode rows whose queries, and one new
// token each, still lie in host memory. Plain data for nvcc and for C++.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode_args.h"

namespace fp8kvd::kernels::cuda {

// q_len 1. Everything but the pools and the tables may be pinned host memory.
struct StepRow {
  DecodeRow decode;
  const uint16_t* k;  // [kv_heads, head_dim] of the token at pos, which the launch appends
  const uint16_t* v;  // as k; both null: there is nothing to append
};

// Rows that travel with the launch itself.
struct NearStepRows {
  static constexpr int32_t kMax = 16;
  StepRow rows[kMax];
};

struct StepArgs {
  DecodeArgs decode;  // rows, near: not read
  // Launches of the same call came before, and touch no sequence of these rows: there is nothing to
  // wait for but the end.
  bool is_later_part;
};

// Query columns of a pair that there is a step kernel for, at most.
inline constexpr int32_t kStepColumnsMax = 8;

using StepLauncher = cudaError_t (*)(const StepArgs& args, const NearStepRows& rows,
                                     const LaunchShape& shape, cudaStream_t stream);
using StepSharedBytes = int32_t (*)(const LaunchShape& shape);

// The step kernel of a precision and head_dim by what the host needs of it; launch null: none.
struct StepFunctions {
  int32_t unit_tokens;
  StepSharedBytes shared_bytes;
  DecodePreparer prepare;
  StepLauncher launch;
};

}  // namespace fp8kvd::kernels::cuda
