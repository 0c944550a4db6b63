// TLS on the gRPC port: who gets in, and certificates that change under open connections.
#include "server/rpc/tls.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"

#include "tests/rpc/rig.h"
#include "tests/support/certificates.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The files of a daemon, and what it said about them.
class Files {
 public:
  Files() : folder_(::testing::TempDir() + "tls." + std::to_string(getpid()) + ".") {}
  ~Files() {
    for (const char* name : {"chain", "key", "ca"}) std::remove(Path(name).c_str());
  }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  // As tools that rotate certificates do: whole files, in place of those before.
  void Write(const Pem& pem) const {
    Replace("chain", pem.chain);
    Replace("key", pem.key);
  }
  void Replace(const char* name, const std::string& text) const {
    std::ofstream(Path("new")) << text;
    ASSERT_EQ(std::rename(Path("new").c_str(), Path(name).c_str()), 0);
  }
  config::SecurityOptions Options(bool wants_clients) const {
    config::SecurityOptions options;
    options.tls_cert_file = Path("chain");
    options.tls_key_file = Path("key");
    if (wants_clients) options.tls_client_ca_file = Path("ca");
    return options;
  }
  rpc::Warn Warn() {
    return [this](const std::string& text) {
      const std::lock_guard<std::mutex> lock(mutex_);
      warnings_ += text + "\n";
    };
  }
  std::string warnings() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return warnings_;
  }
  std::string Path(const std::string& name) const { return folder_ + name; }

 private:
  const std::string folder_;
  std::mutex mutex_;
  std::string warnings_;
};

ServerRigOptions WithTls(const config::SecurityOptions& security, rpc::Warn warn) {
  ServerRigOptions options;
  auto credentials = rpc::MakeCredentials(security, std::move(warn));
  EXPECT_TRUE(credentials.ok()) << credentials.status();
  if (credentials.ok()) options.locks.credentials = *credentials;
  return options;
}

bool Answers(const ServerRig& rig, const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  const auto stub = v1::DecodeAttention::NewStub(rig.Channel(credentials));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::GetServerInfoResponse info;
  return stub->GetServerInfo(&context, {}, &info).ok();
}

std::shared_ptr<grpc::ChannelCredentials> Trusting(const Authority& authority,
                                                   const Pem& client = {}) {
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = authority.pem();
  options.pem_cert_chain = client.chain;
  options.pem_private_key = client.key;
  return grpc::SslCredentials(options);
}

TEST(Tls, AnswersThoseWhoTrustItsAuthorityAndNobodyInTheClear) {
  const Authority authority("ours");
  Files files;
  files.Write(authority.Sign("daemon"));
  const ServerRig rig(WithTls(files.Options(/*wants_clients=*/false), files.Warn()));
  EXPECT_TRUE(Answers(rig, Trusting(authority)));
  EXPECT_FALSE(Answers(rig, Trusting(Authority("strangers"))));
  EXPECT_FALSE(Answers(rig, grpc::InsecureChannelCredentials()));
}

TEST(Tls, WithAuthoritiesOfClientsNeedsACertificateOfOneOfThem) {
  const Authority authority("ours");
  const Authority clients("clients");
  Files files;
  files.Write(authority.Sign("daemon"));
  files.Replace("ca", clients.pem());
  const ServerRig rig(WithTls(files.Options(/*wants_clients=*/true), files.Warn()));
  EXPECT_TRUE(Answers(rig, Trusting(authority, clients.Sign("engine-1"))));
  EXPECT_FALSE(Answers(rig, Trusting(authority)));
  EXPECT_FALSE(Answers(rig, Trusting(authority, Authority("clients").Sign("engine-1"))));
}

// The stream stands while certificate and authority change under it; who connects later gets the
// new ones, and no connection in between finds neither.
TEST(Tls, ACertificateThatChangesDropsNoCall) {
  const Authority before("before");
  const Authority after("after");
  Files files;
  files.Write(before.Sign("daemon"));
  ServerRig rig(WithTls(files.Options(/*wants_clients=*/false), files.Warn()));
  const auto stub = v1::DecodeAttention::NewStub(rig.Channel(Trusting(before)));
  grpc::ClientContext create_context;
  v1::CreateSequencesResponse created;
  ASSERT_TRUE(stub->CreateSequences(&create_context, {}, &created).ok());
  grpc::ClientContext context;
  const auto stream = stub->DecodeStream(&context);
  const auto step = [&](uint64_t pos) {
    v1::DecodeResponse response;
    return stream->Write(rig.Step({created.handles(0)}, pos, {pos + 1})) &&
           stream->Read(&response) && !response.has_error() && response.item_errors_size() == 0;
  };
  ASSERT_TRUE(step(0));
  files.Write(after.Sign("daemon"));
  uint64_t pos = 1;
  EXPECT_TRUE(Eventually(
      [&] {
        EXPECT_TRUE(step(pos++));
        const bool is_new = Answers(rig, Trusting(after));
        EXPECT_TRUE(is_new || Answers(rig, Trusting(before)) || Answers(rig, Trusting(after)));
        return is_new;
      },
      10'000));
  EXPECT_FALSE(Answers(rig, Trusting(before)));
  EXPECT_TRUE(step(pos));
  EXPECT_THAT(files.warnings(), HasSubstr("new connections get the new ones"));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(Tls, FilesThatDoNotBelongTogetherLeaveThoseBeforeInUse) {
  const Authority authority("ours");
  Files files;
  files.Write(authority.Sign("daemon"));
  const ServerRig rig(WithTls(files.Options(/*wants_clients=*/false), files.Warn()));
  const std::string key = authority.Sign("another").key;
  files.Replace("key", key);
  EXPECT_TRUE(Eventually(
      [&] {
        EXPECT_TRUE(Answers(rig, Trusting(authority)));
        return !files.warnings().empty();
      },
      10'000));
  EXPECT_TRUE(Answers(rig, Trusting(authority)));
  EXPECT_THAT(files.warnings(), HasSubstr("those before stay in use"));
  EXPECT_THAT(files.warnings(), Not(HasSubstr(key.substr(30, 20))));
}

TEST(Tls, FilesThatAreNoCertificatesDoNotStart) {
  const Authority authority("ours");
  const Pem good = authority.Sign("daemon");
  EXPECT_TRUE(rpc::CheckPem(good.chain, good.key, authority.pem()).ok());
  const std::string key_text = good.key.substr(30, 20);
  for (const absl::Status& status :
       {rpc::CheckPem("", good.key, ""), rpc::CheckPem(good.key, good.key, ""),
        rpc::CheckPem(good.chain, "", ""), rpc::CheckPem(good.chain, good.chain, ""),
        rpc::CheckPem(good.chain, authority.Sign("another").key, ""),
        rpc::CheckPem(good.chain, good.key, "no pem")}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(key_text)));
  }
  Files files;
  EXPECT_EQ(rpc::MakeCredentials(files.Options(false), files.Warn()).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace fp8kvd::testing
