// DecodeStream and Append: order, bounds, broken streams, storms.
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/rpc/rig.h"
#include "tests/rpc/storm.h"

namespace fp8kvd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using Stream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>;

v1::DecodeRequest WithId(v1::DecodeRequest request, uint64_t request_id) {
  request.set_request_id(request_id);
  return request;
}

uint64_t DecodesTaken(const ServerRig& rig) { return rig.engine->stats().requests_taken_total[0]; }

TEST(DecodeStream, PipelinedStepsOfOneSequenceRunInTheirOrder) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = rig.stub->DecodeStream(&context);
  constexpr int kSteps = 300;
  std::thread writer([&] {
    for (uint64_t i = 0; i < kSteps; ++i) {
      ASSERT_TRUE(stream->Write(WithId(rig.Step({handle}, i, {1000 + i}), i + 1)));
    }
    stream->WritesDone();
  });
  std::map<uint64_t, v1::DecodeResponse> replies;
  v1::DecodeResponse reply;
  while (stream->Read(&reply)) replies[reply.request_id()] = reply;
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_EQ(replies.size(), size_t{kSteps});
  for (int i = 0; i < kSteps; ++i) {
    ASSERT_TRUE(rig.IsAnswer(replies[i + 1], 0, 501000 + i, Ids(i + 1, 1000))) << i;
  }
}

