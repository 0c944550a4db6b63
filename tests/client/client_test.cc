// The C++ client against a fake service: what it sends, retries, renews and frees.
#include "client/cc/client.h"

#include <chrono>
#include <numeric>

#include "gmock/gmock.h"
#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "gtest/gtest.h"

#include "client/cc/convert.h"
#include "client/cc/core.h"
#include "client/cc/shared_session.h"
#include "client/cc/tensor_calls.h"
#include "tests/client/fake_server.h"

namespace fp8kvd::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

grpc::Status Unavailable() { return {grpc::StatusCode::UNAVAILABLE, "draining"}; }
grpc::Status Full() { return {grpc::StatusCode::RESOURCE_EXHAUSTED, "no pages"}; }

// With the details as a server writes them: each length is below 128.
grpc::Status FullWithRetryInfo(int64_t delay_ms) {
  google::protobuf::Duration delay;
  delay.set_seconds(delay_ms / 1000);
  delay.set_nanos(static_cast<int32_t>(delay_ms % 1000 * 1'000'000));
  const auto field = [](char tag, const std::string& value) {
    return std::string{tag, static_cast<char>(value.size())} + value;
  };
  google::protobuf::Any any;
  any.set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  any.set_value(field('\x0a', delay.SerializeAsString()));
  google::protobuf::Any other;
  other.set_type_url("type.googleapis.com/google.rpc.DebugInfo");
  const std::string details =
      field('\x1a', other.SerializeAsString()) + field('\x1a', any.SerializeAsString());
  return {grpc::StatusCode::RESOURCE_EXHAUSTED, "no pages", details};
}

class ClientTest : public testing::Test {
 protected:
  std::unique_ptr<Client> Connect() {
    return Client::Connect({.target = server_.target(),
                            .timeout_ms = 10'000,
                            .retries_max = 3,
                            .backoff_ms_min = 1,
                            .backoff_ms_max = 4,
                            .append_chunk_bytes = 64})  // 4 tokens of k and v
        .value();
  }

  FakeServer server_;
  std::unique_ptr<Client> client_ = Connect();
};

using Retries = ClientTest;
using Leases = ClientTest;
using Appends = ClientTest;
using Decodes = ClientTest;

