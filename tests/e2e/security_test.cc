// The built daemon and fp8kvctl behind all locks at once, and that nothing of a secret comes out.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cc/client.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/http_get.h"
#include "tests/rpc/tokens_file.h"
#include "tests/support/certificates.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Files of a daemon with TLS, mTLS and the tenants "a" and "b", and of their clients.
class Secrets {
 public:
  Secrets() : authority_("ours"), pem_(authority_.Sign("daemon")), client_(authority_.Sign("a")) {
    Write("ca", authority_.pem());
    Write("chain", pem_.chain);
    Write("key", pem_.key);
    Write("client", client_.chain);
    Write("client_key", client_.key);
    Write("alpha", "alpha-token\n");
    Write("next", "next-token\n");
    Write("tokens", TokenLine("a", kAlphaHash) + TokenLine("b", kBetaHash));
  }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
  }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  std::string Config() const {
    return "security { tls_cert_file: \"" + Path("chain") + "\" tls_key_file: \"" + Path("key") +
           "\" tls_client_ca_file: \"" + Path("ca") + "\" tokens_file: \"" + Path("tokens") +
           "\" }\ntenants { name: \"a\" }\ntenants { name: \"b\" }\n";
  }
  std::vector<std::string> Words() const {
    std::vector<std::string> words = {"alpha-token", "next-token", kAlphaHash, kBetaHash,
                                      kNextHash};
    for (const Pem& pem : {pem_, client_}) {  // a line of the key
      words.push_back(pem.key.substr(pem.key.find('\n') + 1, 40));
    }
    return words;
  }

 private:
  const TempFolder folder_;
  const Authority authority_;
  const Pem pem_;
  const Pem client_;
};

// fp8kvctl info: the exit code; what it printed goes to *output.
int AskInfo(const Daemon& daemon, const std::vector<std::string>& flags,
            std::string* output = nullptr) {
  const std::filesystem::path log = daemon.folder() / "ctl";
  std::vector<std::string> args = {"info", "--timeout_ms=5000", "--target=" + daemon.address()};
  args.insert(args.end(), flags.begin(), flags.end());
  Process process(BuiltProgram("fp8kvctl"), args, log);
  const int code = process.Wait();
  if (output != nullptr) *output = ReadFile(log);
  return code;
}

class Locked : public ::testing::Test {
 protected:
  static DaemonSetup Setup(const Secrets& secrets) {
    DaemonSetup setup;
    setup.models += secrets.Config();
    return setup;
  }
  std::vector<std::string> Flags(const std::string& token) const {
    return {"--tls_ca=" + secrets_.Path("ca"), "--tls_cert=" + secrets_.Path("client"),
            "--tls_key=" + secrets_.Path("client_key"), "--token_file=" + secrets_.Path(token)};
  }

  const Secrets secrets_;
  Daemon daemon_{Setup(secrets_)};
};

TEST_F(Locked, AnswersWhoHasCertificateAndToken) {
  std::string output;
  EXPECT_EQ(AskInfo(daemon_, Flags("alpha"), &output), 0) << output << daemon_.log();
  EXPECT_THAT(output, HasSubstr("m8"));
  EXPECT_EQ(AskInfo(daemon_, Flags("next"), &output), 1);
  EXPECT_THAT(output, HasSubstr("no token that this server knows"));
  EXPECT_THAT(output, Not(HasSubstr("next-token")));
  EXPECT_NE(AskInfo(daemon_,
                    {"--tls_ca=" + secrets_.Path("ca"), "--token_file=" + secrets_.Path("alpha")}),
            0);
  EXPECT_EQ(AskInfo(daemon_, {}), 3);
  EXPECT_EQ(daemon_.Stop(), 0) << daemon_.log();
}

TEST_F(Locked, SighupReadsTheTokensAgain) {
  secrets_.Write("tokens", TokenLine("a", kNextHash));
  daemon_.process().Kill(SIGHUP);
  ASSERT_TRUE(WaitUntil([this] {
    return daemon_.log().find("tokens_file was read again") != std::string::npos;
  })) << daemon_.log();
  EXPECT_EQ(AskInfo(daemon_, Flags("alpha")), 1);
  EXPECT_EQ(AskInfo(daemon_, Flags("next")), 0) << daemon_.log();
  secrets_.Write("tokens", "a next-token\n");  // by mistake the token itself
  daemon_.process().Kill(SIGHUP);
  ASSERT_TRUE(WaitUntil([this] { return daemon_.log().find("stay in use") != std::string::npos; }))
      << daemon_.log();
  EXPECT_EQ(AskInfo(daemon_, Flags("next")), 0) << daemon_.log();
}

// A client of ours through shared memory and nothing else, with certificate and token.
class SharedClient {
 public:
  SharedClient(const Daemon& daemon, const Secrets& secrets, const std::string& token)
      : client_(
            client::Client::Connect(
                {.target = daemon.address(),
                 .tls = client::TlsOptions{.root_certificates = ReadFile(secrets.Path("ca")),
                                           .certificate_chain = ReadFile(secrets.Path("client")),
                                           .private_key = ReadFile(secrets.Path("client_key"))},
                 .token = token,
                 .retries_max = 0,
                 .transport = client::Transport::kSharedMemory})
                .value()) {}

