// Sessions of the same-host transport: what they answer, as gRPC does.
#include <sys/stat.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/shm/rig.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Session, AppendsAndDecodesAsGrpcDoes) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  std::vector<uint64_t> history = Ids(100, 1000);
  client.Push(client.Place(rig->Chunk(handle, 0, history, 0)));
  std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  v1::AppendResponse appended;
  ASSERT_EQ(client.ErrorOf(*reply), "OK");
  ASSERT_TRUE(appended.ParseFromString(client.Bytes(reply->head_at, reply->head_bytes)));
  ASSERT_EQ(appended.committed_size(), 1);
  EXPECT_EQ(appended.committed(0).seq_len(), 100U);
  v1::DecodeRequest step = rig->Step({handle}, 100, {5});
  step.set_want_lse(true);
  step.set_request_id(77);
  client.Push(client.Place(step));
  reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  history.push_back(5);
  const v1::DecodeResponse decoded = client.Decoded(*reply);
  EXPECT_TRUE(rig->IsAnswer(decoded, 0, 500005, history));
  EXPECT_EQ(decoded.request_id(), 77U);
  EXPECT_GE(decoded.timings().batch_items(), 1U);
  EXPECT_EQ(decoded.lse().size(), static_cast<size_t>(rig->geometry().q_heads) * 4);
  v1::DecodeResponse by_grpc;
  ASSERT_TRUE(rig->Decode(step, &by_grpc).ok());  // a replay
  EXPECT_EQ(by_grpc.out(), decoded.out());
  EXPECT_EQ(by_grpc.lse(), decoded.lse());
}

TEST(Session, ABatchOnTwoDevicesIsAnsweredInItsOrder) {
  ServerRigOptions options = ShmRig::Options();
  options.devices = 2;
  ShmRig rig(options);
  const std::vector<v1::Handle> handles = rig->Create(4);
  EXPECT_EQ(handles[0].home() + handles[1].home(), 1U);
  RawClient client(*rig);
  for (size_t i = 0; i < 4; ++i) {
    client.Push(client.Place(rig->Chunk(handles[i], 0, Ids(3, 100 * i), 0)));
    const std::optional<shm::Reply> reply = client.Wait();
    ASSERT_TRUE(reply.has_value());
    ASSERT_EQ(client.ErrorOf(*reply), "OK");
  }
  v1::DecodeRequest step = rig->Step(handles, 3, {11, 12, 13, 14});
  step.set_positions(2, 9);  // a gap
  step.set_want_lse(true);
  client.Push(client.Place(step));
  const std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  const v1::DecodeResponse decoded = client.Decoded(*reply);
  ASSERT_EQ(decoded.item_errors_size(), 1);
  EXPECT_EQ(decoded.item_errors(0).index(), 2U);
  for (uint64_t i = 0; i < 4; ++i) {
    if (i == 2) continue;
    std::vector<uint64_t> history = Ids(3, 100 * i);
    history.push_back(11 + i);
    EXPECT_TRUE(rig->IsAnswer(decoded, static_cast<int32_t>(i), 500011 + i, history)) << i;
  }
}

TEST(Session, RequestsInFlightAreAnsweredByTag) {
  ShmRig rig;
  const std::vector<v1::Handle> handles = rig->Create(8);
  RawClient client(*rig);
  rig->backend.Close();
  std::map<uint64_t, uint64_t> tags;
  for (uint64_t i = 0; i < 8; ++i) {
    const shm::Request request = client.Place(rig->Step({handles[i]}, 0, {i}), PlaceOf(i));
    tags[request.tag] = i;
    client.Push(request);
  }
  rig->backend.Open();
  for (int i = 0; i < 8; ++i) {
    const std::optional<shm::Reply> reply = client.Wait();
    ASSERT_TRUE(reply.has_value());
    ASSERT_TRUE(tags.contains(reply->tag));
    const uint64_t id = tags[reply->tag];
    EXPECT_TRUE(rig->IsAnswer(client.Decoded(*reply), 0, 500000 + id, {id}));
    tags.erase(reply->tag);
  }
}

TEST(Session, ChunksRunInTheirOrderThoughAllAreThereAtOnce) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  const std::vector<uint64_t> prompt = Ids(160, 1000);
  for (uint64_t i = 0; i < 8; ++i) {
    const auto first = prompt.begin() + static_cast<int64_t>(i) * 20;
    client.Push(client.Place(rig->Chunk(handle, i * 20, {first, first + 20}, 0), PlaceOf(i)));
  }
  for (int i = 0; i < 8; ++i) {
    const std::optional<shm::Reply> reply = client.Wait();
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(client.ErrorOf(*reply), "OK");
  }
  std::vector<uint64_t> history = prompt;
  EXPECT_TRUE(rig.Steps(client, handle, 160, history));
}

