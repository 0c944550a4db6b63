// Large messages, whose rows are copied beside the poller: nothing about them is any different.
#include "server/rpc/copiers.h"

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/rpc/rig.h"
#include "tests/rpc/storm.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;

class CountingTask final : public rpc::Copiers::Task {
 public:
  void Copy() override {
    ++copies;
    is_elsewhere = std::this_thread::get_id() != ours_;
  }
  std::atomic<int> copies{0};
  std::atomic<bool> is_elsewhere{false};

 private:
  const std::thread::id ours_ = std::this_thread::get_id();
};

TEST(Copiers, EndOnceEveryTaskIsDone) {
  std::vector<CountingTask> tasks(200);
  {
    rpc::Copiers copiers(2);
    for (CountingTask& task : tasks) copiers.Run(&task);
  }
  for (const CountingTask& task : tasks) {
    EXPECT_EQ(task.copies, 1);
    EXPECT_TRUE(task.is_elsewhere);
  }
}

// Items of 8 KiB of query, 1 KiB of keys and values.
ServerRigOptions WideModel() {
  ServerRigOptions options;
  options.models = {ModelSpec{.kv_heads = 2, .group = 16, .head_dim = 128, .pages = 2048}};
  options.engine.staging_bytes = int64_t{64} << 20;
  options.engine.staging_slots = 32;
  return options;
}
constexpr int kItems = 40;
constexpr int kTokens = 300;

// Steps of kItems sequences, at pos; what was appended there before is tokens 0 to pos - 1.
v1::DecodeRequest WideStep(const ServerRig& rig, const std::vector<v1::Handle>& handles,
                           uint64_t pos) {
  v1::DecodeRequest request = rig.Step(handles, pos, std::vector<uint64_t>(handles.size(), pos));
  EXPECT_GE(static_cast<int64_t>(request.q().size()), rpc::Copiers::kBytesMin);
  return request;
}

bool AreAnswers(const ServerRig& rig, const v1::DecodeResponse& response, uint64_t pos) {
  for (int i = 0; i < kItems; ++i) {
    if (!rig.IsAnswer(response, i, pos + 500000, Ids(static_cast<int>(pos) + 1, 0))) return false;
  }
  return response.item_errors_size() == 0;
}

TEST(LargeMessages, AreDecodedCallByCallAndInAStream) {
  ServerRig rig(WideModel());
  const std::vector<v1::Handle> handles = rig.Create(kItems);
  v1::DecodeResponse response;
  ASSERT_TRUE(rig.Decode(WideStep(rig, handles, 0), &response).ok());
  EXPECT_TRUE(AreAnswers(rig, response, 0));
  EXPECT_GT(response.timings().batch_items(), 0U);

  grpc::ClientContext context;
  const auto stream = rig.stub->DecodeStream(&context);
  for (uint64_t pos = 1; pos < 6; ++pos) {
    v1::DecodeRequest request = WideStep(rig, handles, pos);
    request.set_request_id(pos);
    ASSERT_TRUE(stream->Write(request));
  }
  v1::DecodeRequest small = rig.Step({handles[0]}, 6, {6});  // does not overtake them
  small.set_request_id(6);
  ASSERT_TRUE(stream->Write(small));
  stream->WritesDone();
  int answers = 0;
  for (; stream->Read(&response); ++answers) {
    const uint64_t pos = response.request_id();
    EXPECT_TRUE(pos == 6 ? rig.IsAnswer(response, 0, 500006, Ids(7, 0))
                         : AreAnswers(rig, response, pos));
  }
  EXPECT_EQ(answers, 6);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(LargeMessages, AreUploadedInTheirOrder) {
  ServerRig rig(WideModel());
  const std::vector<v1::Handle> handles = rig.Create(kItems);
  std::vector<v1::AppendRequest> chunks;
  for (uint64_t pos = 0; pos < 5 * kTokens; pos += kTokens) {
    chunks.push_back(rig.Chunk(handles[0], pos, Ids(kTokens, pos), 0));
    ASSERT_GE(static_cast<int64_t>(chunks.back().k().size() + chunks.back().v().size()),
              rpc::Copiers::kBytesMin);
  }
  chunks.push_back(rig.Chunk(handles[0], 5 * kTokens, Ids(3, 5 * kTokens), 0));  // a small one
  v1::AppendResponse response;
  const grpc::Status status = rig.Append(chunks, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.committed(0).seq_len(), 5U * kTokens + 3);
  v1::DecodeResponse decoded;
  const uint64_t pos = 5 * kTokens + 3;
  ASSERT_TRUE(rig.Decode(rig.Step({handles[0]}, pos, {pos}), &decoded).ok());
  EXPECT_TRUE(rig.IsAnswer(decoded, 0, pos + 500000, Ids(static_cast<int>(pos) + 1, 0)));
}

TEST(LargeMessages, ABadRowOfAChunkEndsItsStream) {
  ServerRig rig(WideModel());
  const v1::Handle handle = rig.Create(1)[0];
  v1::AppendRequest bad = rig.Chunk(handle, kTokens, Ids(kTokens, kTokens), 0);
  bad.mutable_v()->replace(bad.v().size() - 2, 2, "\xC0\x7F");  // NaN
  v1::AppendResponse response;
  const grpc::Status status =
      rig.Append({rig.Chunk(handle, 0, Ids(kTokens, 0), 0), bad,
                  rig.Chunk(handle, 2 * kTokens, Ids(kTokens, 2 * kTokens), 0)},
                 &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("layer 0: v"));
  EXPECT_TRUE(Eventually([&] { return rig.engine->staging().slots_used() == 0; }));
}

// The sanitizers and the rig's end look.
TEST(LargeMessages, AStormOfCancelsLosesNothing) {
  ServerRig rig(WideModel());
  const std::vector<v1::Handle> handles = rig.Create(kItems);
  Storm(rig, 10, [&](uint32_t client, std::mt19937& random) {
    grpc::ClientContext context;
    if (client % 2 == 0) {
      v1::AppendResponse response;
      auto writer = rig.stub->Append(&context, &response);
      for (uint32_t i = random() % 4; i > 0; --i) {
        writer->Write(rig.Chunk(handles[client], 0, Ids(kTokens, 7), 0));
      }
      if (random() % 2 == 0) context.TryCancel();
      writer->WritesDone();
      writer->Finish();
    } else {
      const auto stream = rig.stub->DecodeStream(&context);
      for (uint32_t i = random() % 4; i > 0; --i) stream->Write(WideStep(rig, handles, 0));
      v1::DecodeResponse reply;
      if (random() % 4 != 0) context.TryCancel();
      stream->WritesDone();
      while (stream->Read(&reply)) {
      }
      stream->Finish();
    }
  });
}

}  // namespace
}  // namespace fp8kvd::testing
