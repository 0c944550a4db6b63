#include "server/rpc/tokens.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/rpc/tokens_file.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Tokens, GiveTheTenantOfATokenAndNobodyForAnother) {
  const TokensFile file("# tenants\n\n" + TokenLine("a", kAlphaHash) + TokenLine("b", kBetaHash) +
                        TokenLine("a", kNextHash));
  const auto tokens = file.Load();
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ((*tokens)->TenantOf("alpha-token"), cache::TenantId{0});
  EXPECT_EQ((*tokens)->TenantOf("next-token"), cache::TenantId{0});
  EXPECT_EQ((*tokens)->TenantOf("beta-token"), cache::TenantId{1});
  for (const std::string wrong : {"", "alpha-toke", "alpha-token ", "ALPHA-TOKEN", kAlphaHash}) {
    EXPECT_EQ((*tokens)->TenantOf(wrong), std::nullopt) << wrong;
  }
}

TEST(Tokens, AReloadTakesAndRevokes) {
  const TokensFile file(TokenLine("a", kAlphaHash));
  const auto tokens = file.Load();
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  file.Write(TokenLine("a", kNextHash));
  ASSERT_TRUE((*tokens)->Reload().ok());
  EXPECT_EQ((*tokens)->TenantOf("alpha-token"), std::nullopt);
  EXPECT_EQ((*tokens)->TenantOf("next-token"), cache::TenantId{0});
}

TEST(Tokens, AFileThatCannotBeTakenChangesNothing) {
  const TokensFile file(TokenLine("a", kAlphaHash));
  const auto tokens = file.Load();
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  for (const std::string& bad :
       {std::string(), TokenLine("nobody", kBetaHash), std::string("a alpha-token"),
        TokenLine("a", std::string(kAlphaHash).substr(1))}) {
    file.Write(bad);
    EXPECT_FALSE((*tokens)->Reload().ok()) << bad;
    EXPECT_EQ((*tokens)->TenantOf("alpha-token"), cache::TenantId{0});
  }
}

// Somebody who puts the token itself into the file must not find it in a log.
TEST(Tokens, ErrorsNameTheLineAndQuoteNothingOfIt) {
  for (const std::string& line :
       {std::string("a secret-of-a"), TokenLine("secret-of-a", kAlphaHash),
        std::string("secret-of-a"), "a " + std::string(64, 'z')}) {
    const TokensFile file(TokenLine("a", kBetaHash) + line);
    const absl::Status status = file.Load().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const std::string text(status.message());
    EXPECT_THAT(text, HasSubstr(":2:"));
    for (const std::string& secret : {std::string("secret-of-a"), std::string(kAlphaHash),
                                      std::string(kBetaHash), std::string(8, 'z')}) {
      EXPECT_THAT(text, Not(HasSubstr(secret)));
    }
  }
}

}  // namespace
}  // namespace fp8kvd::testing
