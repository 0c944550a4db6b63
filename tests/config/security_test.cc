#include "config/security.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "config/load.h"
#include "config/report.h"

namespace fp8kvd::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kModel[] =
    "models { name: \"m\" layers: 2 q_heads: 4 kv_heads: 1 head_dim: 64 expected_seqs: 1 }\n";
constexpr char kTokens[] = "security { tokens_file: \"t\" }\n";

absl::StatusOr<Loaded> LoadWith(const std::string& text) {
  return LoadText(kModel + text, Format::kTextproto, "f.textproto", "", CommandLine{}, {});
}

std::string Refusal(const std::string& text) {
  const absl::StatusOr<Loaded> loaded = LoadWith(text);
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(loaded.status().message());
}

TEST(Tenants, WithoutThemEverybodyIsOneThatMayHaveAll) {
  const auto loaded = LoadWith("");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_EQ(loaded->options.tenants.size(), 1U);
  EXPECT_EQ(loaded->options.tenants[0].pages_share_max, 1.0);
  EXPECT_EQ(loaded->options.tenants[0].seqs_max, loaded->options.cache.seqs_max);
  EXPECT_EQ(loaded->options.tenants[0].inflight_items_max, loaded->options.engine.queue_items_max);
}

TEST(Tenants, WhatIsNotGivenIsTheirShare) {
  const auto loaded = LoadWith(std::string(kTokens) +
                               "cache { seqs_max: 100 } engine { queue_items_max: 4096 }\n"
                               "tenants { name: \"a\" }\n"
                               "tenants { name: \"b\" pages_share_max: 0.75 seqs_max: 90 "
                               "inflight_items_max: 3000 items_per_s_max: 7 }\n");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const TenantOptions& a = loaded->options.tenants[0];
  EXPECT_EQ(a.pages_share_max, 0.5);
  EXPECT_EQ(a.seqs_max, 50);
  EXPECT_EQ(a.inflight_items_max, 2048);
  EXPECT_EQ(a.items_per_s_max, 0);
  const TenantOptions& b = loaded->options.tenants[1];
  EXPECT_EQ(b.pages_share_max, 0.75);
  EXPECT_EQ(b.seqs_max, 90);
  EXPECT_EQ(b.inflight_items_max, 3000);
  EXPECT_EQ(b.items_per_s_max, 7);
}

TEST(Tenants, NeedNamesTokensAndAPartOfEverything) {
  const std::string two = "tenants { name: \"a\" } tenants { name: \"b\" }\n";
  EXPECT_THAT(Refusal(two), HasSubstr("set tokens_file"));
  EXPECT_THAT(Refusal(std::string(kTokens) + "tenants { }"), HasSubstr("has no name"));
  EXPECT_THAT(Refusal(kTokens + two + "tenants { name: \"a\" }"), HasSubstr("configured twice"));
  EXPECT_THAT(Refusal(kTokens + two + "engine { queue_items_max: 2047 }"),
              HasSubstr("queue_items_max is 2047 for 2 tenants, allowed is from 2048"));
  EXPECT_THAT(Refusal(kTokens + two + "engine { staging_slots: 3 }"),
              HasSubstr("staging_slots is 3 for 2 tenants"));
  EXPECT_THAT(Refusal(std::string(kTokens) + "tenants { name: \"a\" inflight_items_max: 1023 }"),
              HasSubstr("allowed is from 1024"));
  std::string many(kTokens);
  for (int i = 0; i <= kTenantsMax; ++i) {
    many += "tenants { name: \"t" + std::to_string(i) + "\" }\n";
  }
  EXPECT_THAT(Refusal(many), HasSubstr("tenants are more than 64"));
}

TEST(Files, AreGivenWithTheirPartners) {
  EXPECT_THAT(Refusal("security { tls_cert_file: \"c\" }"), HasSubstr("both or none"));
  EXPECT_THAT(Refusal("security { tls_key_file: \"k\" }"), HasSubstr("both or none"));
  EXPECT_THAT(Refusal("security { tls_client_ca_file: \"a\" }"), HasSubstr("set those, too"));
}

// Safe by default; what is open is named, each door by itself.
TEST(OpenDoors, AreNoneByDefault) {
  const auto loaded = LoadWith("");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->options.server.listen_address.substr(0, 10), "127.0.0.1:");
  EXPECT_EQ(loaded->options.server.http_address.substr(0, 10), "127.0.0.1:");
  EXPECT_THAT(loaded->warnings, IsEmpty());
}

TEST(OpenDoors, AreNamedWithWhatCloses) {
  const std::string open = "server { listen_address: \"0.0.0.0:1\" http_address: \"[::]:2\" }\n";
  const std::string tls = "security { tls_cert_file: \"c\" tls_key_file: \"k\" }\n";
  const auto warnings = [](const std::string& text) { return LoadWith(text)->warnings; };
  EXPECT_THAT(warnings(open),
              ElementsAre(HasSubstr("0.0.0.0:1 is reachable from other machines without TLS: rows "
                                    "go over"),
                          HasSubstr("without tokens or client certificates"),
                          HasSubstr("http_address [::]:2")));
  EXPECT_THAT(warnings(open + kTokens),
              ElementsAre(HasSubstr("rows and tokens go over"), HasSubstr("http_address")));
  EXPECT_THAT(warnings(open + tls),
              ElementsAre(HasSubstr("without tokens"), HasSubstr("http_address")));
  EXPECT_THAT(warnings("server { listen_address: \"10.0.0.1:1\" }"
                       "security { tls_cert_file: \"c\" tls_key_file: \"k\" tokens_file: \"t\" }"),
              IsEmpty());
  EXPECT_THAT(warnings("server { listen_address: \"localhost:1\" http_address: \"[::1]:2\" }"),
              IsEmpty());
}

TEST(Example, OfTenantsOnANetworkLoadsAndLeavesNoDoorOpen) {
  CommandLine command_line;
  command_line.config_path = "deploy/secure.textproto";
  const auto loaded = Load(command_line, {});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->options.tenants.size(), 2U);
  EXPECT_THAT(loaded->warnings, IsEmpty());
}

TEST(Report, ShowsTenantsAndReadsBackTheSame) {
  const auto loaded = LoadWith(std::string(kTokens) + "tenants { name: \"a\" seqs_max: 7 }\n");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const std::string text = EffectiveConfig(*loaded);
  EXPECT_THAT(text, HasSubstr("tenants {\n  name: \"a\"\n"));
  const auto again = LoadText(text, Format::kTextproto, "f", "", CommandLine{}, {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->options.tenants[0].seqs_max, 7);
}

}  // namespace
}  // namespace fp8kvd::config
