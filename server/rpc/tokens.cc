#include "server/rpc/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "config/load.h"

namespace fp8kvd::rpc {
namespace {

constexpr size_t kHexDigits = 2 * SHA256_DIGEST_LENGTH;

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokens>> Tokens::Load(std::string path,
                                                     std::vector<std::string> tenants) {
  std::unique_ptr<Tokens> tokens(new Tokens(std::move(path), std::move(tenants)));
  absl::Status status = tokens->Reload();
  if (!status.ok()) return status;
  return tokens;
}

absl::Status Tokens::Reload() {
  absl::StatusOr<Entries> entries = Read();
  if (!entries.ok()) return entries.status();
  auto taken = std::make_shared<const Entries>(*std::move(entries));
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_ = std::move(taken);
  return absl::OkStatus();
}

absl::StatusOr<Tokens::Entries> Tokens::Read() const {
  const absl::StatusOr<std::string> text = config::ReadFileBounded(path_, kFileBytesMax);
  if (!text.ok()) return text.status();
  Entries entries;
  int line_number = 0;
  for (const absl::string_view raw : absl::StrSplit(*text, '\n')) {
    ++line_number;
    const absl::string_view line = absl::StripAsciiWhitespace(raw);
    if (line.empty() || line.front() == '#') continue;
    absl::StatusOr<Entry> entry = ParseLine(line);
    if (entry.ok() && entries.size() == kTokensMax) {
      entry = Invalid(absl::StrCat("more than ", kTokensMax,
                                   " tokens, which is all that one file "
                                   "may have; remove those that nobody uses"));
    }
    if (!entry.ok()) {
      return Invalid(
          absl::StrCat(absl::CEscape(path_), ":", line_number, ": ", entry.status().message()));
    }
    entries.push_back(*entry);
  }
  if (!entries.empty()) return entries;
  return Invalid(absl::StrCat(absl::CEscape(path_),
                              ": no token, so nobody could call; write one "
                              "line \"TENANT SHA256\" for each"));
}

// Texts of the line stay out of errors: it may hold a token by mistake.
absl::StatusOr<Tokens::Entry> Tokens::ParseLine(absl::string_view line) const {
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  if (words.size() != 2 || words[1].size() != kHexDigits || !IsHex(words[1])) {
    return Invalid(absl::StrCat("the line is not TENANT and the ", kHexDigits,
                                " hexadecimal digits of a SHA-256; write it so"));
  }
  const auto tenant = std::find(tenants_.begin(), tenants_.end(), words[0]);
  if (tenant == tenants_.end()) {
    return Invalid(absl::StrCat("the tenant is not configured, there are ", tenants_.size(),
                                "; add tenants { name: … } to the configuration, or correct it"));
  }
  Entry entry;
  entry.tenant = static_cast<cache::TenantId>(tenant - tenants_.begin());
  const std::string bytes = absl::HexStringToBytes(words[1]);
  std::copy(bytes.begin(), bytes.end(), entry.digest.begin());
  return entry;
}

std::optional<cache::TenantId> Tokens::TenantOf(absl::string_view token) const {
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const uint8_t*>(token.data()), token.size(), digest.data());
  std::shared_ptr<const Entries> entries;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries = entries_;
  }
  std::optional<cache::TenantId> found;
  for (const Entry& entry : *entries) {
    if (CRYPTO_memcmp(entry.digest.data(), digest.data(), digest.size()) == 0) {
      found = entry.tenant;
    }
  }
  return found;
}

}  // namespace fp8kvd::rpc
