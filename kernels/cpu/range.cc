#include "kernels/cpu/range.h"

#include <algorithm>
#include <cstring>

#include "config/base/limits.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/range.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fp8kvd::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Without its sign, a bf16 orders as an integer, infinities and NaN at the top.
constexpr int16_t kLargestAllowed = ((127 + kRangeExponent) << 7) - 1;

int64_t FirstOutOfRange(const uint16_t* HWY_RESTRICT values, int64_t count) {
  const hn::ScalableTag<int16_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto largest = hn::Set(d, kLargestAllowed);
  const auto magnitude_bits = hn::Set(d, int16_t{0x7FFF});
  const auto* at = reinterpret_cast<const int16_t*>(values);
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    auto top = hn::And(hn::LoadU(d, at + i), magnitude_bits);
    for (int64_t part = 1; part < 4; ++part) {
      top = hn::Max(top, hn::And(hn::LoadU(d, at + i + part * lanes), magnitude_bits));
    }
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::Gt(top, largest)))) break;  // it is among these
  }
  for (; i < count; ++i) {
    if ((values[i] & 0x7FFF) > kLargestAllowed) return i;
  }
  return -1;
}

int64_t CopyInRange(const uint16_t* HWY_RESTRICT from, uint16_t* HWY_RESTRICT to, int64_t count) {
  const hn::ScalableTag<int16_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto magnitude_bits = hn::Set(d, int16_t{0x7FFF});
  const auto* in = reinterpret_cast<const int16_t*>(from);
  auto* out = reinterpret_cast<int16_t*>(to);
  auto top = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto values = hn::LoadU(d, in + i);
    hn::StoreU(values, d, out + i);
    top = hn::Max(top, hn::And(values, magnitude_bits));
  }
  std::copy(from + i, from + count, to + i);
  const bool is_good = hn::AllFalse(d, hn::Gt(top, hn::Set(d, kLargestAllowed)));
  if (HWY_UNLIKELY(!is_good)) return FirstOutOfRange(to, count);
  const int64_t index = FirstOutOfRange(to + i, count - i);
  return index < 0 ? -1 : i + index;
}

constexpr int64_t kLine = 32;  // elements of a line of the caches
// As far ahead as a digest's block is long: its rows come while the one before is hashed.
constexpr int64_t kLinesAhead = 128;

// A vector of elements that begin at any address.
template <class D>
HWY_INLINE hn::Vec<D> LoadAtByte(D d, const uint8_t* from) {
#if HWY_TARGET == HWY_SCALAR
  int16_t value = 0;
  std::memcpy(&value, from, sizeof(value));
  return hn::Set(d, value);
#else
  return hn::BitCast(d, hn::LoadU(hn::Repartition<uint8_t, D>(), from));
#endif
}

// Copies a vector past the caches; the magnitudes of its elements.
template <class D>
HWY_INLINE hn::Vec<D> StreamVector(D d, const uint8_t* HWY_RESTRICT from, int16_t* HWY_RESTRICT to,
                                   int16_t* HWY_RESTRICT kept) {
  const auto values = LoadAtByte(d, from);
  hn::Stream(values, d, to);
  if (kept != nullptr) hn::StoreU(values, d, kept);
  return hn::And(values, hn::Set(d, int16_t{0x7FFF}));
}

int64_t CopyPastCaches(const uint8_t* HWY_RESTRICT from, uint16_t* HWY_RESTRICT to,
                       uint16_t* HWY_RESTRICT kept, int64_t count) {
  const hn::CappedTag<int16_t, kLine / 2> half;  // `to` begins, and ends, at a line or its half
  const hn::CappedTag<int16_t, kLine> whole;
  constexpr int64_t kBytes = sizeof(uint16_t);
  auto* out = reinterpret_cast<int16_t*>(to);
  auto* beside = reinterpret_cast<int16_t*>(kept);
  auto top_of_halves = hn::Zero(half);
  auto top = hn::Zero(whole);
  const auto copy_half = [&](int64_t first) HWY_ATTR {
    for (int64_t i = first; i < first + kLine / 2; i += static_cast<int64_t>(hn::Lanes(half))) {
      const auto sizes =
          StreamVector(half, from + i * kBytes, out + i, beside == nullptr ? nullptr : beside + i);
      top_of_halves = hn::Max(top_of_halves, sizes);
    }
  };
  int64_t at = 0;
  if (count > 0 && reinterpret_cast<uintptr_t>(to) % (kLine * sizeof(uint16_t)) != 0) {
    copy_half(0);
    at = kLine / 2;
  }
  for (; at + kLine <= count; at += kLine) {
    __builtin_prefetch(from + (at + kLinesAhead * kLine) * kBytes, /*write=*/0, /*locality=*/2);
    for (int64_t i = at; i < at + kLine; i += static_cast<int64_t>(hn::Lanes(whole))) {
      const auto sizes =
          StreamVector(whole, from + i * kBytes, out + i, beside == nullptr ? nullptr : beside + i);
      top = hn::Max(top, sizes);
    }
  }
  if (at < count) copy_half(at);
  if (HWY_LIKELY(hn::AllFalse(whole, hn::Gt(top, hn::Set(whole, kLargestAllowed))) &&
                 hn::AllFalse(half, hn::Gt(top_of_halves, hn::Set(half, kLargestAllowed))))) {
    return -1;
  }
  hwy::FlushStream();
  return FirstOutOfRange(to, count);
}

}  // namespace fp8kvd::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fp8kvd::kernels::cpu {

HWY_EXPORT(FirstOutOfRange);
HWY_EXPORT(CopyInRange);
HWY_EXPORT(CopyPastCaches);

int64_t FirstOutOfRange(const uint16_t* values, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(FirstOutOfRange)(values, count);
}

int64_t CopyInRange(const uint16_t* from, uint16_t* to, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(CopyInRange)(from, to, count);
}

int64_t CopyPastCaches(const uint8_t* from, uint16_t* to, uint16_t* kept, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(CopyPastCaches)(from, to, kept, count);
}

void FinishCopies() { hwy::FlushStream(); }

}  // namespace fp8kvd::kernels::cpu
#endif  // HWY_ONCE
