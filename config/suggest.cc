#include "config/suggest.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace fp8kvd::config {
namespace {

constexpr size_t kWordMax = 64;

// Levenshtein distance, one row at a time.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

}  // namespace

std::string NearestWord(absl::string_view word, absl::Span<const std::string> candidates) {
  if (word.size() > kWordMax) return "";
  const std::string plain = absl::AsciiStrToLower(absl::StrReplaceAll(word, {{"-", "_"}}));
  std::string nearest;
  size_t least = std::max<size_t>(2, plain.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(plain, candidate);
    if (distance < least && distance < plain.size()) {
      least = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string Suggestion(absl::string_view word, absl::Span<const std::string> candidates) {
  const std::string nearest = NearestWord(word, candidates);
  if (!nearest.empty()) return absl::StrCat("; did you mean ", nearest, "?");
  return absl::StrCat("; known here: ", absl::StrJoin(candidates, ", "));
}

}  // namespace fp8kvd::config
