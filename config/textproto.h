// config/textproto.h: the configuration in protobuf's text format (config.proto) to a Tree with
// lines.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "config/tree.h"

namespace fp8kvd::config {

// INVALID_ARGUMENT "line N: …"; for a key that config.proto lacks with the key that was meant.
// Bound the text first.
absl::StatusOr<Tree> ParseTextproto(absl::string_view text);

}  // namespace fp8kvd::config
