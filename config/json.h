// config/json.h: JSON (RFC 8259) to a Tree with lines, which protobuf's parser does not tell.
// Besides the RFC it takes NaN, Infinity and -Infinity as numbers, because Python writes them; it
// refuses a name that an object has twice.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "config/tree.h"

namespace fp8kvd::config {

// INVALID_ARGUMENT "line N: …". Cost: linear in the text, up to 150 bytes of memory for each of it:
// bound the text first.
absl::StatusOr<Tree> ParseJson(absl::string_view text);

}  // namespace fp8kvd::config
