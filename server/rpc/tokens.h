// server/rpc/tokens.h: whose a bearer token is, from a file that keeps no token, only hashes:
//
//   # tenant  SHA-256 of its token, in hexadecimal
//   team-a    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
//
// One SHA-256 is enough for tokens that a machine chose (32 random bytes), and costs a call less
// than a microsecond; it does not protect one that a person made up. A tenant may have several
// tokens, so that one can follow another.
//
// Promises: how long an answer takes does not tell how much of a token was right: digests are
//   compared whole, all of them. A file that cannot be taken changes nothing. No error holds a
//   token, a hash or a line of the file.
// Threads: any.
// Errors: NOT_FOUND (cannot be read), INVALID_ARGUMENT "FILE:LINE: …".
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "cache/ids.h"

namespace fp8kvd::rpc {

class Tokens {
 public:
  static constexpr size_t kTokensMax = 4096;
  static constexpr int64_t kFileBytesMax = int64_t{1} << 20;

  // tenants: names, in the order of their ids.
  static absl::StatusOr<std::unique_ptr<Tokens>> Load(std::string path,
                                                      std::vector<std::string> tenants);

  // Reads the file again. Calls that run keep the tenant that they began with.
  absl::Status Reload();

  std::optional<cache::TenantId> TenantOf(absl::string_view token) const;

 private:
  struct Entry {
    std::array<uint8_t, 32> digest{};
    cache::TenantId tenant{0};
  };
  using Entries = std::vector<Entry>;

  Tokens(std::string path, std::vector<std::string> tenants)
      : path_(std::move(path)), tenants_(std::move(tenants)) {}
  absl::StatusOr<Entries> Read() const;
  absl::StatusOr<Entry> ParseLine(absl::string_view line) const;

  const std::string path_;
  const std::vector<std::string> tenants_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Entries> entries_;  // guarded by mutex_
};

}  // namespace fp8kvd::rpc
