// kernels/cuda/any/append_token.cuh: a warp quantises one token's K and V of one KV head and stores
// it, to one place or to several. Codes and scales are those of append_tile.cuh, which is for more
// tokens: there a lane has what is stored together, here four neighbouring dimensions.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/append_tile.cuh"
#include "kernels/cuda/page_layout.h"

namespace fp8kvd::kernels::cuda {

// Lane l has, of every 128 dimensions, 4 l ... 4 l + 3; two values a word.
template <int32_t kHeadDim>
struct TokenPart {
  static constexpr int32_t kLaneDims = 4;
  static constexpr int32_t kRounds = (kHeadDim + kLaneDims * kWarpLanes - 1) / (kLaneDims * 32);

  uint32_t words[2 * kRounds];

  __device__ __forceinline__ static int32_t Dim(int32_t round, int32_t lane) {
    return kLaneDims * (round * kWarpLanes + lane);
  }

  // values: [kHeadDim]
  __device__ __forceinline__ TokenPart(const uint16_t* values, int32_t lane) {
#pragma unroll
    for (int32_t r = 0; r < kRounds; ++r) {
      const bool there = Dim(r, lane) < kHeadDim;
      const uint2 x =
          there ? *reinterpret_cast<const uint2*>(values + Dim(r, lane)) : uint2{0U, 0U};
      words[2 * r] = x.x;
      words[2 * r + 1] = x.y;
    }
  }

  __device__ __forceinline__ uint32_t Largest() const {
    uint32_t largest = 0U;
#pragma unroll
    for (const uint32_t word : words) largest = MaxOfPairs(largest, word & kNoSigns);
    return largest;
  }
};

// A token as it is stored. k, v: [kHeadDim].
template <Precision kPrecision, int32_t kHeadDim>
class EncodedToken;

template <int32_t kHeadDim>
class EncodedToken<Precision::kFp8Kv, kHeadDim> {
 public:
  using P = TokenPart<kHeadDim>;

  __device__ __forceinline__ EncodedToken(const uint16_t* k, const uint16_t* v, int32_t lane) {
    P k_part(k, lane);
    P v_part(v, lane);
    const uint32_t k_largest = k_part.Largest();
    const uint32_t v_largest = v_part.Largest();
    uint32_t both = MaxOfPairs(LowHalves(k_largest, v_largest), HighHalves(k_largest, v_largest));
#pragma unroll
    for (int32_t step = 1; step < kWarpLanes; step *= 2) {
      both = MaxOfPairs(both, __shfl_xor_sync(kAllLanes, both, step));
    }
    const RowScale k_row = ScaleOf(LowValue(both), k_part.words);
    const RowScale v_row = ScaleOf(HighValue(both), v_part.words);
    k_scale_ = k_row.scale;
    v_scale_ = v_row.scale;
#pragma unroll
    for (int32_t r = 0; r < P::kRounds; ++r) {
      const auto k_of = [&](float x) { return Quotient(x, k_row); };
      const auto v_of = [&](float x) { return Quotient(x, v_row); };
      const uint32_t k0 = k_part.words[2 * r];
      const uint32_t k1 = k_part.words[2 * r + 1];
      const uint32_t v0 = v_part.words[2 * r];
      const uint32_t v1 = v_part.words[2 * r + 1];
      k_codes_[r] = EncodePair(k_of(LowValue(k0)), k_of(HighValue(k0))) |
                    EncodePair(k_of(LowValue(k1)), k_of(HighValue(k1))) << 16;
      v_codes_[r] = EncodePair(v_of(LowValue(v0)), v_of(HighValue(v0))) |
                    EncodePair(v_of(LowValue(v1)), v_of(HighValue(v1))) << 16;
    }
  }

  // token: of the tile's 16.
  __device__ __forceinline__ void Store(uint8_t* tile, int32_t token, int32_t lane) const {
#pragma unroll
    for (int32_t r = 0; r < P::kRounds; ++r) {
      const int32_t dim = P::Dim(r, lane);
      if (dim >= kHeadDim) break;
      uint8_t* v = tile + TileOperandBytes(Precision::kFp8Kv, kHeadDim);
      *reinterpret_cast<uint32_t*>(tile + KPlace<Precision::kFp8Kv>(kHeadDim, token, dim)) =
          k_codes_[r];
#pragma unroll
      for (int32_t i = 0; i < P::kLaneDims; ++i) {
        v[VPlace<Precision::kFp8Kv>(kHeadDim, token, dim + i)] =
            static_cast<uint8_t>(v_codes_[r] >> (8 * i));
      }
    }
    if (lane == 0) {
      *reinterpret_cast<float*>(tile + TileKScales(kHeadDim) + 4 * token) = k_scale_;
      *reinterpret_cast<float*>(tile + TileVScales(kHeadDim) + 4 * token) = v_scale_;
    }
  }

 private:
  uint32_t k_codes_[P::kRounds];
  uint32_t v_codes_[P::kRounds];
  float k_scale_;
  float v_scale_;
};

template <int32_t kHeadDim>
class EncodedToken<Precision::kBf16, kHeadDim> {
 public:
  using P = TokenPart<kHeadDim>;

  __device__ __forceinline__ EncodedToken(const uint16_t* k, const uint16_t* v, int32_t lane)
      : k_(k, lane), v_(v, lane) {}

  __device__ __forceinline__ void Store(uint8_t* tile, int32_t token, int32_t lane) const {
#pragma unroll
    for (int32_t r = 0; r < P::kRounds; ++r) {
      const int32_t dim = P::Dim(r, lane);
      if (dim >= kHeadDim) break;
      *reinterpret_cast<uint2*>(tile + KPlace<Precision::kBf16>(kHeadDim, token, dim)) = {
          k_.words[2 * r], k_.words[2 * r + 1]};
      uint8_t* v = tile + TileOperandBytes(Precision::kBf16, kHeadDim);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        *reinterpret_cast<uint16_t*>(v + VPlace<Precision::kBf16>(kHeadDim, token, dim + i)) =
            static_cast<uint16_t>(v_.words[2 * r + i / 2] >> (16 * (i % 2)));
      }
    }
  }

 private:
  const P k_;
  const P v_;
};

}  // namespace fp8kvd::kernels::cuda
