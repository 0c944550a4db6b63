#include "server/translate/rows.h"

#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
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

}  // namespace fp8kvd::translate