TEST(DecodeStream, ALaterMessageIsAnsweredWhileAnEarlierOneRuns) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = rig.stub->DecodeStream(&context);
  rig.backend.Close();
  ASSERT_TRUE(stream->Write(WithId(rig.Step({handle}, 0, {1}), 1)));
  ASSERT_TRUE(stream->Write(WithId(v1::DecodeRequest(), 2)));  // wrong as a whole
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.request_id(), 2U);
  EXPECT_EQ(reply.error().code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(reply.out().empty());
  rig.backend.Open();
  ASSERT_TRUE(stream->Read(&reply));  // the stream stays open
  EXPECT_EQ(reply.request_id(), 1U);
  EXPECT_TRUE(rig.IsAnswer(reply, 0, 500001, {1}));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(DecodeStream, BytesThatAreNoMessageAreAnsweredAndTheStreamStaysOpen) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = rig.stub->DecodeStream(&context);
  v1::DecodeRequest broken;  // an unknown field of a wire type that does not exist
  broken.GetReflection()->MutableUnknownFields(&broken)->AddGroup(100)->AddVarint(1, 1);
  ASSERT_TRUE(stream->Write(WithId(broken, 3)));
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.error().code(), StatusCode::INVALID_ARGUMENT);
  ASSERT_TRUE(stream->Write(WithId(rig.Step({handle}, 0, {1}), 4)));
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_TRUE(rig.IsAnswer(reply, 0, 500001, {1}));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(DecodeStream, IsNotReadBeyondItsBudget) {
  ServerRig rig;
  const std::vector<v1::Handle> handles = rig.Create(50);
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = rig.stub->DecodeStream(&context);
  rig.backend.Close();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(stream->Write(rig.Step({handles[i]}, 0, {1})));
  EXPECT_TRUE(Eventually([&] { return DecodesTaken(rig) == 8; }));  // stream_inflight_max
  EXPECT_FALSE(Eventually([&] { return DecodesTaken(rig) > 8; }, /*milliseconds=*/50));
  EXPECT_LE(rig.engine->staging().slots_used(), 8);
  rig.backend.Open();
  v1::DecodeResponse reply;
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(stream->Read(&reply));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// Known fault: a slow reader stalls everybody.
TEST(DecodeStream, ASlowReaderFillsOnlyItsOwnBudget) {
  ServerRig rig;
  const std::vector<v1::Handle> handles = rig.Create(2);
  ASSERT_TRUE(rig.Append({rig.Chunk(handles[0], 0, Ids(64, 1), 0)}).ok());
  v1::DecodeRequest large;  // 200 items would name a sequence twice; many query tokens do as well
  large.set_model("m");
  *large.add_handles() = handles[0];
  large.add_positions(0);
  large.add_q_lens(64);
  large.set_q(rig.RowsOf(RowKind::kQ, Ids(64, 1), 0));
  large.set_out_type(v1::OUT_TYPE_FP32);
  large.set_want_lse(true);
  grpc::ChannelArguments arguments;  // a small window, so that the transport holds little
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65536);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  auto stub = v1::DecodeAttention::NewStub(
      grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(rig.server->port()),
                                grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = stub->DecodeStream(&context);
  constexpr int kMessages = 400;
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) ASSERT_TRUE(stream->Write(large));
    stream->WritesDone();
  });
  EXPECT_TRUE(Eventually([&] { return DecodesTaken(rig) >= 8; }));
  uint64_t before = 0;
  EXPECT_TRUE(Eventually([&] {  // until the server reads no more of it
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return std::exchange(before, DecodesTaken(rig)) == DecodesTaken(rig);
  }));
  EXPECT_LT(DecodesTaken(rig), uint64_t{kMessages});
  v1::DecodeResponse beside;
  ASSERT_TRUE(rig.Decode(rig.Step({handles[1]}, 0, {5}), &beside).ok());
  EXPECT_TRUE(rig.IsAnswer(beside, 0, 500005, {5}));
  v1::DecodeResponse reply;
  int read = 0;
  while (stream->Read(&reply)) ++read;
  writer.join();
  EXPECT_EQ(read, kMessages);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(DecodeStream, AMessagesOwnTimeoutEndsItAndNotTheStream) {
  ServerRigOptions options;
  options.engine.launches_inflight_max = 1;
  ServerRig rig(options);
  const std::vector<v1::Handle> handles = rig.Create(2);
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = rig.stub->DecodeStream(&context);
  rig.backend.Close();
  ASSERT_TRUE(stream->Write(WithId(rig.Step({handles[0]}, 0, {1}), 1)));
  ASSERT_TRUE(Eventually([&] { return rig.engine->stats().launches_inflight == 1; }));
  v1::DecodeRequest late = WithId(rig.Step({handles[1]}, 0, {2}), 2);
  late.set_timeout_ms(1);
  ASSERT_TRUE(stream->Write(late));
  ASSERT_TRUE(Eventually([&] { return DecodesTaken(rig) == 2; }));
  EXPECT_FALSE(Eventually([] { return false; }, /*milliseconds=*/5));  // its time passes
  rig.backend.Open();
  v1::DecodeResponse reply;
  int late_code = 0;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    if (reply.request_id() == 2) {
      late_code = reply.has_error() ? reply.error().code() : reply.item_errors(0).error().code();
    }
  }
  EXPECT_EQ(late_code, StatusCode::DEADLINE_EXCEEDED);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(DecodeStream, ADrainEndsAnIdleStream) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = rig.stub->DecodeStream(&context);
  ASSERT_TRUE(stream->Write(rig.Step({handle}, 0, {1})));
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Read(&reply));
  const auto begin = std::chrono::steady_clock::now();
  rig.Stop(std::chrono::seconds(20));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
}

// Known fault: a cancelled stream is freed twice. The sanitizers and the rig's end look.
TEST(DecodeStream, AStormOfCancelsLosesNothing) {
  ServerRig rig;
  const std::vector<v1::Handle> handles = rig.Create(16);
  Storm(rig, 25, [&](uint32_t /*client*/, std::mt19937& random) {
    grpc::ClientContext context;
    const std::unique_ptr<Stream> stream = rig.stub->DecodeStream(&context);
    const uint32_t messages = random() % 12;
    for (uint32_t i = 0; i < messages; ++i) {
      stream->Write(rig.Step({handles[random() % 16]}, random() % 3, {random() % 5}));
    }
    v1::DecodeResponse reply;
    for (uint32_t i = random() % (messages + 1); i > 0; --i) stream->Read(&reply);
    if (random() % 4 != 0) context.TryCancel();
    stream->WritesDone();
    while (stream->Read(&reply)) {
    }
    stream->Finish();
  });
}