TEST(Session, WhatGrpcRefusesIsRefusedWithTheSameWords) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  std::vector<v1::DecodeRequest> wrong(4, rig->Step({handle}, 0, {1}));
  wrong[0].set_q(wrong[0].q().substr(2));
  wrong[1].set_k("");
  wrong[2].set_layer(99);
  wrong[3].set_model("nobody's");
  for (const v1::DecodeRequest& request : wrong) {
    v1::DecodeResponse ignored;
    const grpc::Status by_grpc = rig->Decode(request, &ignored);
    client.Push(client.Place(request));
    const std::optional<shm::Reply> reply = client.Wait();
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(static_cast<int>(reply->code), static_cast<int>(by_grpc.error_code()));
    EXPECT_THAT(client.ErrorOf(*reply), HasSubstr(by_grpc.error_message()));
  }
  std::vector<uint64_t> history;
  EXPECT_TRUE(rig.Steps(client, handle, 0, history));  // the session goes on
}

TEST(Session, ABadItemFailsAlone) {
  ShmRig rig;
  const std::vector<v1::Handle> handles = rig->Create(2);
  RawClient client(*rig);
  v1::DecodeRequest step = rig->Step(handles, 0, {1, 2});
  step.mutable_q()->replace(0, 2, "\xC0\x7F");  // NaN in item 0
  client.Push(client.Place(step));
  const std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  const v1::DecodeResponse response = client.Decoded(*reply);
  ASSERT_EQ(response.item_errors_size(), 1);
  EXPECT_EQ(response.item_errors(0).index(), 0U);
  EXPECT_THAT(response.item_errors(0).error().message(), HasSubstr("NaN"));
  EXPECT_TRUE(rig->IsAnswer(response, 1, 500002, {2}));
  const size_t half = response.out().size() / 2;
  EXPECT_EQ(response.out().substr(0, half), std::string(half, '\0'));
}

TEST(Session, TooLittleRoomForAReplyIsSaidBeforeAnyWork) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  shm::Request request = client.Place(rig->Step({handle}, 0, {1}));
  request.reply_bytes = request.q_bytes;  // out takes as much
  client.Push(request);
  std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_THAT(client.ErrorOf(*reply), StartsWith("INVALID_ARGUMENT: reply_bytes"));
  request.reply_bytes = 0;  // not even for the error's words
  client.Push(request);
  reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->code, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(reply->head_bytes, 0U);
  std::vector<uint64_t> history;
  EXPECT_TRUE(rig.Steps(client, handle, 0, history));  // nothing was committed
}

TEST(Session, ErrorsOfManyItemsFitTheRoomThatTheContractNames) {
  ShmRig rig;
  std::vector<v1::Handle> handles(100, rig->Create(1)[0]);
  for (size_t i = 0; i < handles.size(); ++i) handles[i].set_generation(1000 + i);  // unknown
  RawClient client(*rig);
  shm::Request request = client.Place(rig->Step(handles, 0, Ids(100, 1)));
  const uint64_t out_bytes = request.q_bytes;
  request.reply_bytes = out_bytes + shm::kReplyBytes + 100 * shm::kReplyBytesPerItem;
  client.Push(request);
  const std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(client.Decoded(*reply).item_errors_size(), 100);
}

TEST(Session, ADeadlineIsHonouredBeforeWorkBegins) {
  ShmRig rig;
  const std::vector<v1::Handle> handles = rig->Create(3);
  RawClient client(*rig);
  rig->backend.Close();
  for (uint64_t i = 0; i < 2; ++i) {  // as many launches as may be in flight
    client.Push(client.Place(rig->Step({handles[i]}, 0, {1}), PlaceOf(i)));
    ASSERT_TRUE(Eventually([&] { return rig->engine->stats().decode_launches_total == i + 1; }));
  }
  shm::Request late = client.Place(rig->Step({handles[2]}, 0, {1}), PlaceOf(2));
  late.timeout_ms = 1;
  client.Push(late);
  std::atomic_ref<uint32_t> taken(client.head().requests_head.value);
  ASSERT_TRUE(Eventually([&] { return taken.load() == 3; }));
  const int64_t begin = engine::SteadyClock().NowUs();
  ASSERT_TRUE(Eventually([&] { return engine::SteadyClock().NowUs() > begin + 3000; }));
  rig->backend.Open();
  std::map<uint64_t, std::string> errors;
  for (int i = 0; i < 3; ++i) {
    const std::optional<shm::Reply> reply = client.Wait();
    ASSERT_TRUE(reply.has_value());
    errors[reply->tag] = client.ErrorOf(*reply);
  }
  EXPECT_THAT(errors[late.tag], StartsWith("DEADLINE_EXCEEDED"));
  v1::DecodeResponse response;
  ASSERT_TRUE(rig->Decode(rig->Step({handles[2]}, 0, {2}), &response).ok());
  EXPECT_EQ(response.item_errors_size(), 0);  // nothing was committed
}

