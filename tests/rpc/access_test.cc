// Who may call what, and what one tenant learns of another: nothing.
#include <chrono>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"

#include "tests/rpc/rig.h"
#include "tests/rpc/tokens_file.h"

namespace fp8kvd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;

void SetToken(grpc::ClientContext* context, const std::string& token) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
}

// A server with tenants "a" and "b".
class Locked {
 public:
  Locked() : Locked(ServerRigOptions()) {}

  explicit Locked(ServerRigOptions options) : tokens_(file.Load().value()), rig(Lock(options)) {}

  ServerRigOptions Lock(ServerRigOptions options) const {
    options.tenants = {
        {.name = "a", .pages_share_max = 0.5, .seqs_max = 256, .inflight_items_max = 2048},
        {.name = "b", .pages_share_max = 0.5, .seqs_max = 256, .inflight_items_max = 2048}};
    options.server.streams_max = 64;
    options.locks.tokens = tokens_.get();
    options.locks.tenants = 2;
    return options;
  }
  rpc::Tokens* tokens() const { return tokens_.get(); }

  // Any method, as bytes: one empty message, then the status.
  grpc::Status Call(const std::string& path, const std::string& token) const {
    grpc::GenericStub stub(rig.Channel());
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    SetToken(&context, token);
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    const auto stream = stub.PrepareCall(&context, path, &queue);
    stream->StartCall(nullptr);
    if (wait()) {
      grpc::Slice empty;
      stream->WriteLast(grpc::ByteBuffer(&empty, 1), grpc::WriteOptions(), nullptr);
      wait();
    }
    grpc::ByteBuffer reply;
    stream->Read(&reply, nullptr);
    const bool is_watched = wait() && path == "/grpc.health.v1.Health/Watch";
    if (is_watched) context.TryCancel();  // it would not end by itself
    grpc::Status status;
    stream->Finish(&status, nullptr);
    wait();
    queue.Shutdown();
    while (wait()) {
    }
    return status;
  }