  std::vector<client::Sequence> Create() {
    return client_->CreateSequences({.model = "m"}).value();
  }
  // The next token of the sequence.
  absl::StatusOr<client::DecodeReply> Step(const client::Handle& handle, uint64_t pos) {
    const std::vector<uint16_t> q(size_t{4} * 64, 0x3F80);
    const std::vector<uint16_t> k(size_t{2} * 64, 0x3F80);
    return client_->Decode(
        {.model = "m", .handles = {&handle, 1}, .positions = {&pos, 1}, .q = q, .k = k, .v = k});
  }
  bool Serves(const client::Handle& handle, uint64_t pos) {
    const auto reply = Step(handle, pos);
    return reply.ok() && reply->item_errors.empty() &&
           client_->transport().in_use == client::Transport::kSharedMemory;
  }

 private:
  const std::unique_ptr<client::Client> client_;
};

TEST_F(Locked, SharedMemoryServesEachTenantItsOwn) {
  SharedClient a(daemon_, secrets_, "alpha-token");
  SharedClient b(daemon_, secrets_, "beta-token");
  const std::vector<client::Sequence> as = a.Create();
  const std::vector<client::Sequence> bs = b.Create();
  EXPECT_TRUE(a.Serves(as[0].handle(), 0)) << daemon_.log();
  EXPECT_TRUE(b.Serves(bs[0].handle(), 0));
  const auto stolen = b.Step(as[0].handle(), 1);
  ASSERT_TRUE(stolen.ok()) << stolen.status();
  ASSERT_EQ(stolen->item_errors.size(), 1U);
  EXPECT_EQ(stolen->item_errors[0].status.code(), absl::StatusCode::kNotFound);
  SharedClient stranger(daemon_, secrets_, "next-token");
  EXPECT_EQ(stranger.Step(as[0].handle(), 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(a.Serves(as[0].handle(), 1));
}

TEST_F(Locked, ARevokedTokenKeepsItsSessionAndOpensNoOther) {
  SharedClient before(daemon_, secrets_, "alpha-token");
  const std::vector<client::Sequence> sequences = before.Create();
  ASSERT_TRUE(before.Serves(sequences[0].handle(), 0)) << daemon_.log();
  secrets_.Write("tokens", TokenLine("a", kNextHash));
  daemon_.process().Kill(SIGHUP);
  ASSERT_TRUE(WaitUntil([this] {
    return daemon_.log().find("tokens_file was read again") != std::string::npos;
  })) << daemon_.log();
  EXPECT_TRUE(before.Serves(sequences[0].handle(), 1));
  SharedClient revoked(daemon_, secrets_, "alpha-token");
  EXPECT_EQ(revoked.Step(sequences[0].handle(), 2).status().code(), absl::StatusCode::kUnavailable);
  SharedClient after(daemon_, secrets_, "next-token");
  EXPECT_TRUE(after.Serves(sequences[0].handle(), 2));
}

TEST_F(Locked, SighupTakesOverBoundsOfTenants) {
  std::string before;
  ASSERT_EQ(AskInfo(daemon_, Flags("alpha"), &before), 0) << before;
  const std::filesystem::path path = daemon_.folder() / "config.textproto";
  std::string config = ReadFile(path);
  const std::string name = "name: \"a\"";
  ASSERT_NE(config.find(name), std::string::npos);
  config.insert(config.find(name) + name.size(), " pages_share_max: 0.25");
  std::ofstream(path) << config;
  daemon_.process().Kill(SIGHUP);
  ASSERT_TRUE(WaitUntil([this] {
    return daemon_.log().find("the tenants have other bounds") != std::string::npos;
  })) << daemon_.log();
  std::string after;  // a's own part of the pools
  EXPECT_TRUE(WaitUntil([&] {
    return AskInfo(daemon_, Flags("alpha"), &after) == 0 && after != before;
  })) << after;
}

TEST_F(Locked, NoSecretComesOut) {
  EXPECT_EQ(AskInfo(daemon_, Flags("alpha")), 0);
  EXPECT_EQ(AskInfo(daemon_, Flags("next")), 1);
  secrets_.Write("tokens", "a next-token\n");
  daemon_.process().Kill(SIGHUP);
  ASSERT_TRUE(WaitUntil([this] { return daemon_.log().find("stay in use") != std::string::npos; }));
  std::string all =
      HttpGet(daemon_.http_port(), "/statusz") + HttpGet(daemon_.http_port(), "/metrics");
  ASSERT_THAT(all, HasSubstr("200 OK"));
  const std::filesystem::path report = daemon_.folder() / "report";
  Process check(BuiltProgram("fp8kvd"),
                {"--config=" + (daemon_.folder() / "config.textproto").string(),
                 "--allow_fp8_kv=true", "--log_level=debug", "--check_config"},
                report);
  EXPECT_EQ(check.Wait(), 0) << ReadFile(report);
  EXPECT_THAT(ReadFile(report), HasSubstr("tokens_file: "));
  EXPECT_EQ(daemon_.Stop(), 0);
  all += ReadFile(report) + daemon_.log();
  for (const std::string& secret : secrets_.Words()) {
    EXPECT_EQ(all.find(secret), std::string::npos) << secret;
  }
}

}  // namespace
}  // namespace fp8kvd::testing
