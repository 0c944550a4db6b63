// kernels/cpu/decode-inl.h: attention to one page of one (row, KV head), compiled once per
// instruction set. Included by decode.cc alone, within hwy/foreach_target.h.
//
// Both matrix products have the same form (page_layout.h): lanes x columns, summed over an inner
// index.
//     scores   lanes: tokens of a K tile       inner: dimensions     columns: q of each query head
//     P V      lanes: dimensions of a V tile   inner: tokens         columns: P of each query head
// Elements come in pairs of the inner index, each pair is widened to fp32 once and used by all
// columns.
//
// Widening an e4m3 code: its sign, exponent and mantissa are moved to the places of an fp16, whose
// exponent bias is 15 instead of 7. That is the value times 2^-8, exactly, subnormals included; the
// processor's fp16 conversion does the rest. kCodeUnit undoes the factor. (Moved to an fp32's
// places instead, subnormal codes would become subnormal fp32, which attention flushes.)

// Toggled, so that each target compiles it anew.
#if defined(FP8KVD_KERNELS_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FP8KVD_KERNELS_CPU_DECODE_INL_H_
#undef FP8KVD_KERNELS_CPU_DECODE_INL_H_
#else
#define FP8KVD_KERNELS_CPU_DECODE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "config/base/check.h"
#include "kernels/cpu/decode.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/params.h"

// Sums stay in registers only if these loops vanish. Instrumented, they would take minutes to
// compile.
#undef FP8KVD_UNROLL
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FP8KVD_UNROLL(times)
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FP8KVD_UNROLL(times)
#endif
#endif
#ifndef FP8KVD_UNROLL
#define FP8KVD_UNROLL(times) HWY_UNROLL(times)
#endif

HWY_BEFORE_NAMESPACE();
namespace fp8kvd::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kTile>;
using VF = hn::Vec<DF>;
constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(DF()));
static_assert(kTile % kLanes == 0, "a tile is whole vectors");

constexpr float kLog2E = 1.44269504088896341F;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Vectors of lanes that are worked on together, so that sums fill the registers (32 of AVX-512, 16
// of others) and each P or q that is broadcast serves several products.
constexpr int32_t VectorsAtOnce(int32_t columns) {
#if HWY_TARGET == HWY_AVX3
  return columns <= 4 ? 4 : 2;
#else
  return columns <= 2 ? 4 : columns <= 4 ? 2 : 1;
#endif
}

// The two elements of a pair, of all lanes, as numbers.
template <Precision kPrecision>
struct Pair;

template <>
struct Pair<Precision::kFp8Kv> {
  static constexpr int32_t kElementBytes = 1;
  static HWY_INLINE void Load(const uint8_t* from, VF& even, VF& odd) {
    const hn::Rebind<int16_t, DF> d16;
    const hn::Rebind<hwy::float16_t, DF> dh;
    const auto codes = hn::LoadU(d16, reinterpret_cast<const int16_t*>(from));
    const auto fields = hn::Set(d16, static_cast<int16_t>(0xBF80));
    const auto high = hn::And(hn::ShiftRight<1>(codes), fields);
    const auto low = hn::And(hn::ShiftRight<1>(hn::ShiftLeft<8>(codes)), fields);
    even = hn::PromoteTo(DF(), hn::BitCast(dh, low));
    odd = hn::PromoteTo(DF(), hn::BitCast(dh, high));
  }
};

template <>
struct Pair<Precision::kBf16> {
  static constexpr int32_t kElementBytes = 2;
  static HWY_INLINE void Load(const uint8_t* from, VF& even, VF& odd) {
    const hn::Rebind<uint32_t, DF> d32;
    const auto both = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(from));
    even = hn::BitCast(DF(), hn::ShiftLeft<16>(both));
    odd = hn::BitCast(DF(), hn::And(both, hn::Set(d32, 0xFFFF0000U)));
  }
};

// What a product of codes is multiplied with: 1 for bf16.
template <Precision kPrecision>
constexpr float kUnit = kPrecision == Precision::kFp8Kv ? kCodeUnit : 1.0F;

template <Precision kPrecision>
constexpr int64_t kPairBytes = 2 * kTile* Pair<kPrecision>::kElementBytes;

constexpr int32_t kVectorsPerTile = kTile / kLanes;

// Where vector `vector` of a matrix of tiles begins.
template <Precision kPrecision>
HWY_INLINE const uint8_t* VectorAt(const uint8_t* tiles, int64_t tile_bytes, int32_t vector) {
  return tiles + vector / kVectorsPerTile * tile_bytes +
         vector % kVectorsPerTile * kLanes * 2 * Pair<kPrecision>::kElementBytes;
}

