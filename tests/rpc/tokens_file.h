// tests/rpc/tokens_file.h: a tokens_file that lives as long as its object, of two tenants "a" and
// "b" with the tokens "alpha-token" and "beta-token"; "next-token" is a's next one.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "gtest/gtest.h"

#include "server/rpc/tokens.h"

namespace fp8kvd::testing {

// Their SHA-256.
inline constexpr char kAlphaHash[] =
    "a336d9b1d8b8647875238537ca5087b0ea335afd2032936aecdffc3e4b13f720";
inline constexpr char kBetaHash[] =
    "863d63c0bd3a94bfca84ed2063a7355a226faff82ca50b90158bf183aa1a9e61";
inline constexpr char kNextHash[] =
    "394889a5b991a77dee30cc636d3f50a7697bcc1c9e7b9daea8acc2df488ee803";

inline std::string TokenLine(const std::string& tenant, const std::string& hash) {
  return tenant + "  " + hash + "\n";
}

class TokensFile {
 public:
  explicit TokensFile(const std::string& text = TokenLine("a", kAlphaHash) +
                                                TokenLine("b", kBetaHash))
      : path_(::testing::TempDir() + "tokens." + std::to_string(getpid())) {
    Write(text);
  }
  ~TokensFile() { std::remove(path_.c_str()); }
  TokensFile(const TokensFile&) = delete;
  TokensFile& operator=(const TokensFile&) = delete;

  void Write(const std::string& text) const { std::ofstream(path_) << text; }
  absl::StatusOr<std::unique_ptr<rpc::Tokens>> Load() const {
    return rpc::Tokens::Load(path_, {"a", "b"});
  }

 private:
  const std::string path_;
};

}  // namespace fp8kvd::testing