// Append ----------------------------------------------------------------------------------------

std::vector<uint64_t> SeqLens(ServerRig& rig, const v1::Handle& handle) {
  grpc::ClientContext context;
  v1::StatSequencesRequest request;
  *request.add_handles() = handle;
  v1::StatSequencesResponse response;
  EXPECT_TRUE(rig.stub->StatSequences(&context, request, &response).ok());
  return {response.sequences(0).seq_lens().begin(), response.sequences(0).seq_lens().end()};
}

TEST(Append, ABrokenStreamIsTakenUpAgainFromTheCommittedLength) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  {
    grpc::ClientContext context;
    v1::AppendResponse response;
    auto writer = rig.stub->Append(&context, &response);
    for (uint64_t pos = 0; pos < 200; pos += 50) {
      ASSERT_TRUE(writer->Write(rig.Chunk(handle, pos, Ids(50, pos), 0)));
    }
    EXPECT_TRUE(Eventually([&] { return SeqLens(rig, handle)[0] >= 100; }));
    context.TryCancel();
    EXPECT_FALSE(writer->Finish().ok());
  }
  EXPECT_TRUE(Eventually([&] { return rig.server->calls_open() == 0; }));
  // The chunk at the length, and the one before it once more: a replay.
  const uint64_t length = SeqLens(rig, handle)[0];
  ASSERT_EQ(length % 50, 0U);
  std::vector<v1::AppendRequest> rest;
  for (uint64_t pos = length - 50; pos < 400; pos += 50) {
    rest.push_back(rig.Chunk(handle, pos, Ids(50, pos), 0));
  }
  v1::AppendResponse response;
  const grpc::Status status = rig.Append(rest, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.committed(0).seq_len(), 400U);
  v1::DecodeResponse decoded;
  ASSERT_TRUE(rig.Decode(rig.Step({handle}, 400, {400}), &decoded).ok());
  EXPECT_TRUE(rig.IsAnswer(decoded, 0, 500400, Ids(401, 0)));
}

TEST(Append, HoldsAtMostTwoSlotsHoweverFastTheClientSends) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  grpc::ClientContext context;
  v1::AppendResponse response;
  auto writer = rig.stub->Append(&context, &response);
  rig.backend.Close();
  for (uint64_t pos = 0; pos < 500; pos += 50) {
    ASSERT_TRUE(writer->Write(rig.Chunk(handle, pos, Ids(50, pos), 0)));
  }
  writer->WritesDone();
  EXPECT_TRUE(Eventually([&] { return rig.engine->staging().slots_used() == 2; }));
  EXPECT_FALSE(Eventually([&] { return rig.engine->staging().slots_used() > 2; }, 50));
  rig.backend.Open();
  EXPECT_TRUE(writer->Finish().ok());
  EXPECT_EQ(response.committed(0).seq_len(), 500U);
}

