// What is too much: full pools, large messages, large metadata, deadlines.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/rpc/world.h"

namespace fp8kvd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

TEST(Full, CarriesRetryInfoAndPushback) {
  World world;
  grpc::ClientContext context;
  v1::CreateSequencesRequest request;
  request.set_model("m");
  request.set_count(40);
  request.set_expected_tokens(4096);
  v1::CreateSequencesResponse response;
  const grpc::Status status = world.rig.stub->CreateSequences(&context, request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(context.GetServerTrailingMetadata().count("grpc-retry-pushback-ms"), 1U);
  EXPECT_THAT(status.error_details(), HasSubstr("google.rpc.RetryInfo"));
}

TEST(Full, AnAppendBeyondThePoolEndsItsStreamAndKeepsWhatWasCommitted) {
  World world;
  // The pool of "w" has 8 pages of 64 tokens; window 32 and slack 16 reclaim, so fill it by
  // sequences.
  std::vector<v1::Handle> handles = world.rig.Create(12, 0, "w");
  int exhausted = 0;
  for (const v1::Handle& handle : handles) {
    const grpc::Status status = world.rig.Append({world.rig.Chunk(handle, 0, Ids(16, 1), 0, "w")});
    if (status.ok()) continue;
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    EXPECT_THAT(status.error_details(), HasSubstr("google.rpc.RetryInfo"));
    ++exhausted;
  }
  EXPECT_EQ(exhausted, 4);
}

TEST(MessageLimit, ALargerMessageIsRefusedByGrpcAndTheConnectionLives) {
  World world;
  v1::DecodeRequest request = world.rig.Step({world.good[0]}, 10, {71});
  request.set_q(std::string(2 << 20, 'q'));
  v1::DecodeResponse response;
  EXPECT_EQ(world.rig.Decode(request, &response).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(world.rig.Decode(world.rig.Step({world.good[0]}, 10, {71}), &response).ok());
}

// Known fault: unlimited metadata. gRPC may end the connection that sent it; others live.
TEST(MetadataLimit, LargeMetadataIsRefusedAndOtherClientsAreServed) {
  World world;
  auto other = v1::DecodeAttention::NewStub(world.rig.Channel());
  grpc::ClientContext context;
  context.AddMetadata("x", std::string(100000, 'x'));
  v1::GetServerInfoResponse info;
  EXPECT_EQ(world.rig.stub->GetServerInfo(&context, {}, &info).error_code(),
            StatusCode::RESOURCE_EXHAUSTED);
  grpc::ClientContext again;
  EXPECT_TRUE(other->GetServerInfo(&again, {}, &info).ok());
}

// Known fault: a blocked handler freezes every other call, because the library's pool has two
// threads.
TEST(Deadline, CallsThatWaitForTheDeviceHoldNoThread) {
  World world;
  world.rig.backend.Close();
  constexpr int kWaiting = 12;
  std::vector<std::thread> waiting;
  for (int i = 0; i < kWaiting; ++i) {  // the same step: the first appends, the others are replays
    waiting.emplace_back([&world] {
      v1::DecodeResponse response;
      EXPECT_TRUE(world.rig.Decode(world.rig.Step({world.good[0]}, 10, {71}), &response).ok());
      EXPECT_EQ(response.item_errors_size(), 0);
    });
  }
  EXPECT_TRUE(Eventually([&] { return world.rig.engine->stats().queue_items >= kWaiting; }));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::PlanPrecisionRequest plan;
  plan.set_model("m");
  v1::PlanPrecisionResponse planned;
  const grpc::Status status = world.rig.stub->PlanPrecision(&context, plan, &planned);
  EXPECT_TRUE(status.ok()) << status.error_message();
  world.rig.backend.Open();
  for (std::thread& thread : waiting) thread.join();
}

TEST(Deadline, OneBeyondTheClocksRangeIsNone) {
  World world;
  for (const int64_t seconds : {int64_t{400} * 366 * 24 * 3600, int64_t{10'000'000'000}}) {
    grpc::ClientContext context;
    context.set_deadline(
        gpr_time_add(gpr_now(GPR_CLOCK_REALTIME), gpr_time_from_seconds(seconds, GPR_TIMESPAN)));
    v1::DecodeRequest request = world.rig.Step({world.good[0]}, 10, {71});
    v1::DecodeResponse response;
    const grpc::Status status = world.rig.stub->Decode(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.item_errors_size(), 0) << seconds;
  }
}

TEST(Deadline, APassedOneCommitsNothing) {
  World world;
  world.rig.backend.Close();
  std::thread holder([&] {  // keeps the device busy, so that the next one waits
    v1::DecodeResponse ignored;
    EXPECT_TRUE(world.rig.Decode(world.rig.Step({world.good[0]}, 10, {71}), &ignored).ok());
  });
  ASSERT_TRUE(Eventually([&] { return world.rig.engine->stats().launches_inflight > 0; }));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
  v1::DecodeResponse response;
  const grpc::Status status =
      world.rig.stub->Decode(&context, world.rig.Step({world.good[0]}, 11, {72}), &response);
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  world.rig.backend.Open();
  holder.join();
  // The same place takes other bytes, so nothing was committed there; or the step had begun and the
  // bytes are there: then the same bytes are a replay.
  v1::DecodeResponse again;
  ASSERT_TRUE(world.rig.Decode(world.rig.Step({world.good[0]}, 11, {72}), &again).ok());
  EXPECT_EQ(again.item_errors_size(), 0);
}

}  // namespace
}  // namespace fp8kvd::testing
