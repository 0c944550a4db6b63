// server/translate/rows.h: the two passes over rows of bf16 that a poller makes on the copy in a
// slot: are all values within range, and what is their digest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/types/span.h"

namespace fp8kvd::translate {

struct BadElement {
  int64_t index = 0;
  std::string text;  // "NaN", "-inf", "5.4e+08"
};

// The first value that is not finite or >= 2^28 in size.
std::optional<BadElement> FindBad(absl::Span<const uint16_t> values);

// XXH3-64 of both, as the replay check compares them.
uint64_t RowsDigest(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v);

}  // namespace fp8kvd::translate
