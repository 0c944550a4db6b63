#include "kernels/cpu/append.h"

#include <cstring>

#include "config/base/limits.h"
#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/targets.h"
#include "kernels/e4m3.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/append.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fp8kvd::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kTile>;
using VF = hn::Vec<DF>;
constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(DF()));

HWY_INLINE VF LoadBf16(const uint16_t* from) {
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<uint32_t, DF> d32;
  return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

// E4m3Encode of every lane but NaN, step for step.
HWY_INLINE hn::Vec<hn::Rebind<int32_t, DF>> Encode(VF value) {
  const hn::Rebind<int32_t, DF> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7FFFFFFF));
  const VF half_unit = hn::Set(DF(), 0x1p14F);
  const auto subnormal = hn::Sub(hn::BitCast(d32, hn::Add(hn::BitCast(DF(), magnitude), half_unit)),
                                 hn::BitCast(d32, half_unit));
  const auto odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(d32, 1));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(d32, 0x7FFFF)), odd);
  const auto normal = hn::Sub(hn::ShiftRight<20>(rounded), hn::Set(d32, (127 - 7) << 3));
  const auto is_subnormal = hn::Lt(magnitude, hn::BitCast(d32, hn::Set(DF(), 0x1p-6F)));
  const auto code =
      hn::Min(hn::IfThenElse(is_subnormal, subnormal, normal), hn::Set(d32, int32_t{kE4m3Largest}));
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(d32, 0x80));
  return hn::Or(code, sign);
}

// codes [head_dim] of a row; returns its scale.
float QuantizeRow(const uint16_t* HWY_RESTRICT row, int32_t head_dim, uint8_t* HWY_RESTRICT codes) {
  const hn::Rebind<uint8_t, DF> d8;
  VF largest = hn::Zero(DF());
  for (int32_t i = 0; i < head_dim; i += kLanes) {
    largest = hn::Max(largest, hn::Abs(LoadBf16(row + i)));
  }
  const float scale = hn::GetLane(hn::MaxOfLanes(DF(), largest)) / kE4m3Max;
  if (scale == 0.0F) {
    std::memset(codes, 0, head_dim);
    return scale;
  }
  const VF divisor = hn::Set(DF(), scale);  // a division each: times 1 / scale would round twice
  for (int32_t i = 0; i < head_dim; i += kLanes) {
    hn::StoreU(hn::DemoteTo(d8, Encode(hn::Div(LoadBf16(row + i), divisor))), d8, codes + i);
  }
  return scale;
}

}  // namespace fp8kvd::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fp8kvd::kernels::cpu {
namespace {

HWY_EXPORT(QuantizeRow);

// Below this many elements per thread, waking another costs more than it brings.
constexpr int64_t kElementsPerThreadMin = 16384;

// Elements of one row to their places: pairs of a K row side by side, each element of a V row
// beside its neighbour token's.
template <class T>
void PlaceK(const PageLayout& layout, int32_t token, const T* row, uint8_t* block) {
  uint8_t* to = block + layout.K(token, 0);
  for (int32_t dim = 0; dim < layout.head_dim; dim += 2) {
    std::memcpy(to, row + dim, 2 * sizeof(T));
    to += layout.pair_bytes();
  }
}

template <class T>
void PlaceV(const PageLayout& layout, int32_t token, const T* row, uint8_t* block) {
  for (int32_t tile = 0; tile < layout.head_dim; tile += kTile) {
    uint8_t* to = block + layout.V(token, tile);
    for (int32_t dim = 0; dim < kTile; ++dim) {
      std::memcpy(to + dim * 2 * sizeof(T), row + tile + dim, sizeof(T));
    }
  }
}

void StoreScale(uint8_t* to, float scale) { std::memcpy(to, &scale, sizeof(scale)); }

// Token i of a row of the launch, all KV heads.
void AppendToken(const AppendParams& params, const AppendRow& row, int32_t i) {
  const PageLayout layout{params.precision, params.head_dim};
  const int32_t pos = row.pos + i;
  const int32_t token = pos % kPageTokens;
  uint8_t* block = row.base + row.block_table[pos / kPageTokens] * row.page_stride;
  for (int32_t kv_head = 0; kv_head < row.kv_heads; ++kv_head) {
    const int64_t at = (int64_t{i} * row.kv_heads + kv_head) * params.head_dim;
    if (params.precision == Precision::kFp8Kv) {
      uint8_t codes[kHeadDimMax];
      const auto quantize = HWY_DYNAMIC_DISPATCH(QuantizeRow);
      StoreScale(block + layout.k_scale(token), quantize(row.k + at, params.head_dim, codes));
      PlaceK(layout, token, codes, block);
      StoreScale(block + layout.v_scale(token), quantize(row.v + at, params.head_dim, codes));
      PlaceV(layout, token, codes, block);
    } else {
      PlaceK(layout, token, row.k + at, block);
      PlaceV(layout, token, row.v + at, block);
    }
    block += layout.block_bytes();
  }
}

struct Launch {
  const AppendParams& params;
  int64_t elements;
  int32_t threads;
};

int64_t Elements(const AppendParams& params, const AppendRow& row) {
  return int64_t{row.n} * row.kv_heads * params.head_dim;
}

// The tokens that begin in this thread's share of the elements.
void AppendTask(void* context, int32_t thread) {
  const FloatMode mode(Subnormals::kKeep);
  const auto& launch = *static_cast<const Launch*>(context);
  if (thread >= launch.threads) return;
  const int64_t begin = launch.elements * thread / launch.threads;
  const int64_t end = launch.elements * (thread + 1) / launch.threads;
  int64_t at = 0;
  for (int32_t i = 0; i < launch.params.rows_count && at < end; ++i) {
    const AppendRow& row = launch.params.rows[i];
    const int64_t token_elements = int64_t{row.kv_heads} * launch.params.head_dim;
    const int64_t row_end = at + Elements(launch.params, row);
    if (row_end > begin) {
      for (int32_t token = 0; token < row.n; ++token) {
        const int64_t token_at = at + token * token_elements;
        if (token_at >= begin && token_at < end) AppendToken(launch.params, row, token);
      }
    }
    at = row_end;
  }
}

}  // namespace

void Append(const AppendParams& params, Workers& workers) {
  Launch launch{params, 0, 1};
  for (int32_t i = 0; i < params.rows_count; ++i) {
    launch.elements += Elements(params, params.rows[i]);
  }
  while (launch.threads < workers.threads() &&
         launch.elements >= (launch.threads + 1) * kElementsPerThreadMin) {
    ++launch.threads;
  }
  if (launch.threads == 1) {
    AppendTask(&launch, 0);
  } else {
    workers.Run(&AppendTask, &launch);
  }
}

}  // namespace fp8kvd::kernels::cpu
#endif  // HWY_ONCE
