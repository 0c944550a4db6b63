// kernels/cuda/step_args.h: what a step launcher takes: decode rows whose queries, and one new
// token each, still lie in host memory. Plain data for nvcc and for C++.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode_args.h"
#include "kernels/host_device.h"

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

  FP8KVD_HOST_DEVICE const StepRow& At(int32_t row) const { return rows[row]; }
};

// A row alone. Its launch as a graph costs by how far apart the bytes lie that are others than in
// the launch before. So what changes with the layer comes first, next to StepArgs::done_value, then
// what changes with the token, then with the sequence.
template <>
struct NearStepRows<1> {
  const uint8_t* base;
  int32_t pos;
  int32_t kv_heads;
  const int32_t* block_table;
  const uint16_t* q;
  void* out;
  float* lse;
  const float* sink_logits;
  const uint16_t* k;
  const uint16_t* v;
  int64_t page_stride;
  int32_t window;
  float sm_scale;
  float softcap;

  explicit NearStepRows(const StepRow& row)
      : base(row.decode.base),
        pos(row.decode.pos),
        kv_heads(row.decode.kv_heads),
        block_table(row.decode.block_table),
        q(row.decode.q),
        out(row.decode.out),
        lse(row.decode.lse),
        sink_logits(row.decode.sink_logits),
        k(row.k),
        v(row.v),
        page_stride(row.decode.page_stride),
        window(row.decode.window),
        sm_scale(row.decode.sm_scale),
        softcap(row.decode.softcap) {}

  FP8KVD_HOST_DEVICE StepRow At(int32_t /*row*/) const {
    return {{q, out, lse, sink_logits, block_table, base, page_stride, pos, /*q_len=*/1, kv_heads,
             window, sm_scale, softcap},
            k,
            v};
  }
};

struct StepArgs {
  DecodeArgs decode;  // rows, near, done.value: not read
  // Launches of the same call came before, and touch no sequence of these rows: there is nothing to
  // wait for but the end.
  bool is_later_part;
  uint64_t done_value;  // of decode.done
};
static_assert(offsetof(StepArgs, done_value) + sizeof(uint64_t) == sizeof(StepArgs));

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
