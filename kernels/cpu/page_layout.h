// kernels/cpu/page_layout.h: where a CPU block keeps each element and scale. A block is 64 tokens
// of one (page, layer, KV head).
//
//   K        4 tiles of 16 tokens:          [tile][head_dim / 2][16 tokens][2 dims]
//   V        head_dim / 16 tiles of dims:   [tile][32 token pairs][16 dims][2 tokens]
//   k_scale  [64] fp32, fp8_kv only
//   v_scale  [64] fp32, fp8_kv only
//
// The 16 places of a tile are the lanes of a vector: tokens for the scores, dimensions for P V, so
// that nothing is summed across lanes. Two elements that are used one after the other stand side by
// side: one load brings both, and shifts and masks alone part them (decode-inl.h).
#pragma once

#include <cstdint>

#include "config/base/geometry.h"

namespace fp8kvd::kernels::cpu {

inline constexpr int32_t kTile = 16;
inline constexpr int32_t kPagePairs = kPageTokens / 2;
static_assert(kPageTokens % kTile == 0, "a page is whole tiles");

struct PageLayout {
  Precision precision;
  int32_t head_dim;  // one of kHeadDims, so a multiple of kTile

  int64_t element_bytes() const { return precision == Precision::kFp8Kv ? 1 : 2; }
  // Bytes of one pair of all 16 places of a tile.
  int64_t pair_bytes() const { return 2 * kTile * element_bytes(); }
  int64_t k_tile_bytes() const { return head_dim / 2 * pair_bytes(); }
  int64_t v_tile_bytes() const { return kPagePairs * pair_bytes(); }

  // Byte offsets from the start of a block.
  int64_t K(int32_t token, int32_t dim) const {
    return token / kTile * k_tile_bytes() + dim / 2 * pair_bytes() +
           (token % kTile * 2 + dim % 2) * element_bytes();
  }
  int64_t V(int32_t token, int32_t dim) const {
    return v_begin() + dim / kTile * v_tile_bytes() + token / 2 * pair_bytes() +
           (dim % kTile * 2 + token % 2) * element_bytes();
  }
  int64_t v_begin() const { return kPageTokens * head_dim * element_bytes(); }
  int64_t k_scale(int32_t token) const { return 2 * v_begin() + token * int64_t{sizeof(float)}; }
  int64_t v_scale(int32_t token) const { return k_scale(kPageTokens + token); }

  int64_t block_bytes() const {
    return precision == Precision::kFp8Kv ? v_scale(kPageTokens) : 2 * v_begin();
  }
};

}  // namespace fp8kvd::kernels::cpu
