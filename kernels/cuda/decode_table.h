// kernels/cuda/decode_table.h: which decode kernels exist. One row for each instantiation of
// sm80/decode/inst and sm90/decode/inst; a shape without a row has no kernel.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/decode_args.h"
#include "kernels/cuda/decode_work.h"
#include "kernels/cuda/step_args.h"
#include "kernels/params.h"

namespace fp8kvd::kernels::cuda {

struct DecodeKernel {
  int32_t sm;  // 90: compute capability 9.0 alone; 80: that and any later one
  Precision precision;
  int32_t head_dim;
  Grain grain;  // grain.columns: query columns of a pair
  int32_t warps_max;
  int32_t workers_max;   // of a CTA where units are cut
  int32_t worker_warps;  // of each of those: one, or a warpgroup's four
  int32_t unit_bytes;
  // Where each pair has a CTA or a cluster: tokens of a unit, which may be smaller there, and CTAs
  // of eight warps whose registers a multiprocessor holds.
  int32_t pair_unit_tokens;
  int32_t pair_ctas;
  SharedBytes shared_bytes;
  DecodePreparer prepare;
  DecodeLauncher launch;
  StepFunctions step;  // of the same precision, head_dim and columns
};

std::span<const DecodeKernel> DecodeTable();

// The kernel for rows of up to `columns` query columns a KV head (q_len * group): the least that
// holds them, or the largest there is, with which they are cut into blocks. sm: 90 or 80. nullptr:
// no row.
const DecodeKernel* FindDecodeKernel(int32_t sm, Precision precision, int32_t head_dim,
                                     int32_t columns);

}  // namespace fp8kvd::kernels::cuda
