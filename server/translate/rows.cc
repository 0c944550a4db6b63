#include "server/translate/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#define XXH_STATIC_LINKING_ONLY  // the state of a digest on the stack
#include <xxhash.h>
#ifdef FP8KVD_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>  // the same functions and values, by the widest vectors of the machine
#endif

#include "kernels/cpu/range.h"

namespace fp8kvd::translate {
namespace {

std::string Text(uint16_t value) {
  const float number = std::bit_cast<float>(uint32_t{value} << 16);
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  return absl::StrCat(number);
}

}  // namespace

std::optional<BadElement> FindBad(absl::Span<const uint16_t> values) {
  const int64_t index =
      kernels::cpu::FirstOutOfRange(values.data(), static_cast<int64_t>(values.size()));
  if (index < 0) return std::nullopt;
  return BadElement{index, Text(values[index])};
}

uint64_t RowsDigest(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v) {
  const uint64_t of_k = XXH3_64bits(k.data(), k.size() * sizeof(uint16_t));
  return XXH3_64bits_withSeed(v.data(), v.size() * sizeof(uint16_t), of_k);
}

void StreamRows(const uint8_t* from, uint16_t* to, int64_t count, std::optional<BadElement>* bad) {
  const int64_t index =
      kernels::cpu::CopyPastCaches(reinterpret_cast<const uint16_t*>(from), to, nullptr, count);
  if (index >= 0) *bad = BadElement{index, Text(to[index])};
}

uint64_t StreamRows(const uint8_t* from, uint16_t* to, int64_t count, uint64_t seed,
                    std::optional<BadElement>* bad) {
  constexpr int64_t kBlock = 4096;  // stays in the first cache
  alignas(64) uint16_t block[kBlock];
  const auto copy = [&](int64_t at, int64_t part) {
    const int64_t index = kernels::cpu::CopyPastCaches(reinterpret_cast<const uint16_t*>(from) + at,
                                                       to + at, block, part);
    if (index >= 0 && !bad->has_value()) *bad = BadElement{at + index, Text(to[at + index])};
  };
  if (count <= kBlock) {
    copy(0, count);
    return XXH3_64bits_withSeed(block, static_cast<size_t>(count) * sizeof(uint16_t), seed);
  }
  XXH3_state_t state;
  XXH3_64bits_reset_withSeed(&state, seed);
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t part = std::min(kBlock, count - at);
    copy(at, part);
    XXH3_64bits_update(&state, block, static_cast<size_t>(part) * sizeof(uint16_t));
  }
  return XXH3_64bits_digest(&state);
}

void FinishStreaming() { kernels::cpu::FinishCopies(); }

}  // namespace fp8kvd::translate
