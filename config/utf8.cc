#include "config/utf8.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace fp8kvd::config {
namespace {

// Length of the sequence that starts at `bytes`, or 0 if none does.
size_t SequenceLength(absl::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  size_t length = 0;
  if (first >= 0xC2 && first <= 0xDF) length = 2;
  if (first >= 0xE0 && first <= 0xEF) length = 3;
  if (first >= 0xF0 && first <= 0xF4) length = 4;
  if (length == 0 || bytes.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const bool overlong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  const bool surrogate = first == 0xED && byte(1) > 0x9F;
  const bool beyond = first == 0xF4 && byte(1) > 0x8F;
  return overlong || surrogate || beyond ? 0 : length;
}

// Offset of the first byte that belongs to no sequence; bytes.size() if there is none.
size_t FirstBadByte(absl::string_view bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    const size_t length = SequenceLength(bytes.substr(at));
    if (length == 0) return at;
    at += length;
  }
  return at;
}

}  // namespace

bool IsUtf8(absl::string_view bytes) { return FirstBadByte(bytes) == bytes.size(); }

absl::Status CheckUtf8(absl::string_view text) {
  const size_t bad = FirstBadByte(text);
  if (bad == text.size()) return absl::OkStatus();
  const auto line = 1 + std::count(text.begin(), text.begin() + bad, '\n');
  return absl::InvalidArgumentError(
      absl::StrCat("line ", line, ": bytes that are not UTF-8; save the file as UTF-8"));
}

}  // namespace fp8kvd::config
