// The same-host transport behind all locks: TLS with client certificates, tokens, tenants. What one
// tenant may and what it learns of another is over shared memory what it is over gRPC.
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "gtest/gtest.h"

#include "tests/rpc/tokens_file.h"
#include "tests/shm/rig.h"
#include "tests/support/certificates.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kAlpha[] = "alpha-token";
constexpr char kBeta[] = "beta-token";

// Requests are begun in their order: once this wrong one is answered, the engine has those before.
void WaitUntilTaken(RawClient& client, uint64_t at) {
  v1::DecodeRequest wrong;
  wrong.set_model("none");
  client.Push(client.Place(wrong, at));
  const std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_THAT(client.ErrorOf(*reply), HasSubstr("none"));
}

// Two tenants, "a" and "b".
class Locked {
 public:
  static ServerRigOptions Options() {
    ServerRigOptions options = ShmRig::Options();
    options.tenants = {
        {.name = "a", .pages_share_max = 0.5, .seqs_max = 256, .inflight_items_max = 2048},
        {.name = "b", .pages_share_max = 0.5, .seqs_max = 256, .inflight_items_max = 2048}};
    options.locks.tenants = 2;
    return options;
  }
  explicit Locked(const ServerRigOptions& options = Options())
      : tokens(file.Load().value()),
        rig(Lock(options)),
        stub(v1::DecodeAttention::NewStub(rig->Channel(Credentials()))) {}