  v1::Handle Create(const std::string& token) const {
    grpc::ClientContext context;
    SetToken(&context, token);
    v1::CreateSequencesResponse response;
    const grpc::Status status = rig.stub->CreateSequences(&context, {}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.handles_size() == 1 ? response.handles(0) : v1::Handle();
  }

  const TokensFile file;

 private:
  const std::unique_ptr<rpc::Tokens> tokens_;

 public:
  ServerRig rig;
};

std::vector<std::string> EveryRpc() {
  std::vector<std::string> paths;
  for (const char* name : {"fp8kvd.v1.DecodeAttention", "grpc.health.v1.Health",
                           "grpc.reflection.v1alpha.ServerReflection"}) {
    const auto* service =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    for (int i = 0; i < service->method_count(); ++i) {
      paths.push_back("/" + std::string(name) + "/" + service->method(i)->name());
    }
  }
  return paths;
}

// Those that the table lets anybody call; every other one needs a token. A new rpc fails here
// until somebody has thought about it.
const std::set<std::string> kAnyone = {"/grpc.health.v1.Health/Check",
                                       "/grpc.health.v1.Health/Watch"};

TEST(Access, EveryRpcNeedsATokenButThoseOfHealth) {
  const Locked locked;
  const std::vector<std::string> paths = EveryRpc();
  ASSERT_GE(paths.size(), 17U);
  for (const std::string& path : paths) {
    const bool is_open = kAnyone.count(path) == 1;
    for (const char* token : {"", "wrong-token", "alpha-token "}) {
      const StatusCode code = locked.Call(path, token).error_code();
      EXPECT_EQ(code == StatusCode::UNAUTHENTICATED, !is_open) << path << " with " << token;
    }
    EXPECT_NE(locked.Call(path, "alpha-token").error_code(), StatusCode::UNAUTHENTICATED) << path;
  }
}

// Known fault: tiny messages that anyone may send hold what others need.
TEST(Access, WatchesWithoutATokenTakeNoCallsFromThoseWhoHaveOne) {
  const Locked locked;  // 64 calls
  const auto stub = grpc::health::v1::Health::NewStub(locked.rig.Channel());
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<grpc::health::v1::HealthCheckResponse>>> watches;
  int open = 0;
  for (int i = 0; i < 80; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    watches.push_back(stub->Watch(contexts.back().get(), {}));
    grpc::health::v1::HealthCheckResponse state;
    open += watches.back()->Read(&state) ? 1 : 0;
  }
  EXPECT_EQ(open, 64);
  const grpc::Status status =
      locked.Call("/fp8kvd.v1.DecodeAttention/GetServerInfo", "alpha-token");
  EXPECT_TRUE(status.ok()) << status.error_message();
  for (const auto& context : contexts) context->TryCancel();
  for (const auto& watch : watches) (void)watch->Finish();
}

TEST(Access, ARefusalSaysWhatToSendAndNothingOfWhatCame) {
  const Locked locked;
  const std::string text =
      locked.Call("/fp8kvd.v1.DecodeAttention/ListSequences", "guessed-token").error_message();
  EXPECT_THAT(text, HasSubstr("authorization: Bearer TOKEN"));
  EXPECT_THAT(text, Not(HasSubstr("guessed")));
}

TEST(Access, TwoTokensInACallAreNone) {
  Locked locked;
  grpc::ClientContext context;
  SetToken(&context, "alpha-token");
  context.AddMetadata("authorization", "Bearer beta-token");
  v1::GetServerInfoResponse info;
  EXPECT_EQ(locked.rig.stub->GetServerInfo(&context, {}, &info).error_code(),
            StatusCode::UNAUTHENTICATED);
}

TEST(Access, AReloadRevokesForLaterCalls) {
  Locked locked;
  locked.Create("alpha-token");
  locked.file.Write(TokenLine("a", kNextHash));
  ASSERT_TRUE(locked.tokens()->Reload().ok());
  EXPECT_EQ(locked.Call("/fp8kvd.v1.DecodeAttention/GetServerInfo", "alpha-token").error_code(),
            StatusCode::UNAUTHENTICATED);
  locked.Create("next-token");
}

// --- what one tenant learns of another

// The error that an rpc has for one handle, as a whole or for its item.
class Asked {
 public:
  Asked(Locked* locked, v1::Handle handle) : locked_(locked), handle_(std::move(handle)) {
    SetToken(&context_, "beta-token");
  }

  template <typename Response, typename Request>
  std::string OfItem(grpc::Status (v1::DecodeAttention::Stub::*method)(grpc::ClientContext*,
                                                                       const Request&, Response*),
                     Request request) {
    *request.add_handles() = handle_;
    Response response;
    const grpc::Status status = (locked_->rig.stub.get()->*method)(&context_, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.item_errors_size(), 1);
    if (response.item_errors_size() != 1) return "";
    return response.item_errors(0).error().ShortDebugString();
  }
  std::string OfFork() {
    v1::ForkSequencesRequest request;
    *request.mutable_parent() = handle_;
    v1::ForkSequencesResponse response;
    return Text(locked_->rig.stub->ForkSequences(&context_, request, &response));
  }
  std::string OfAppend() {
    v1::AppendResponse response;
    const auto writer = locked_->rig.stub->Append(&context_, &response);
    writer->Write(locked_->rig.Chunk(handle_, 0, Ids(3, 1), 0));
    writer->WritesDone();
    return Text(writer->Finish());
  }
  std::string OfDecode() {
    v1::DecodeResponse response;
    const grpc::Status status =
        locked_->rig.stub->Decode(&context_, locked_->rig.Step({handle_}, 0, {1}), &response);
    EXPECT_EQ(response.item_errors_size(), 1) << status.error_message();
    return response.item_errors_size() == 1 ? response.item_errors(0).error().ShortDebugString()
                                            : Text(status);
  }

 private:
  static std::string Text(const grpc::Status& status) {
    return std::to_string(status.error_code()) + " " + status.error_message();
  }

