// kernels/cuda/any/decode/new_tokens.cuh: the append of a token of each row inside the decode that
// reads it. The warp that has a pair's last unit, and no other of the launch, reads the token: it
// quantises it and puts it into its page before it sets out the copy of that unit. This stands
// before the wait for the launch before, which is what hides it.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/append_token.cuh"
#include "kernels/cuda/any/decode/work.cuh"

namespace fp8kvd::kernels::cuda {

// unit: the pair's last, from the sequence's start. All lanes of the warp call it.
template <class T, class Ring>
__device__ __forceinline__ void AppendToken(const NewToken& token, const DecodeRow& row,
                                            int32_t kv_head, int32_t unit, int32_t lane) {
  if (token.k == nullptr) return;
  const uint8_t* const from = SourceInPair<T>(row, kv_head, unit).from;
  const uint8_t* const tile = from + row.pos % T::kUnitTokens / kTileTokens * T::kTileBytes;
  // What is stored are parts of sectors, which then need not wait for the rest to come.
  if constexpr (Ring::kBringsNear) {
    if (lane == 0) Ring::BringNear({tile, T::kTileBytes, false});
  }
  const int64_t element = int64_t{kv_head} * T::kHeadDim;
  const EncodedToken<T::kPrecision, T::kHeadDim> encoded(token.k + element, token.v + element,
                                                         lane);
  encoded.Store(const_cast<uint8_t*>(tile), row.pos % kTileTokens, lane);
}

// Of a pair whose units are counted from its first, by the warp that has its last one. row: a copy
// of args.rows[row_index].
template <class T, class Ring>
__device__ __forceinline__ void AppendTokenOfPair(const DecodeArgs& args, int32_t row_index,
                                                  const DecodeRow& row, const Pair& pair) {
  if constexpr (T::kColumns <= NearRows::kColumnsMax) {
    if (args.tokens == nullptr) return;
    AppendToken<T, Ring>(args.tokens[row_index], row, pair.kv_head,
                         pair.first_unit + pair.units.end - 1, threadIdx.x % kWarpLanes);
    Ring::OrderStoresBeforeCopiesOfThem();
    __syncwarp();
  }
}

// Of all pairs whose last unit is among the warp's. row: of its first unit. Before a copy of such a
// unit is set out come Ring::OrderStoresBeforeCopiesOfThem and a barrier of the warp.
template <class T, class Ring>
__device__ __forceinline__ void AppendTokens(const DecodeArgs& args, const WorkMap& map,
                                             Range units, int32_t row) {
  for (int32_t unit = units.first; unit < units.end;) {
    while (unit >= map.units[row + 1]) ++row;
    const DecodeRow& r = args.rows[row];
    const RowWork work = WorkOf<T>(r, args.group);
    const int32_t kv_head = FloorDiv(unit - map.units[row], work.units);
    unit = map.units[row] + (kv_head + 1) * work.units;
    if (unit > units.end) break;
    AppendToken<T, Ring>(args.tokens[row], r, kv_head, work.first_unit + work.units - 1,
                         threadIdx.x % kWarpLanes);
  }
}

}  // namespace fp8kvd::kernels::cuda
