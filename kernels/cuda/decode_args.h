// kernels/cuda/decode_args.h: what a decode launcher takes beside the stream. Plain data for nvcc
// and for C++.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace fp8kvd::kernels::cuda {

// What launches that may still run write of the pages, tables and rows that a decode reads.
enum class CacheState : uint8_t {
  kSettled,       // nothing: the first reads may overlap them
  kBelowQueries,  // only keys at or after each row's pos: what is before may be read at once
  kUnsettled,     // anything
};

// Rows that travel with the launch itself, where an upload would cost more than it carries.
struct NearRows {
  static constexpr int32_t kMax = 16;
  // Kernels of more query columns have no register to spare for them.
  static constexpr int32_t kColumnsMax = 8;
  DecodeRow rows[kMax];
};

// Tells the host that a launch is done. Its CTAs count themselves, and the last one stores `value`
// to the flag; or, without that round trip, each stores it to a flag of its own.
struct DoneMark {
  uint64_t* flags;     // pinned host memory; null: nobody asks
  uint32_t* arrivals;  // device memory, 0 before and after; null: there is a flag for each CTA
  uint64_t value;
};

// The token at a row's pos, which the launch appends. k, v: [kv_heads, head_dim].
struct NewToken {
  const uint16_t* k;  // null: there is nothing to append
  const uint16_t* v;
};

struct DecodeArgs {
  // Device memory, as all that rows point to; out, lse and sink_logits may be pinned host memory.
  const DecodeRow* rows;
  int32_t rows_count;
  int32_t group;
  int32_t group_inverse;  // GroupInverse(group)
  OutType out_type;
  bool batch_invariant;  // items are cut as the row alone says, and leave pieces
  CacheState cache;

  // Workspace of one launch at a time.
  float* pieces;          // PiecesNeeded times PieceFloats; batch_invariant: one for each item
  uint32_t* piece_flags;  // [2 * ctas] of pieces that are there, 0 before and after
  uint32_t* progress;     // checks of all CTAs (any/decode/pace.cuh): 16 bytes, 0 before and after

  // [rows_count] device memory. Then cache is not kSettled, rows are of one query token, no two of
  // one sequence and layer, and pairs of up to NearRows::kColumnsMax columns. Null: none.
  const NewToken* tokens;

  // Host memory: the rows, in place of `rows`. Null: they are where rows says.
  const NearRows* near;
  DoneMark done;
};

// How a launch is laid over the device. Speed alone depends on it, as long as rows keep the pairs
// that it was made for.
struct LaunchShape {
  int32_t ctas;
  int32_t warps;   // of a CTA; where units are cut, workers (any/decode/traits.h)
  int32_t stages;  // units that a warp has in flight
  // The next launch may start when the warps have set out all or nearly all of their reads, not at
  // once.
  bool lets_next_late;
  // 0: all CTAs share the launch's units (decode_cta.cuh). Else each pair has a cluster of so many
  // CTAs, a power of two (sm90/decode/pairs.cuh), and each row so many pairs.
  int32_t cluster;
  int32_t row_pairs;
  // Of such a warp, brought near when the launch before is done; and when it has no more than these
  // to set out, a launch that lets_next_late does so.
  int32_t near_units;
  bool few_tiles;  // of such a pair: small units pay (any/decode/traits.h)
};

// A kernel by what the host needs of it. Prepare once, before the first launch: loads it and allows
// it shared_bytes of shared memory.
using DecodePreparer = cudaError_t (*)(int32_t shared_bytes);
using DecodeLauncher = cudaError_t (*)(const DecodeArgs& args, const LaunchShape& shape,
                                       cudaStream_t stream);
using SharedBytes = int32_t (*)(int32_t rows_count, const LaunchShape& shape);

// Pieces that a launch may need room for: one for each warp whose first pair began before it, two
// for each CTA whose first or last pair goes beyond it.
constexpr int64_t PiecesNeeded(const LaunchShape& shape) {
  return static_cast<int64_t>(shape.ctas) * (shape.warps + 2);
}

}  // namespace fp8kvd::kernels::cuda
