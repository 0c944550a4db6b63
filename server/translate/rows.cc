#include "server/translate/rows.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include <xxhash.h>

#include "config/base/limits.h"

namespace fp8kvd::translate {
namespace {

// A bf16's bits without sign are ordered as its size; infinity and NaN are above all numbers.
constexpr uint16_t kSizeMask = 0x7FFF;
constexpr uint16_t kFirstBad = (127 + kRangeExponent) << 7;

bool IsBad(uint16_t value) { return (value & kSizeMask) >= kFirstBad; }

// Four values at once: adding the distance from kFirstBad to 0x8000 carries into a lane's top bit
// exactly when its size reaches kFirstBad, and never into the next lane.
constexpr uint64_t Lanes(uint16_t value) { return uint64_t{0x0001000100010001} * value; }
static_assert(kSizeMask + (0x8000 - kFirstBad) <= 0xFFFF, "a lane holds the sum");

bool AnyBad(const uint16_t* values, size_t count) {
  uint64_t carried = 0;
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    uint64_t four = 0;
    std::memcpy(&four, values + i, sizeof(four));
    carried |= (four & Lanes(kSizeMask)) + Lanes(0x8000 - kFirstBad);
  }
  bool bad = (carried & Lanes(0x8000)) != 0;
  for (; i < count; ++i) bad = bad || IsBad(values[i]);
  return bad;
}

std::string Text(uint16_t value) {
  const float number = std::bit_cast<float>(uint32_t{value} << 16);
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  return absl::StrCat(number);
}

}  // namespace

std::optional<BadElement> FindBad(absl::Span<const uint16_t> values) {
  constexpr size_t kBlock = 1024;
  for (size_t at = 0; at < values.size(); at += kBlock) {
    const absl::Span<const uint16_t> block = values.subspan(at, kBlock);
    if (!AnyBad(block.data(), block.size())) continue;
    for (size_t i = 0; i < block.size(); ++i) {
      if (IsBad(block[i])) return BadElement{static_cast<int64_t>(at + i), Text(block[i])};
    }
  }
  return std::nullopt;
}

uint64_t RowsDigest(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v) {
  const uint64_t of_k = XXH3_64bits(k.data(), k.size() * sizeof(uint16_t));
  return XXH3_64bits_withSeed(v.data(), v.size() * sizeof(uint16_t), of_k);
}

}  // namespace fp8kvd::translate