  static void SetToken(grpc::ClientContext* context, const std::string& token) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
  }
  grpc::Status Open(const std::string& token, v1::OpenSharedMemoryResponse* response) const {
    grpc::ClientContext context;
    SetToken(&context, token);
    return stub->OpenSharedMemory(&context, {}, response);
  }
  v1::OpenSharedMemoryResponse Ticket(const std::string& token) const {
    v1::OpenSharedMemoryResponse response;
    const grpc::Status status = Open(token, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  std::vector<v1::Handle> Create(const std::string& token, int count = 1) const {
    grpc::ClientContext context;
    SetToken(&context, token);
    v1::CreateSequencesRequest request;
    request.set_count(count);
    v1::CreateSequencesResponse response;
    const grpc::Status status = stub->CreateSequences(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return {response.handles().begin(), response.handles().end()};
  }
  grpc::Status Decode(const std::string& token, const v1::DecodeRequest& request) const {
    grpc::ClientContext context;
    SetToken(&context, token);
    v1::DecodeResponse response;
    return stub->Decode(&context, request, &response);
  }

  const TokensFile file;
  const std::unique_ptr<rpc::Tokens> tokens;

 private:
  ServerRigOptions Lock(ServerRigOptions options) const {
    grpc::SslServerCredentialsOptions tls(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    tls.pem_root_certs = authority_.pem();
    const Pem pem = authority_.Sign("daemon");
    tls.pem_key_cert_pairs.push_back({pem.key, pem.chain});
    options.locks.credentials = grpc::SslServerCredentials(tls);
    options.locks.tokens = tokens.get();
    return options;
  }
  std::shared_ptr<grpc::ChannelCredentials> Credentials() const {
    const Pem pem = authority_.Sign("engine");
    return grpc::SslCredentials({authority_.pem(), pem.key, pem.chain});
  }

  const Authority authority_{"ours"};

 public:
  ShmRig rig;
  const std::unique_ptr<v1::DecodeAttention::Stub> stub;
};

TEST(LockedTransport, GivesTicketsToNobodyWithoutCertificateAndToken) {
  Locked locked;
  v1::OpenSharedMemoryResponse response;
  EXPECT_EQ(locked.Open("", &response).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(locked.Open("next-token", &response).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  // rig's own stub shows no certificate and speaks in the clear.
  grpc::ClientContext context;
  Locked::SetToken(&context, kAlpha);
  EXPECT_EQ(locked.rig->stub->OpenSharedMemory(&context, {}, &response).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(response.ticket(), "");
}

TEST(LockedTransport, ATicketThatAHasUsedOpensNothingForB) {
  Locked locked;
  const v1::OpenSharedMemoryResponse ticket = locked.Ticket(kAlpha);
  RawClient of_a(ticket);
  const RawSocket again(ticket.unix_socket());
  again.Send(HelloWith(ticket.ticket()));
  EXPECT_THAT(again.HearFarewell(), StartsWith("NOT_FOUND: the ticket is unknown, used or older"));
  std::string other = locked.Ticket(kBeta).ticket();
  other[10] = other[10] == '0' ? '1' : '0';
  const RawSocket guess(ticket.unix_socket());
  guess.Send(HelloWith(other));
  EXPECT_THAT(guess.HearFarewell(), StartsWith("NOT_FOUND"));
  EXPECT_EQ(locked.rig->shm->stats().sessions, 1);
}

TEST(LockedTransport, ASessionActsForTheTenantOfItsTicketAlone) {
  Locked locked;
  const v1::Handle as = locked.Create(kAlpha)[0];
  const v1::Handle bs = locked.Create(kBeta)[0];
  RawClient of_a(locked.Ticket(kAlpha));
  RawClient of_b(locked.Ticket(kBeta));
  std::vector<uint64_t> history;
  EXPECT_TRUE(locked.rig.Steps(of_a, as, 0, history));
  // In one message with its own, another's handle is no sequence at all.
  of_b.Push(of_b.Place(locked.rig->Step({as, bs}, 0, {7, 8})));
  const std::optional<shm::Reply> reply = of_b.Wait();
  ASSERT_TRUE(reply.has_value());
  const v1::DecodeResponse decoded = of_b.Decoded(*reply);
  ASSERT_EQ(decoded.item_errors_size(), 1);
  EXPECT_EQ(decoded.item_errors(0).index(), 0U);
  EXPECT_EQ(decoded.item_errors(0).error().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_TRUE(locked.rig->IsAnswer(decoded, 1, 500008, {8}));
  of_b.Push(of_b.Place(locked.rig->Chunk(as, 1, Ids(3, 1), 0)));
  const std::optional<shm::Reply> appended = of_b.Wait();
  ASSERT_TRUE(appended.has_value());
  EXPECT_THAT(of_b.ErrorOf(*appended), StartsWith("NOT_FOUND: no sequence has this handle"));
  EXPECT_TRUE(locked.rig.Steps(of_a, as, 1, history));  // untouched
}

TEST(LockedTransport, ItemsInFlightAreBoundedOverBothWaysTogether) {
  ServerRigOptions options = Locked::Options();
  options.tenants[0].inflight_items_max = 4;
  Locked locked(options);
  const std::vector<v1::Handle> as = locked.Create(kAlpha, 6);
  const v1::Handle bs = locked.Create(kBeta)[0];
  RawClient of_a(locked.Ticket(kAlpha));
  RawClient of_b(locked.Ticket(kBeta));
  locked.rig->backend.Close();
  for (uint64_t i = 0; i < 4; ++i) {
    of_a.Push(of_a.Place(locked.rig->Step({as[i]}, 0, {i}), PlaceOf(i)));
  }
  of_a.Push(of_a.Place(locked.rig->Step({as[4]}, 0, {4}), PlaceOf(4)));
  const std::optional<shm::Reply> refused = of_a.Wait();
  ASSERT_TRUE(refused.has_value());
  EXPECT_THAT(of_a.ErrorOf(*refused), StartsWith("RESOURCE_EXHAUSTED"));
  v1::Error error;
  ASSERT_TRUE(error.ParseFromString(of_a.Bytes(refused->head_at, refused->head_bytes)));
  EXPECT_GE(error.retry_after_ms(), 1U);
  EXPECT_EQ(locked.Decode(kAlpha, locked.rig->Step({as[5]}, 0, {5})).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  of_b.Push(of_b.Place(locked.rig->Step({bs}, 0, {9})));
  WaitUntilTaken(of_b, PlaceOf(1));
  locked.rig->backend.Open();
  for (int i = 0; i < 4; ++i) {
    const std::optional<shm::Reply> reply = of_a.Wait();
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(of_a.ErrorOf(*reply), "OK");
  }
  const std::optional<shm::Reply> reply = of_b.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(of_b.ErrorOf(*reply), "OK");
}

// One message is taken however large; after so many items the rate allows none for half a minute.
TEST(LockedTransport, ItemsASecondAreCountedOverBothWaysTogether) {
  ServerRigOptions options = Locked::Options();
  options.tenants[0].items_per_s_max = 1;
  Locked locked(options);
  std::vector<v1::Handle> bs = locked.Create(kBeta, 2);
  // a's own calls count too, so this one makes all its sequences.
  const std::vector<v1::Handle> as = locked.Create(kAlpha, 40);
  RawClient of_a(locked.Ticket(kAlpha));
  RawClient of_b(locked.Ticket(kBeta));
  of_a.Push(of_a.Place(locked.rig->Step({as[0]}, 0, {0})));
  std::optional<shm::Reply> reply = of_a.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_THAT(of_a.ErrorOf(*reply), StartsWith("RESOURCE_EXHAUSTED"));
  EXPECT_EQ(locked.Decode(kAlpha, locked.rig->Step({as[1]}, 0, {1})).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  for (uint64_t i = 0; i < 2; ++i) {
    of_b.Push(of_b.Place(locked.rig->Step({bs[i]}, 0, {i})));
    reply = of_b.Wait();
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(of_b.ErrorOf(*reply), "OK");
  }
}

// Two sessions of a mebibyte are all that either bound allows.
TEST(LockedTransport, SessionsAndBytesOfOneLeaveAnothersAlone) {
  for (const bool is_by_bytes : {false, true}) {
    ServerRigOptions options = Locked::Options();
    if (is_by_bytes) {
      options.shared_memory.shm_tenant_bytes_max = 5 << 19;
    } else {
      options.shared_memory.shm_sessions_per_tenant_max = 2;
    }
    Locked locked(options);
    const RawClient first(locked.Ticket(kAlpha));
    const RawClient second(locked.Ticket(kAlpha));
    const v1::OpenSharedMemoryResponse ticket = locked.Ticket(kAlpha);
    const RawSocket third(ticket.unix_socket());
    third.Send(HelloWith(ticket.ticket()));
    EXPECT_THAT(third.HearFarewell(), StartsWith("RESOURCE_EXHAUSTED"));
    const RawClient of_b(locked.Ticket(kBeta));
    EXPECT_EQ(locked.rig->shm->stats().sessions, 3);
  }
}

// Eight pages of 64 tokens, four for each.
TEST(LockedTransport, PagesThatOneHasLeaveAnothersPart) {
  ServerRigOptions options = Locked::Options();
  options.models[0].pages = 8;
  Locked locked(options);
  const v1::Handle as = locked.Create(kAlpha)[0];
  const v1::Handle bs = locked.Create(kBeta)[0];
  RawClient of_a(locked.Ticket(kAlpha));
  RawClient of_b(locked.Ticket(kBeta));
  const auto append = [&locked](RawClient& client, const v1::Handle& handle, uint64_t pos, int n) {
    client.Push(client.Place(locked.rig->Chunk(handle, pos, Ids(n, pos), 0)));
    const std::optional<shm::Reply> reply = client.Wait();
    return reply.has_value() ? client.ErrorOf(*reply) : "no reply";
  };
  EXPECT_EQ(append(of_a, as, 0, 256), "OK");
  EXPECT_THAT(append(of_a, as, 256, 1), StartsWith("RESOURCE_EXHAUSTED"));
  EXPECT_EQ(append(of_b, bs, 0, 256), "OK");
}

// b's step goes with one of the next launches, however many of a's were there before it.
TEST(LockedTransport, TenantsShareLaunchesAsOverGrpc) {
  constexpr uint64_t kRequests = 7;  // of a, each of six sequences
  constexpr uint64_t kItems = 6;
  ServerRigOptions options = Locked::Options();
  options.engine.batch_rows_max = 4;
  Locked locked(options);
  const std::vector<v1::Handle> as = locked.Create(kAlpha, kRequests * kItems);
  const v1::Handle bs = locked.Create(kBeta)[0];
  RawClient of_a(locked.Ticket(kAlpha));
  RawClient of_b(locked.Ticket(kBeta));
  std::vector<uint64_t> history;
  ASSERT_TRUE(locked.rig.Steps(of_b, bs, 0, history));
  locked.rig->backend.SetRecording(true);
  locked.rig->backend.Close();
  for (uint64_t i = 0; i < kRequests; ++i) {
    const auto first = as.begin() + static_cast<int64_t>(i * kItems);
    of_a.Push(of_a.Place(locked.rig->Step({first, first + kItems}, 0, Ids(kItems, i)), PlaceOf(i)));
  }
  WaitUntilTaken(of_a, PlaceOf(kRequests));
  of_b.Push(of_b.Place(locked.rig->Step({bs}, 1, {1})));
  WaitUntilTaken(of_b, PlaceOf(1));
  locked.rig->backend.Open();
  for (uint64_t i = 0; i < kRequests; ++i) ASSERT_TRUE(of_a.Wait().has_value()) << i;
  ASSERT_TRUE(of_b.Wait().has_value());
  locked.rig->Stop();
  const auto launches = locked.rig->backend.RecordsOf(FakeBackend::Record::Kind::kDecode);
  ASSERT_GE(launches.size(), kRequests * kItems / 4);
  size_t of_b_at = 0;  // the launch with position 1
  while (of_b_at < launches.size() && std::count(launches[of_b_at].positions.begin(),
                                                 launches[of_b_at].positions.end(), 1) == 0) {
    ++of_b_at;
  }
  EXPECT_LE(of_b_at, 3U);  // two were in flight, and one may be a's
}

// As a stream does: what runs goes on as the tenant's, and nothing new begins.
TEST(LockedTransport, ARevokedTokenKeepsItsSessionAndOpensNoOther) {
  Locked locked;
  const v1::Handle as = locked.Create(kAlpha)[0];
  RawClient of_a(locked.Ticket(kAlpha));
  std::vector<uint64_t> history;
  ASSERT_TRUE(locked.rig.Steps(of_a, as, 0, history));
  locked.file.Write(TokenLine("a", kNextHash));
  ASSERT_TRUE(locked.tokens->Reload().ok());
  EXPECT_TRUE(locked.rig.Steps(of_a, as, 1, history));
  v1::OpenSharedMemoryResponse response;
  EXPECT_EQ(locked.Open(kAlpha, &response).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  RawClient next(locked.Ticket("next-token"));
  EXPECT_TRUE(locked.rig.Steps(next, as, 2, history));  // the same tenant
}

}  // namespace
}  // namespace fp8kvd::testing
