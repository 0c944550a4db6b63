#include "client/cc/ctl/handles.h"

#include <charconv>
#include <limits>

#include "absl/strings/str_cat.h"

#include "client/cc/ctl/invocation.h"

namespace fp8kvd::ctl {

std::string HandleText(const client::Handle& handle) {
  return absl::StrCat(absl::Hex(handle.seq_id), ".", absl::Hex(handle.generation), ".",
                      absl::Hex(handle.incarnation), ".", absl::Hex(handle.home));
}

absl::StatusOr<client::Handle> ParseHandle(const std::string& text) {
  uint64_t parts[4] = {};
  const char* at = text.data();
  const char* const end = at + text.size();
  bool good = true;
  for (size_t i = 0; i < 4 && good; ++i) {
    const auto [next, error] = std::from_chars(at, end, parts[i], 16);
    const bool last = i == 3;
    good = error == std::errc() && (last ? next == end : next != end && *next == '.');
    at = last ? next : next + 1;
  }
  constexpr uint64_t kMax32 = std::numeric_limits<uint32_t>::max();
  if (!good || parts[1] > kMax32 || parts[3] > kMax32) {
    return UsageError(absl::StrCat("\"", text,
                                   "\" is not a handle, wanted four hexadecimal numbers "
                                   "with dots between; copy one from fp8kvctl stat"));
  }
  return client::Handle{.seq_id = parts[0],
                        .generation = static_cast<uint32_t>(parts[1]),
                        .incarnation = parts[2],
                        .home = static_cast<uint32_t>(parts[3])};
}

absl::StatusOr<std::vector<client::Handle>> ParseHandles(const std::vector<std::string>& texts) {
  std::vector<client::Handle> handles;
  for (const std::string& text : texts) {
    absl::StatusOr<client::Handle> handle = ParseHandle(text);
    if (!handle.ok()) return handle.status();
    handles.push_back(*handle);
  }
  return handles;
}

const char* PrecisionName(client::Precision precision) {
  switch (precision) {
    case client::Precision::kBf16:
      return "bf16";
    case client::Precision::kFp8Kv:
      return "fp8_kv";
    case client::Precision::kUnspecified:
      return "unspecified";
  }
  return "unspecified";
}

}  // namespace fp8kvd::ctl
