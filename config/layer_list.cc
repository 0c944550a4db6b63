#include "config/layer_list.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace fp8kvd::config {
namespace {

struct Range {
  int32_t first = 0;
  int32_t last = 0;
  int32_t step = 1;
};

bool ParseNumber(absl::string_view text, int32_t* number) {
  return !text.empty() && absl::ascii_isdigit(static_cast<unsigned char>(text[0])) &&
         absl::SimpleAtoi(text, number);
}

bool ParseRange(absl::string_view text, Range* range) {
  const std::pair<absl::string_view, absl::string_view> ends_step =
      absl::StrSplit(text, absl::MaxSplits('/', 1));
  const std::pair<absl::string_view, absl::string_view> ends =
      absl::StrSplit(ends_step.first, absl::MaxSplits('-', 1));
  const bool has_last = absl::StrContains(ends_step.first, "-");
  const bool has_step = absl::StrContains(text, "/");
  if (!ParseNumber(ends.first, &range->first)) return false;
  range->last = range->first;
  if (has_last && !ParseNumber(ends.second, &range->last)) return false;
  if (has_step && (!has_last || !ParseNumber(ends_step.second, &range->step))) return false;
  return range->step >= 1 && range->first <= range->last;
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> ParseLayerList(absl::string_view text, int32_t layers) {
  std::vector<bool> chosen(layers, false);
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    Range range;
    if (!ParseRange(absl::StripAsciiWhitespace(part), &range)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer list \"", part, "\" is none of N, N-N and N-N/STEP; write for example ",
          "\"5,11,17\" or \"5-17/6\""));
    }
    if (range.last >= layers) {
      return absl::InvalidArgumentError(absl::StrCat("layer list names layer ", range.last,
                                                     ", the model has layers 0 to ", layers - 1,
                                                     "; name only those"));
    }
    for (int64_t layer = range.first; layer <= range.last; layer += range.step) {
      chosen[layer] = true;
    }
  }
  std::vector<int32_t> list;
  for (int32_t layer = 0; layer < layers; ++layer) {
    if (chosen[layer]) list.push_back(layer);
  }
  return list;
}

std::string FormatLayerList(absl::Span<const int32_t> layers) {
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t last = i;
    const int32_t step = i + 1 < layers.size() ? layers[i + 1] - layers[i] : 1;
    while (last + 1 < layers.size() && layers[last + 1] - layers[last] == step) ++last;
    if (last - i < 2) last = i;  // two layers are shorter as "a,b"
    absl::StrAppend(&text, text.empty() ? "" : ",", layers[i]);
    if (last > i) absl::StrAppend(&text, "-", layers[last]);
    if (last > i && step > 1) absl::StrAppend(&text, "/", step);
    i = last + 1;
  }
  return text;
}

}  // namespace fp8kvd::config