// sums[v][c] += pairs [begin, end) of vector (vector + v) times column c, b[c * kStride + inner].
// What lies `ahead` bytes further is fetched meanwhile: blocks are scattered, which processors
// cannot guess.
template <Precision kPrecision, int32_t kStride, int32_t kVectors, int32_t kColumns>
HWY_INLINE void MultiplyPairs(const uint8_t* tiles, int64_t tile_bytes, int32_t vector,
                              int32_t begin, int32_t end, const float* HWY_RESTRICT b,
                              int64_t ahead, VF (&sums)[kVectors][kColumns]) {
  const uint8_t* x[kVectors];
  FP8KVD_UNROLL(4)
  for (int32_t v = 0; v < kVectors; ++v) {
    x[v] = VectorAt<kPrecision>(tiles, tile_bytes, vector + v);
  }
  for (int32_t pair = begin; pair < end; ++pair) {
    FP8KVD_UNROLL(4)
    for (int32_t v = 0; v < kVectors; ++v) {
      VF even;
      VF odd;
      const uint8_t* at = x[v] + pair * kPairBytes<kPrecision>;
      hwy::Prefetch(at + ahead);
      Pair<kPrecision>::Load(at, even, odd);
      FP8KVD_UNROLL(8)
      for (int32_t c = 0; c < kColumns; ++c) {
        sums[v][c] = hn::MulAdd(even, hn::Set(DF(), b[c * kStride + 2 * pair]), sums[v][c]);
      }
      FP8KVD_UNROLL(8)
      for (int32_t c = 0; c < kColumns; ++c) {
        sums[v][c] = hn::MulAdd(odd, hn::Set(DF(), b[c * kStride + 2 * pair + 1]), sums[v][c]);
      }
    }
  }
}

// 2^x for x <= 126; exactly 0 for x <= -127, minus infinity included. Within 2e-7 of itself: the
// polynomial is that of 2^f on [-1/2, 1/2], its next term is below 2^-24.
HWY_INLINE VF Exp2(VF x) {
  const hn::RebindToSigned<DF> di;
  const VF bounded = hn::Max(x, hn::Set(DF(), -127.0F));
  const auto whole = hn::NearestInt(bounded);
  const VF f = hn::Sub(bounded, hn::ConvertTo(DF(), whole));
  VF p = hn::Set(DF(), 1.5252734e-5F);
  p = hn::MulAdd(p, f, hn::Set(DF(), 1.5403530e-4F));
  p = hn::MulAdd(p, f, hn::Set(DF(), 1.3333558e-3F));
  p = hn::MulAdd(p, f, hn::Set(DF(), 9.6181291e-3F));
  p = hn::MulAdd(p, f, hn::Set(DF(), 5.5504109e-2F));
  p = hn::MulAdd(p, f, hn::Set(DF(), 2.4022651e-1F));
  p = hn::MulAdd(p, f, hn::Set(DF(), 6.9314718e-1F));
  p = hn::MulAdd(p, f, hn::Set(DF(), 1.0F));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(whole, hn::Set(di, 127)));
  return hn::Mul(p, hn::BitCast(DF(), exponent));
}

// c * tanh(x / c), absolute error about 1e-7 c: tanh(y) = 1 - 2 / (e^2y + 1), 1 in fp32 beyond |y|
// = 10.
HWY_INLINE VF Softcap(VF x, float softcap) {
  const VF y = hn::Mul(x, hn::Set(DF(), 1.0F / softcap));
  const VF bounded = hn::Min(hn::Max(y, hn::Set(DF(), -10.0F)), hn::Set(DF(), 10.0F));
  const VF e = Exp2(hn::Mul(bounded, hn::Set(DF(), 2.0F * kLog2E)));
  const VF one = hn::Set(DF(), 1.0F);
  const VF tanh = hn::Sub(one, hn::Div(hn::Set(DF(), 2.0F), hn::Add(e, one)));
  return hn::Mul(tanh, hn::Set(DF(), softcap));
}

// One page for kColumns query heads of one KV head. Tokens count from the page's first.
struct PageWork {
  const uint8_t* block;
  const uint8_t* next_block;  // whose K comes after this page's V; this one again if there is none
  PageLayout layout;
  int32_t first;  // tokens of the page that some query of the row sees: [first, end), not empty
  int32_t end;
  float sm_scale;
  float softcap;   // 0: off
  const float* q;  // [kColumns] kQueryStride apart
  float* scores;   // [kColumns] kScoreStride apart: scores, then P
  // What each column sees: [column_first[c], column_end[c]); empty if not first < end.
  int32_t column_first[kColumnsMax];
  int32_t column_end[kColumnsMax];
  // The running result of each column: largest score in units of ln 2, sum of 2^(score - max), raw
  // output.
  float* max;
  float* sum;
  float* o;  // [kColumns, head_dim]
};