TEST(Append, StreamsWaitForSlotsInsteadOfFailing) {
  ServerRigOptions options;
  options.engine.staging_bytes = int64_t{2} << 20;
  options.engine.staging_slots = 16;
  ServerRig rig(options);
  const std::vector<v1::Handle> handles = rig.Create(40);
  std::vector<std::thread> clients;
  for (int i = 0; i < 40; ++i) {
    clients.emplace_back([&, i] {
      std::vector<v1::AppendRequest> chunks;
      for (uint64_t pos = 0; pos < 200; pos += 40) {
        chunks.push_back(rig.Chunk(handles[i], pos, Ids(40, pos + 1000 * i), 0));
      }
      const grpc::Status status = rig.Append(chunks);
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
  }
  for (std::thread& client : clients) client.join();
  for (int i = 0; i < 40; ++i) {
    v1::DecodeResponse decoded;
    ASSERT_TRUE(rig.Decode(rig.Step({handles[i]}, 200, {9}), &decoded).ok());
    std::vector<uint64_t> history = Ids(200, 1000 * i);
    history.push_back(9);
    ASSERT_TRUE(rig.IsAnswer(decoded, 0, 500009, history)) << i;
  }
}

TEST(Append, TheFirstBadChunkEndsTheStreamAndLaterOnesDoNothing) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  const grpc::Status status =
      rig.Append({rig.Chunk(handle, 0, Ids(10, 0), 0), rig.Chunk(handle, 11, Ids(10, 11), 0),
                  rig.Chunk(handle, 0, Ids(10, 0), 1)});
  EXPECT_EQ(status.error_code(), StatusCode::OUT_OF_RANGE);
  EXPECT_THAT(SeqLens(rig, handle), ::testing::ElementsAre(10, 0));
}

// Its end is waited for, since proxies drop an answer before it; but not for ever.
TEST(Append, AFailureIsToldToAClientThatSendsNoEnd) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  grpc::ClientContext context;
  v1::AppendResponse response;
  const auto writer = rig.stub->Append(&context, &response);
  ASSERT_TRUE(writer->Write(rig.Chunk(handle, 11, Ids(10, 11), 0)));
  EXPECT_EQ(writer->Finish().error_code(), StatusCode::OUT_OF_RANGE);
}

// Nor does a client that goes then leave anything behind, nor one that is there when the server
// drains.
TEST(Append, AFailedStreamMayBeCancelledOrDrained) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  for (const bool drains : {false, true}) {
    grpc::ClientContext context;
    v1::AppendResponse response;
    const auto writer = rig.stub->Append(&context, &response);
    ASSERT_TRUE(writer->Write(rig.Chunk(handle, 11, Ids(10, 11), 0)));
    ASSERT_TRUE(Eventually([&] { return rig.server->calls_open() == 1; }));
    if (drains) {
      rig.Stop();
    } else {
      context.TryCancel();
    }
    EXPECT_FALSE(writer->Finish().ok());
    ASSERT_TRUE(Eventually([&] { return rig.server->calls_open() == 0; }));
  }
}

TEST(Append, SeveralLayersInOneChunkAndSeveralSequencesInOneStream) {
  ServerRig rig;
  const std::vector<v1::Handle> handles = rig.Create(2);
  v1::AppendRequest both = rig.Chunk(handles[0], 0, Ids(30, 0), 0);
  both.set_layers_count(2);
  both.set_k(both.k() + rig.RowsOf(RowKind::kK, Ids(30, 0), 1));
  both.set_v(both.v() + rig.RowsOf(RowKind::kV, Ids(30, 0), 1));
  v1::AppendResponse response;
  const grpc::Status status =
      rig.Append({both, rig.Chunk(handles[1], 0, Ids(5, 50), 1)}, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.committed_size(), 3);
  EXPECT_EQ(response.committed(1).layer(), 1U);
  EXPECT_EQ(response.committed(1).seq_len(), 30U);
  EXPECT_EQ(response.committed(2).handle().seq_id(), handles[1].seq_id());
  EXPECT_EQ(response.committed(2).seq_len(), 5U);
  v1::DecodeResponse decoded;
  ASSERT_TRUE(rig.Decode(rig.Step({handles[0]}, 30, {30}, 1), &decoded).ok());
  EXPECT_TRUE(rig.IsAnswer(decoded, 0, 500030, Ids(31, 0), 1));
}

TEST(Append, AStormOfCancelsLosesNothing) {
  ServerRig rig;
  const std::vector<v1::Handle> handles = rig.Create(4);
  Storm(rig, 25, [&](uint32_t client, std::mt19937& random) {
    grpc::ClientContext context;
    v1::AppendResponse response;
    auto writer = rig.stub->Append(&context, &response);
    for (uint32_t i = random() % 6; i > 0; --i) {
      writer->Write(rig.Chunk(handles[client], (random() % 4) * 20, Ids(20, 7), 0));
    }
    if (random() % 2 == 0) context.TryCancel();
    writer->WritesDone();
    writer->Finish();
  });
}

}  // namespace
}  // namespace fp8kvd::testing
