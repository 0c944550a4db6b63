// config/layer_list.h: sets of layers as an operator writes them: "5,11,17", "0-25", "5-17/6"
// (every sixth from 5 to 17), or a list of those.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fp8kvd::config {

// The layers of `text`, ascending and distinct. INVALID_ARGUMENT for another form, or for a layer
// that is not in [0, layers).
absl::StatusOr<std::vector<int32_t>> ParseLayerList(absl::string_view text, int32_t layers);

// The shortest of the forms above for these layers, which are ascending and distinct.
std::string FormatLayerList(absl::Span<const int32_t> layers);

}  // namespace fp8kvd::config