TEST(Session, ChunksThatFindNoSlotWaitAndDecodesPassBy) {
  ShmRig rig;
  const std::vector<v1::Handle> handles = rig->Create(2);
  RawClient client(*rig);
  std::vector<engine::StagingSlot> held;
  for (int64_t bytes = 1; bytes <= rig->engine->staging().slot_bytes_max();) {
    absl::StatusOr<engine::StagingSlot> slot = rig->engine->staging().Acquire(bytes);
    slot.ok() ? held.push_back(*slot) : void(bytes *= 2);
  }
  client.Push(client.Place(rig->Chunk(handles[0], 0, Ids(10, 1), 0)));
  client.Push(client.Place(rig->Step({handles[1]}, 0, {1}), PlaceOf(1)));
  const std::optional<shm::Reply> decode = client.Wait();
  ASSERT_TRUE(decode.has_value());
  EXPECT_THAT(client.ErrorOf(*decode), StartsWith("RESOURCE_EXHAUSTED"));
  EXPECT_FALSE(client.has_reply());
  for (const engine::StagingSlot& slot : held) rig->engine->staging().Release(slot);
  const std::optional<shm::Reply> append = client.Wait();
  ASSERT_TRUE(append.has_value());
  EXPECT_EQ(client.ErrorOf(*append), "OK");
}

TEST(Session, ADrainAnswersWhatWasTakenAndSaysGoodbye) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  rig->backend.Close();
  client.Push(client.Place(rig->Step({handle}, 0, {1})));
  ASSERT_TRUE(Eventually([&] { return rig->engine->stats().decode_launches_total == 1; }));
  std::thread drainer([&] { rig->Stop(); });
  EXPECT_TRUE(Eventually([&] {
    struct stat ignored = {};
    return stat(rig.socket_path().c_str(), &ignored) != 0;
  }));
  rig->backend.Open();
  const std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_TRUE(rig->IsAnswer(client.Decoded(*reply), 0, 500001, {1}));
  EXPECT_THAT(client.socket().HearFarewell(), StartsWith("UNAVAILABLE: the server drains"));
  drainer.join();
}

TEST(Session, AnAsleepServerIsWokenByItsBellAndWakesTheClient) {
  ServerRigOptions options = ShmRig::Options();
  options.shared_memory.shm_spin_us = 0;
  ShmRig rig(options);
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  std::vector<uint64_t> history;
  for (uint64_t pos = 0; pos < 50; ++pos) {
    std::atomic_ref<uint32_t> sleeps(client.head().server_sleeps.value);
    ASSERT_TRUE(Eventually([&] { return sleeps.load() == 1; }));
    client.Set(client.head().client_sleeps, 1);
    ASSERT_TRUE(rig.Steps(client, handle, pos, history));
    pollfd readable = {.fd = client.socket().fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&readable, 1, 20'000), 1);
    char bell = 1;
    ASSERT_EQ(recv(client.socket().fd(), &bell, 1, 0), 1);
    EXPECT_EQ(bell, 0);
  }
}

TEST(Session, CallsAndSessionsAreCounted) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  rig->metrics.SetSharedMemory([&] { return rig->shm->stats(); });
  RawClient client(*rig);
  std::vector<uint64_t> history;
  ASSERT_TRUE(rig.Steps(client, handle, 0, history));
  const std::string text = rig->metrics.Scrape();
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_calls_total{method="SharedMemoryDecode",code="OK"} 1)"));
  EXPECT_THAT(text, HasSubstr("fp8kvd_shm_sessions 1"));
  EXPECT_THAT(text, HasSubstr("fp8kvd_shm_sessions_opened_total 1"));
}

}  // namespace
}  // namespace fp8kvd::testing