  Locked* const locked_;
  const v1::Handle handle_;
  grpc::ClientContext context_;
};

TEST(Tenant, AnothersHandleIsToEveryRpcWhatAStaleOneIs) {
  Locked locked;
  const v1::Handle others = locked.Create("alpha-token");
  v1::Handle stale = locked.Create("beta-token");
  {
    grpc::ClientContext context;
    SetToken(&context, "beta-token");
    v1::FreeSequencesRequest request;
    *request.add_handles() = stale;
    v1::FreeSequencesResponse response;
    ASSERT_TRUE(locked.rig.stub->FreeSequences(&context, request, &response).ok());
    ASSERT_EQ(response.item_errors_size(), 0);
  }
  using Stub = v1::DecodeAttention::Stub;
  v1::TruncateSequencesRequest truncate;
  truncate.add_seq_lens(0);
  const auto same = [](const std::string& of_others, const std::string& of_stale) {
    EXPECT_EQ(of_others, of_stale);
    EXPECT_THAT(of_others, HasSubstr("no sequence has this handle"));
  };
  same(Asked(&locked, others).OfItem(&Stub::FreeSequences, v1::FreeSequencesRequest()),
       Asked(&locked, stale).OfItem(&Stub::FreeSequences, v1::FreeSequencesRequest()));
  same(Asked(&locked, others).OfItem(&Stub::RenewSequences, v1::RenewSequencesRequest()),
       Asked(&locked, stale).OfItem(&Stub::RenewSequences, v1::RenewSequencesRequest()));
  same(Asked(&locked, others).OfItem(&Stub::StatSequences, v1::StatSequencesRequest()),
       Asked(&locked, stale).OfItem(&Stub::StatSequences, v1::StatSequencesRequest()));
  same(Asked(&locked, others).OfItem(&Stub::TruncateSequences, truncate),
       Asked(&locked, stale).OfItem(&Stub::TruncateSequences, truncate));
  same(Asked(&locked, others).OfFork(), Asked(&locked, stale).OfFork());
  same(Asked(&locked, others).OfAppend(), Asked(&locked, stale).OfAppend());
  same(Asked(&locked, others).OfDecode(), Asked(&locked, stale).OfDecode());
  // And it is untouched: its owner still has it.
  grpc::ClientContext context;
  SetToken(&context, "alpha-token");
  v1::StatSequencesRequest request;
  *request.add_handles() = others;
  v1::StatSequencesResponse response;
  ASSERT_TRUE(locked.rig.stub->StatSequences(&context, request, &response).ok());
  EXPECT_EQ(response.item_errors_size(), 0);
}

TEST(Tenant, ListsItsOwnSequences) {
  Locked locked;
  locked.Create("alpha-token");
  const v1::Handle own = locked.Create("beta-token");
  grpc::ClientContext context;
  SetToken(&context, "beta-token");
  v1::ListSequencesResponse response;
  ASSERT_TRUE(locked.rig.stub->ListSequences(&context, {}, &response).ok());
  ASSERT_EQ(response.sequences_size(), 1);
  EXPECT_EQ(response.sequences(0).handle().seq_id(), own.seq_id());
}

// Streams of one tenant beyond its part are refused, those of the other are not.
TEST(Tenant, StreamsBeyondItsPartLeaveAnothersAlone) {
  Locked locked;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>>>
      streams;
  for (int i = 0; i < 32; ++i) {  // half of streams_max
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    SetToken(contexts.back().get(), "alpha-token");
    streams.push_back(locked.rig.stub->DecodeStream(contexts.back().get()));
  }
  ASSERT_TRUE(Eventually([&] { return locked.rig.server->calls_open() == 32; }));
  const grpc::Status refused =
      locked.Call("/fp8kvd.v1.DecodeAttention/GetServerInfo", "alpha-token");
  EXPECT_EQ(refused.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("takes 32 of a tenant"));
  EXPECT_TRUE(locked.Call("/fp8kvd.v1.DecodeAttention/GetServerInfo", "beta-token").ok());
  for (const auto& stream : streams) {
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
}

// One call of PlanPrecision, whose answer may take as long as it wants.
struct PlanCall {
  PlanCall(const Locked& locked, const std::string& token, const std::string& model) {
    SetToken(&context, token);
    request.set_model(model);
    locked.rig.stub->async()->PlanPrecision(&context, &request, &response, [this](grpc::Status s) {
      status = std::move(s);
      is_done.set_value();
    });
  }
  grpc::Status Wait() {
    is_done.get_future().wait();
    return status;
  }

  grpc::ClientContext context;
  v1::PlanPrecisionRequest request;
  v1::PlanPrecisionResponse response;
  grpc::Status status;
  std::promise<void> is_done;
};

// Holds the helper thread from the first plan on until it is let go; notes the models planned.
class HeldHelper {
 public:
  ServerRigOptions Options() {
    ServerRigOptions options;
    options.models.push_back(ModelSpec{.name = "of_b", .pages = 8});
    options.server.poller_threads = 1;  // so that calls are taken in their order
    options.live = [this](int32_t model) {
      planned.push_back(model);
      if (planned.size() == 1) {
        entered_.set_value();
        let_go_.get_future().wait();
      }
      return std::nullopt;
    };
    return options;
  }
  void WaitUntilHeld() { entered_.get_future().wait(); }
  void LetGo() { let_go_.set_value(); }

  std::vector<int32_t> planned;  // the helper thread's until all calls are answered

 private:
  std::promise<void> entered_;
  std::promise<void> let_go_;
};

// a has all its places of the helper thread: it is refused, b is not, and b's call is the next.
TEST(Tenant, PlansBeyondItsPartLeaveAnothersAlone) {
  constexpr int kPlacesOfA = 8;
  HeldHelper helper;
  Locked locked(helper.Options());
  std::deque<PlanCall> calls;
  calls.emplace_back(locked, "alpha-token", "m");
  helper.WaitUntilHeld();
  for (int i = 0; i < kPlacesOfA; ++i) calls.emplace_back(locked, "alpha-token", "m");
  ASSERT_TRUE(Eventually([&] { return locked.rig.server->calls_open() == 1 + kPlacesOfA; }));
  PlanCall refused(locked, "alpha-token", "m");
  EXPECT_EQ(refused.Wait().error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("of yours wait as may (8)"));
  EXPECT_THAT(refused.status.error_details(), HasSubstr("google.rpc.RetryInfo"));
  EXPECT_EQ(refused.context.GetServerTrailingMetadata().count("grpc-retry-pushback-ms"), 1U);
  calls.emplace_back(locked, "beta-token", "of_b");
  ASSERT_TRUE(Eventually([&] { return locked.rig.server->calls_open() == 2 + kPlacesOfA; }));
  // On the one poller: once this is answered, b's call has its place.
  EXPECT_TRUE(locked.Call("/fp8kvd.v1.DecodeAttention/GetServerInfo", "beta-token").ok());
  helper.LetGo();
  for (PlanCall& call : calls) EXPECT_TRUE(call.Wait().ok()) << call.status.error_message();
  ASSERT_EQ(helper.planned.size(), calls.size());
  EXPECT_EQ(helper.planned[1], 1) << "a's calls went before b's";
}

TEST(Tenant, APlanWhoseClientHasGoneIsFinished) {
  HeldHelper helper;
  Locked locked(helper.Options());
  PlanCall first(locked, "alpha-token", "m");
  helper.WaitUntilHeld();
  PlanCall other(locked, "alpha-token", "m");
  ASSERT_TRUE(Eventually([&] { return locked.rig.server->calls_open() == 2; }));
  other.context.TryCancel();
  EXPECT_EQ(other.Wait().error_code(), StatusCode::CANCELLED);
  helper.LetGo();
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(Eventually([&] { return locked.rig.server->calls_open() == 0; }));
}

}  // namespace
}  // namespace fp8kvd::testing
