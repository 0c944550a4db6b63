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

// Rows that travel with the launch itself. A launch costs by their bytes, so there is a kernel for
// each of these numbers.
inline constexpr int32_t kStepRowsMax = 16;
inline constexpr int32_t kStepRowsOf[] = {1, 8, kStepRowsMax};

template <int32_t kRows>
struct NearStepRows {
  StepRow rows[kRows];
};

struct StepArgs {
  DecodeArgs decode;  // rows, near: not read
  // Launches of the same call came before, and touch no sequence of these rows: there is nothing to
  // wait for but the end.
  bool is_later_part;
};

// Query columns of a pair that there is a step kernel for, at most.
inline constexpr int32_t kStepColumnsMax = 8;

// The kernel of a precision and head_dim by what the host needs of it; kernel null: there is none.
struct StepFunctions {
  int32_t unit_tokens;
  int32_t (*shared_bytes)(const LaunchShape& shape);  // of a CTA
  // The kernel for so many rows, as the runtime knows it. Its grid is x a cluster of shape.cluster
  // for each KV head, y the rows; its parameters are StepArgs, NearStepRows and the stages.
  const void* (*kernel)(int32_t rows);
};

}  // namespace fp8kvd::kernels::cuda
