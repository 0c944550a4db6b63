// config/suggest.h: the word that somebody who mistyped meant.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fp8kvd::config {

// The candidate with the fewest single-character edits from `word`, if they are few enough for a
// typing error (at most a third of the word, and 2 are always allowed); else empty. '-' counts as
// '_'. Words longer than 64 are not compared.
std::string NearestWord(absl::string_view word, absl::Span<const std::string> candidates);

// "; did you mean X?" or, with nothing near, "; known here: A, B, ...".
std::string Suggestion(absl::string_view word, absl::Span<const std::string> candidates);

}  // namespace fp8kvd::config