TEST(Connect, BadOptionsAreRefused) {
  EXPECT_EQ(Client::Connect({.target = ""}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Client::Connect({.retries_max = -1}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Connect, ATokenGoesInTheClearToThisMachineAlone) {
  for (const char* here : {"localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/run/fp8kvd.sock",
                           "ipv4:127.0.0.1:1", "ipv6:[::1]:1"}) {
    EXPECT_TRUE(Client::Connect({.target = here, .token = "secret"}).ok()) << here;
  }
  for (const char* elsewhere : {"gpu-7:1", "localhost.gpu-7:1", "127.gpu-7:1", "127.0.0.1.gpu-7",
                                "ipv4:127.0.0.1:1,10.0.0.7:1", "[::1]gpu-7:1"}) {
    const absl::Status status = Client::Connect({.target = elsewhere, .token = "secret"}).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("in the clear")) << elsewhere;
  }
}

TEST(Connect, AnUnreachableServerIsNamed) {
  FakeServer server;
  const std::string target = server.target();
  server.Stop();
  auto client = Client::Connect({.target = target, .retries_max = 1, .backoff_ms_min = 1}).value();
  const absl::Status status = client->GetServerInfo().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot reach " + target));
}

TEST_F(ClientTest, TheServersInfoArrivesAsPlainStructs) {
  const ServerInfo info = client_->GetServerInfo().value();
  EXPECT_EQ(info.version, "fake");
  ASSERT_EQ(info.models.size(), 1U);
  EXPECT_EQ(info.models[0].kv_heads, 2U);
  EXPECT_EQ(info.models[0].groups[0].precision, Precision::kFp8Kv);
  EXPECT_EQ(info.limits.items_max, 7U);
}

TEST_F(ClientTest, AListIsReadPageByPageUpToTheBound) {
  EXPECT_EQ(client_->ListSequences("", 100)->size(), 9U);
  EXPECT_EQ(client_->ListSequences("", 4)->size(), 4U);
}

TEST_F(Retries, UnavailableIsTriedAgain) {
  server_.faults = {{Unavailable(), ""}, {Unavailable(), ""}};
  EXPECT_TRUE(client_->GetServerInfo().ok());
  EXPECT_EQ(server_.calls(), 3);
}

TEST_F(Retries, AreBounded) {
  server_.faults.assign(10, {Unavailable(), ""});
  const absl::Status status = client_->GetServerInfo().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("GetServerInfo at " + server_.target()));
  EXPECT_THAT(std::string(status.message()), HasSubstr("draining"));
  EXPECT_EQ(server_.calls(), 4);
}

TEST_F(Retries, WaitAsLongAsTheServerAsks) {
  server_.faults = {{Full(), "60"}};
  const auto begin = steady_clock::now();
  EXPECT_TRUE(client_->GetServerInfo().ok());
  EXPECT_GE(steady_clock::now() - begin, milliseconds(60));
}

TEST_F(Retries, WaitAsLongAsRetryInfoAsksWhereThereIsNoPushback) {
  server_.faults = {{FullWithRetryInfo(60), ""}};
  const auto begin = steady_clock::now();
  EXPECT_TRUE(client_->GetServerInfo().ok());
  EXPECT_GE(steady_clock::now() - begin, milliseconds(60));
  server_.faults = {{FullWithRetryInfo(3'600'000), ""}};
  EXPECT_EQ(client_->GetServerInfo().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server_.calls(), 3);
}

TEST_F(Retries, PushbackCountsBeforeRetryInfo) {
  server_.faults = {{FullWithRetryInfo(3'600'000), "1"}};
  EXPECT_TRUE(client_->GetServerInfo().ok());
  server_.faults = {{FullWithRetryInfo(1), "-1"}};
  EXPECT_EQ(client_->GetServerInfo().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server_.calls(), 3);
}

TEST_F(Retries, DetailsThatHoldNoRetryInfoAreNoAdvice) {
  std::string cut = FullWithRetryInfo(1).error_details();
  cut.pop_back();
  for (const std::string& details : {cut, std::string("no message"), std::string()}) {
    server_.faults = {{{grpc::StatusCode::RESOURCE_EXHAUSTED, "no pages", details}, ""}};
    EXPECT_EQ(client_->GetServerInfo().status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(server_.calls(), 3);
}

TEST_F(Retries, AreNotMadeWhenTheWaitWouldPassTheTimeout) {
  server_.faults = {{Full(), "3600000"}};
  EXPECT_EQ(client_->GetServerInfo().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server_.calls(), 1);
}

TEST_F(Retries, AreNotMadeWhenTheServerForbidsThem) {
  server_.faults = {{Unavailable(), "-1"}};
  EXPECT_EQ(client_->GetServerInfo().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server_.calls(), 1);
}

TEST_F(Retries, AreNotMadeForAFullServerThatNamesNoDelay) {
  server_.faults = {{Full(), ""}};
  EXPECT_EQ(client_->GetServerInfo().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server_.calls(), 1);
}

TEST_F(Retries, AreNotMadeForAnErrorThatWouldComeAgain) {
  server_.faults = {{{grpc::StatusCode::INVALID_ARGUMENT, "q is short"}, ""}};
  const absl::Status status = client_->GetServerInfo().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("q is short"));
  EXPECT_EQ(server_.calls(), 1);
}

TEST_F(Leases, ASequenceIsFreedWhenItGoesOutOfScope) {
  { auto sequences = client_->CreateSequences({.count = 2}).value(); }
  EXPECT_THAT(server_.freed(), ElementsAre(1, 2));
}

TEST_F(Leases, AMovedSequenceIsFreedOnce) {
  {
    auto sequences = client_->CreateSequences({.count = 2}).value();
    sequences[0] = std::move(sequences[1]);
    const Sequence moved = std::move(sequences[0]);
  }
  EXPECT_THAT(server_.freed(), testing::UnorderedElementsAre(1, 2));
}

TEST_F(Leases, AReleasedSequenceIsNotFreed) {
  { client_->CreateSequences({}).value()[0].Release(); }
  EXPECT_THAT(server_.freed(), IsEmpty());
}

TEST_F(Leases, ManySequencesAreFreedInOneCall) {
  auto sequences = client_->CreateSequences({.count = 5}).value();
  const int calls = server_.calls();
  EXPECT_THAT(client_->FreeSequences(std::move(sequences)).value(), IsEmpty());
  EXPECT_EQ(server_.calls(), calls + 1);
  EXPECT_EQ(server_.freed().size(), 5U);
}

TEST_F(Leases, MoreSequencesThanACallTakesAreFreedInSeveral) {
  auto sequences = client_->CreateSequences({.count = 1000}).value();
  auto more = client_->CreateSequences({.count = 500}).value();
  for (Sequence& sequence : more) sequences.push_back(std::move(sequence));
  EXPECT_THAT(client_->FreeSequences(std::move(sequences)).value(), IsEmpty());
  EXPECT_EQ(server_.freed().size(), 1500U);
}

static_assert(LeaseClock::is_steady, "a lease is renewed whatever the time of day is set to");

TEST_F(Leases, ASequenceIsRenewedInTheBackground) {
  server_.ttl_ms = 60;
  auto sequences = client_->CreateSequences({}).value();
  EXPECT_TRUE(server_.WaitForRenewals(sequences[0].handle().seq_id, 3));
}

TEST_F(Leases, AChildInheritsTheParentsRenewals) {
  auto parent = client_->CreateSequences({}).value();
  server_.ttl_ms = 60;
  auto children = client_->ForkSequences(parent[0].handle(), {.count = 2}).value();
  ASSERT_EQ(children.size(), 2U);
  EXPECT_TRUE(server_.WaitForRenewals(children[1].handle().seq_id, 2));
  EXPECT_EQ(server_.renewals(parent[0].handle().seq_id), 0);
}

TEST_F(Leases, ASequenceThatIsGoneIsNotRenewedAgain) {
  server_.ttl_ms = 60;
  server_.gone_seq_id = 1;
  auto sequences = client_->CreateSequences({.count = 2}).value();
  ASSERT_TRUE(server_.WaitForRenewals(2, 3));
  EXPECT_EQ(server_.renewals(1), 1);
}

// Known fault: a renewal that hangs for longer than a lease lets it end.
TEST_F(Leases, ARenewalThatHangsIsTriedAgainBeforeTheShortestLeaseEnds) {
  server_.hangs_first_renewal = true;
  server_.ttl_ms = 900;
  auto sequences = client_->CreateSequences({}).value();
  ASSERT_TRUE(server_.WaitForRenewals(sequences[0].handle().seq_id, 2));
  EXPECT_TRUE(server_.is_tried_again());
}

std::vector<uint16_t> Ramp(size_t n) {
  std::vector<uint16_t> out(n);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

std::string Bytes(const std::vector<uint16_t>& elements, size_t begin, size_t count) {
  return {reinterpret_cast<const char*>(elements.data() + begin), count * 2};
}

constexpr size_t kRow = 4;  // elements of one token of k in the fake

TEST_F(Appends, AllLayersOfAChunkGoBeforeTheNextChunk) {
  const std::vector<uint16_t> k = Ramp(2 * 6 * kRow);
  ASSERT_TRUE(client_->Append({.layer = 1, .layers_count = 2, .n = 6, .k = k, .v = k}).ok());
  std::vector<std::vector<uint64_t>> order;
  for (const auto& chunk : server_.chunks()) {
    order.push_back({chunk.layer(), chunk.pos(), chunk.n()});
  }
  EXPECT_THAT(order, ElementsAre(ElementsAre(1, 0, 4), ElementsAre(2, 0, 4), ElementsAre(1, 4, 2),
                                 ElementsAre(2, 4, 2)));
  EXPECT_EQ(server_.k()[1], Bytes(k, 0, 6 * kRow));
  EXPECT_EQ(server_.k()[2], Bytes(k, 6 * kRow, 6 * kRow));
}

TEST_F(Appends, LayersDoNotRunFurtherApartThanAnyWindowAllows) {
  auto client = Client::Connect({.target = server_.target()}).value();  // a MiB holds it all
  const std::vector<uint16_t> k = Ramp(2 * 300 * kRow);
  ASSERT_TRUE(client->Append({.layers_count = 2, .n = 300, .k = k, .v = k}).ok());
  std::vector<uint64_t> tokens;
  for (const auto& chunk : server_.chunks()) tokens.push_back(chunk.n());
  EXPECT_THAT(tokens, ElementsAre(128, 128, 128, 128, 44, 44));
}

TEST_F(Appends, ABrokenStreamGoesOnFromTheCommittedLength) {
  const std::vector<uint16_t> k = Ramp(20 * kRow);
  for (uint64_t at = 0; at < 20; ++at) {
    SCOPED_TRACE(at);
    const uint32_t layer = 0;
    FakeServer server;
    server.tokens_until_break = at;
    auto client =
        Client::Connect({.target = server.target(), .backoff_ms_min = 1, .append_chunk_bytes = 64})
            .value();
    ASSERT_TRUE(client->Append({.layer = layer, .n = 20, .k = k, .v = k}).ok());
    EXPECT_EQ(server.k()[layer], Bytes(k, 0, 20 * kRow));
  }
}

TEST_F(Appends, WhatWasLostBeforeTheAnswerIsNotSentAgain) {
  const std::vector<uint16_t> k = Ramp(8 * kRow);
  server_.append_answers_lost = 1;
  EXPECT_TRUE(client_->Append({.n = 8, .k = k, .v = k}).ok());
  EXPECT_EQ(server_.chunks().size(), 2U);
}

// A put of other bytes must not win in silence: what is there may be somebody else's.
TEST(Progress, TokensThatWereNeverSentAreNotTakenForOurs) {
  const std::vector<uint16_t> k = Ramp(8 * kRow);
  const AppendArgs args{.n = 8, .k = k, .v = k};
  AppendProgress progress(args, /*chunk_bytes=*/64);
  progress.ForEachChunk([](const AppendChunk&) { return false; });
  EXPECT_FALSE(progress.Update({100}));
  EXPECT_FALSE(progress.done());
  int sent = 0;
  progress.ForEachChunk([&sent](const AppendChunk&) { return ++sent == 1; });  // of two chunks
  EXPECT_TRUE(progress.Update({100}));
  EXPECT_FALSE(progress.done());
  progress.ForEachChunk([](const AppendChunk& chunk) {
    EXPECT_EQ(chunk.head.pos(), 4U);
    return true;
  });
  EXPECT_TRUE(progress.Update({100}));
  EXPECT_TRUE(progress.done());
}

TEST_F(Appends, WaitAsLongAsRetryInfoAsks) {
  server_.faults = {{FullWithRetryInfo(1), ""}};
  const std::vector<uint16_t> k = Ramp(kRow);
  EXPECT_TRUE(client_->Append({.n = 1, .k = k, .v = k}).ok());
}

TEST_F(Appends, AnErrorOfTheServerEndsIt) {
  const std::vector<uint16_t> k = Ramp(2 * kRow);
  const absl::Status status = client_->Append({.pos = 7, .n = 2, .k = k, .v = k});
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(status.message()), HasSubstr("committed 0"));
}

TEST_F(Appends, SizesThatDoNotFitTheCountsAreRefusedBeforeAnythingIsSent) {
  const std::vector<uint16_t> k = Ramp(7);
  EXPECT_EQ(client_->Append({.n = 2, .k = k, .v = k}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Append({.n = 7, .k = k, .v = {}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Append({.layers_count = 0, .n = 7, .k = k, .v = k}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(server_.calls(), 0);
}

TEST_F(Appends, CountsWhoseSumOrProductOverflowsAreRefusedBeforeAnythingIsSent) {
  const std::vector<uint16_t> k = Ramp(kRow);
  for (const AppendArgs& args : {
           AppendArgs{.pos = ~uint64_t{0}, .n = 1, .k = k, .v = k},
           AppendArgs{.layers_count = 1 << 16, .n = uint64_t{1} << 48},
           AppendArgs{.n = uint64_t{1} << 32, .k = k, .v = k},
       }) {
    const absl::Status status = client_->Append(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
  EXPECT_EQ(server_.calls(), 0);
}

TEST_F(Appends, SkipToGoesWithTheFirstChunkOnly) {
  const std::vector<uint16_t> k = Ramp(6 * kRow);
  (void)client_->Append({.pos = 0, .n = 6, .k = k, .v = k, .skip_to = 9});
  const auto chunks = server_.chunks();
  ASSERT_EQ(chunks.size(), 2U);
  EXPECT_EQ(chunks[0].skip_to(), 9U);
  EXPECT_EQ(chunks[1].skip_to(), 0U);
}

TEST_F(Decodes, EveryFieldReachesTheServer) {
  const std::vector<Handle> handles = {{.seq_id = 5, .generation = 6, .incarnation = 7, .home = 8}};
  const std::vector<uint64_t> positions = {9};
  const std::vector<uint32_t> q_lens = {2};
  const std::vector<uint16_t> q = Ramp(8);
  const std::vector<float> sinks = {0.5F};
  const DecodeReply reply = client_
                                ->Decode({.model = "m",
                                          .layer = 2,
                                          .handles = handles,
                                          .positions = positions,
                                          .q_lens = q_lens,
                                          .q = q,
                                          .k = q,
                                          .v = q,
                                          .sink_logits = sinks,
                                          .omit_sinks = true,
                                          .want_lse = true})
                                .value();
  const v1::DecodeRequest request = server_.last_decode();
  EXPECT_EQ(request.ShortDebugString().substr(0, request.ShortDebugString().find(" q: ")),
            "model: \"m\" layer: 2 handles { seq_id: 5 generation: 6 incarnation: 7 home: 8 } "
            "positions: 9 q_lens: 2");
  EXPECT_EQ(request.k(), Bytes(q, 0, 8));
  EXPECT_EQ(request.v(), Bytes(q, 0, 8));
  EXPECT_EQ(request.sink_logits(0), 0.5F);
  EXPECT_TRUE(request.omit_sinks());
  EXPECT_EQ(request.out_type(), v1::OUT_TYPE_BF16);
  EXPECT_EQ(reply.out_bf16, q);
  EXPECT_THAT(reply.lse, ElementsAre(1.0F));
  EXPECT_EQ(reply.batch_items, 3U);
}

TEST(Room, IsEnoughForTheLargestHead) {
  constexpr uint64_t kMost = ~uint64_t{0};
  const std::vector<Handle> handles(
      1024, {.seq_id = kMost, .generation = ~0U, .incarnation = kMost, .home = ~0U});
  const std::vector<uint64_t> positions(1024, kMost);
  const std::vector<uint32_t> q_lens(1024, ~0U);
  const std::vector<float> sinks(1024, 1.0F);
  const std::vector<uint16_t> q(64);
  for (const size_t items : {size_t{1}, size_t{1024}}) {
    const DecodeArgs args{.model = std::string(128, 'm'),
                          .layer = ~0U,
                          .handles = absl::MakeSpan(handles).first(items),
                          .positions = absl::MakeSpan(positions).first(items),
                          .q_lens = absl::MakeSpan(q_lens).first(items),
                          .q = q,
                          .sink_logits = sinks,
                          .omit_sinks = true,
                          .want_lse = true,
                          .out_type = OutType::kFp32};
    SharedMessage message = DecodeMessageOf(args, 0);
    v1::DecodeRequest head = HeadOf(args);
    head.set_request_id(kMost);
    message.head = head.SerializeAsString();
    EXPECT_GE(SharedSession::RoomFor(args), SharedSession::RoomFor(message)) << items;
  }
}

TEST_F(Decodes, Fp32OutputIsReadAsFloats) {
  const std::vector<uint16_t> q = {0, 0x3F80};  // 1.0f
  const DecodeReply reply = client_->Decode({.q = q, .out_type = OutType::kFp32}).value();
  EXPECT_THAT(reply.out_fp32, ElementsAre(1.0F));
  EXPECT_THAT(reply.out_bf16, IsEmpty());
}

TEST_F(Decodes, AFailedItemComesBackBesideTheOthers) {
  const DecodeReply reply = client_->Decode({.layer = 3, .q = Ramp(4)}).value();
  ASSERT_EQ(reply.item_errors.size(), 1U);
  EXPECT_EQ(reply.item_errors[0].index, 1U);
  EXPECT_EQ(reply.item_errors[0].status, absl::OutOfRangeError("committed length is 5"));
}

TEST_F(Decodes, AReplyOfHalfElementsIsAnErrorOfTheServer) {
  EXPECT_EQ(client_->Decode({.q = Ramp(3), .out_type = OutType::kFp32}).status().code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace fp8kvd::client
