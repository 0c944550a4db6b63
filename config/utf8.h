// config/utf8.h: whether bytes are UTF-8 as RFC 3629 has it: shortest forms, no surrogates, at most
// U+10FFFF.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fp8kvd::config {

bool IsUtf8(absl::string_view bytes);

// INVALID_ARGUMENT "line N: …" that names the line of the first byte that belongs to no sequence.
absl::Status CheckUtf8(absl::string_view text);

}  // namespace fp8kvd::config