template <Precision kPrecision, int32_t kVectors, int32_t kColumns>
HWY_INLINE int32_t ScoreVectors(const PageWork& work, int32_t vector, int32_t vectors_end) {
  for (; vector + kVectors <= vectors_end; vector += kVectors) {
    VF sums[kVectors][kColumns];
    FP8KVD_UNROLL(4)
    for (int32_t v = 0; v < kVectors; ++v) {
      FP8KVD_UNROLL(8)
      for (int32_t c = 0; c < kColumns; ++c) sums[v][c] = hn::Zero(DF());
    }
    MultiplyPairs<kPrecision, kQueryStride>(work.block, work.layout.k_tile_bytes(), vector, 0,
                                            work.layout.head_dim / 2, work.q, work.layout.v_begin(),
                                            sums);
    FP8KVD_UNROLL(4)
    for (int32_t v = 0; v < kVectors; ++v) {
      FP8KVD_UNROLL(8)
      for (int32_t c = 0; c < kColumns; ++c) {
        hn::Store(sums[v][c], DF(), work.scores + c * kScoreStride + (vector + v) * kLanes);
      }
    }
  }
  return vector;
}

// Raw products q . K of all tiles with a visible token.
template <Precision kPrecision, int32_t kColumns>
HWY_INLINE void Scores(const PageWork& work) {
  const int32_t vector = work.first / kTile * kVectorsPerTile;
  const int32_t end = (work.end + kTile - 1) / kTile * kVectorsPerTile;
  const int32_t rest =
      ScoreVectors<kPrecision, VectorsAtOnce(kColumns), kColumns>(work, vector, end);
  ScoreVectors<kPrecision, 1, kColumns>(work, rest, end);
}

// Column c's raw products to scores in units of ln 2; -inf where it sees nothing. Returns the
// largest.
template <Precision kPrecision>
HWY_INLINE float ScaleScores(const PageWork& work, int32_t c) {
  const hn::RebindToSigned<DF> di;
  const bool capped = work.softcap > 0.0F;
  const VF factor = hn::Set(DF(), work.sm_scale * (capped ? 1.0F : kLog2E) * kUnit<kPrecision>);
  const auto before = hn::Set(di, work.column_first[c] - 1);
  const auto end = hn::Set(di, work.column_end[c]);
  const auto* k_scale = reinterpret_cast<const float*>(work.block + work.layout.k_scale(0));
  float* scores = work.scores + c * kScoreStride;
  VF largest = hn::Set(DF(), kMinusInfinity);
  for (int32_t token = work.first / kTile * kTile; token < work.end; token += kLanes) {
    VF score = hn::Mul(hn::Load(DF(), scores + token), factor);
    if constexpr (kPrecision == Precision::kFp8Kv) {
      score = hn::Mul(score, hn::LoadU(DF(), k_scale + token));
    }
    if (HWY_UNLIKELY(capped)) {
      score = hn::Mul(Softcap(score, work.softcap), hn::Set(DF(), kLog2E));
    }
    const auto at = hn::Iota(di, token);
    const auto visible = hn::RebindMask(DF(), hn::And(hn::Gt(at, before), hn::Lt(at, end)));
    score = hn::IfThenElse(visible, score, hn::Set(DF(), kMinusInfinity));
    largest = hn::Max(largest, score);
    hn::Store(score, DF(), scores + token);
  }
  return hn::GetLane(hn::MaxOfLanes(DF(), largest));
}

// Column c's scores to P, times v_scale; the running result moves to the new maximum.
template <Precision kPrecision>
HWY_INLINE void Weigh(const PageWork& work, int32_t c) {
  float* scores = work.scores + c * kScoreStride;
  const float largest = ScaleScores<kPrecision>(work, c);
  const int32_t token_begin = work.first / kTile * kTile;
  if (largest == kMinusInfinity) {  // this column sees nothing here
    std::fill(scores + token_begin, scores + work.end, 0.0F);
    return;
  }
  if (largest > work.max[c]) {
    const VF shrink = Exp2(hn::Set(DF(), work.max[c] - largest));
    float* o = work.o + c * work.layout.head_dim;
    for (int32_t i = 0; i < work.layout.head_dim; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(DF(), o + i), shrink), DF(), o + i);
    }
    work.sum[c] *= hn::GetLane(shrink);
    work.max[c] = largest;
  }
  const VF max = hn::Set(DF(), work.max[c]);
  const auto* v_scale = reinterpret_cast<const float*>(work.block + work.layout.v_scale(0));
  VF sum = hn::Zero(DF());
  for (int32_t token = token_begin; token < work.end; token += kLanes) {
    VF p = Exp2(hn::Sub(hn::Load(DF(), scores + token), max));
    sum = hn::Add(sum, p);
    if constexpr (kPrecision == Precision::kFp8Kv) p = hn::Mul(p, hn::LoadU(DF(), v_scale + token));
    hn::Store(p, DF(), scores + token);
  }
  work.sum[c] += hn::GetLane(hn::SumOfLanes(DF(), sum));
}

template <Precision kPrecision, int32_t kVectors, int32_t kColumns>
HWY_INLINE int32_t ValueVectors(const PageWork& work, int32_t vector, int32_t vectors_end) {
  const int32_t head_dim = work.layout.head_dim;
  const int64_t ahead = work.next_block - (work.block + work.layout.v_begin());
  for (; vector + kVectors <= vectors_end; vector += kVectors) {
    float* o = work.o + vector * kLanes;
    VF sums[kVectors][kColumns];
    FP8KVD_UNROLL(4)
    for (int32_t v = 0; v < kVectors; ++v) {
      FP8KVD_UNROLL(8)
      for (int32_t c = 0; c < kColumns; ++c) {
        sums[v][c] = hn::Load(DF(), o + c * head_dim + v * kLanes);
      }
    }
    MultiplyPairs<kPrecision, kScoreStride>(
        work.block + work.layout.v_begin(), work.layout.v_tile_bytes(), vector,
        (work.first + 1) / 2, work.end / 2, work.scores, ahead, sums);
    FP8KVD_UNROLL(4)
    for (int32_t v = 0; v < kVectors; ++v) {
      FP8KVD_UNROLL(8)
      for (int32_t c = 0; c < kColumns; ++c) {
        hn::Store(sums[v][c], DF(), o + c * head_dim + v * kLanes);
      }
    }
  }
  return vector;
}

// A token whose partner in the pair no query sees: the partner may be NaN and is not multiplied.
template <Precision kPrecision, int32_t kColumns>
HWY_INLINE void AddLoneToken(const PageWork& work, int32_t token) {
  const int32_t head_dim = work.layout.head_dim;
  const uint8_t* tiles = work.block + work.layout.v_begin();
  for (int32_t vector = 0; vector < head_dim / kLanes; ++vector) {
    VF even;
    VF odd;
    Pair<kPrecision>::Load(VectorAt<kPrecision>(tiles, work.layout.v_tile_bytes(), vector) +
                               token / 2 * kPairBytes<kPrecision>,
                           even, odd);
    const VF x = token % 2 == 0 ? even : odd;
    for (int32_t c = 0; c < kColumns; ++c) {
      float* o = work.o + c * head_dim + vector * kLanes;
      const VF p = hn::Set(DF(), work.scores[c * kScoreStride + token]);
      hn::Store(hn::MulAdd(x, p, hn::Load(DF(), o)), DF(), o);
    }
  }
}

template <Precision kPrecision, int32_t kColumns>
void AttendPage(const PageWork& work) {
  Scores<kPrecision, kColumns>(work);
  for (int32_t c = 0; c < kColumns; ++c) Weigh<kPrecision>(work, c);
  const int32_t vectors = work.layout.head_dim / kLanes;
  const int32_t rest =
      ValueVectors<kPrecision, VectorsAtOnce(kColumns), kColumns>(work, 0, vectors);
  ValueVectors<kPrecision, 1, kColumns>(work, rest, vectors);
  if (work.first % 2 != 0) AddLoneToken<kPrecision, kColumns>(work, work.first);
  if (work.end % 2 != 0) AddLoneToken<kPrecision, kColumns>(work, work.end - 1);
}

template <Precision kPrecision>
void AttendPageOf(int32_t columns, const PageWork& work) {
  switch (columns) {
    case 1:
      return AttendPage<kPrecision, 1>(work);
    case 2:
      return AttendPage<kPrecision, 2>(work);
    case 3:
      return AttendPage<kPrecision, 3>(work);
    case 4:
      return AttendPage<kPrecision, 4>(work);
    case 5:
      return AttendPage<kPrecision, 5>(work);
    case 6:
      return AttendPage<kPrecision, 6>(work);
    case 7:
      return AttendPage<kPrecision, 7>(work);
    case 8:
      return AttendPage<kPrecision, 8>(work);
    default:
      FP8KVD_CHECK(false);
  }
}

}  // namespace fp8kvd::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FP8KVD_KERNELS_CPU_DECODE_INL_H_
