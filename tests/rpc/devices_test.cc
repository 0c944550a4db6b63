// The server over two devices: calls reach the sequences that they name, wherever these are.
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/rpc/rig.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;

ServerRigOptions TwoDevices() {
  ServerRigOptions options;
  options.devices = 2;
  return options;
}

std::set<uint32_t> HomesOf(const std::vector<v1::Handle>& handles) {
  std::set<uint32_t> homes;
  for (const v1::Handle& handle : handles) homes.insert(handle.home());
  return homes;
}

TEST(Devices, ABatchOfBothIsAnsweredInItsOrder) {
  ServerRig rig(TwoDevices());
  const std::vector<v1::Handle> handles = rig.Create(6);
  ASSERT_EQ(HomesOf(handles), (std::set<uint32_t>{0, 1}));
  v1::DecodeRequest step = rig.Step(handles, 0, Ids(6, 100));
  step.set_positions(3, 9);  // beyond its length: fails alone
  step.set_want_lse(true);
  v1::DecodeResponse reply;
  ASSERT_TRUE(rig.Decode(step, &reply).ok());
  for (int i = 0; i < 6; ++i) {
    if (i == 3) continue;
    const uint64_t id = 100 + static_cast<uint64_t>(i);
    EXPECT_TRUE(rig.IsAnswer(reply, i, id + 500000, {id})) << i;
  }
  ASSERT_EQ(reply.item_errors_size(), 1);
  EXPECT_EQ(reply.item_errors(0).index(), 3U);
  EXPECT_EQ(reply.item_errors(0).error().code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_GT(reply.timings().batch_items(), 0U);
}

TEST(Devices, AStreamAndAnAppendReachBoth) {
  ServerRig rig(TwoDevices());
  const std::vector<v1::Handle> handles = rig.Create(4);
  const std::vector<uint64_t> prompt = Ids(70, 1000);
  std::vector<v1::AppendRequest> chunks;
  for (const v1::Handle& handle : handles) chunks.push_back(rig.Chunk(handle, 0, prompt, 0));
  v1::AppendResponse appended;
  ASSERT_TRUE(rig.Append(chunks, &appended).ok());
  ASSERT_EQ(appended.committed_size(), 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(appended.committed(i).handle().home(), handles[i].home());
    EXPECT_EQ(appended.committed(i).seq_len(), 70U);
  }
  grpc::ClientContext context;
  const auto stream = rig.stub->DecodeStream(&context);
  std::vector<uint64_t> history = prompt;
  for (uint64_t step = 0; step < 3; ++step) {
    v1::DecodeRequest request = rig.Step(handles, 70 + step, Ids(4, 9000 + 10 * step));
    request.set_request_id(step);
    ASSERT_TRUE(stream->Write(request));
  }
  std::map<uint64_t, v1::DecodeResponse> replies;
  for (int i = 0; i < 3; ++i) {
    v1::DecodeResponse reply;
    ASSERT_TRUE(stream->Read(&reply));
    replies[reply.request_id()] = reply;
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  for (int i = 0; i < 4; ++i) {
    std::vector<uint64_t> of_seq = prompt;
    for (uint64_t step = 0; step < 3; ++step) {
      const uint64_t id = 9000 + 10 * step + static_cast<uint64_t>(i);
      of_seq.push_back(id);
      EXPECT_TRUE(rig.IsAnswer(replies[step], i, id + 500000, of_seq)) << i << " " << step;
    }
  }
}

// Sent again with one device's part already committed, as after a broken connection.
TEST(Devices, ABatchThatIsSentAgainIsAReplay) {
  ServerRig rig(TwoDevices());
  const std::vector<v1::Handle> handles = rig.Create(2);
  v1::DecodeResponse reply;
  ASSERT_TRUE(rig.Decode(rig.Step({handles[1]}, 0, {101}), &reply).ok());
  ASSERT_TRUE(rig.Decode(rig.Step(handles, 0, {100, 101}), &reply).ok());
  EXPECT_EQ(reply.item_errors_size(), 0);
  EXPECT_TRUE(rig.IsAnswer(reply, 1, 500101, {101}));
  EXPECT_EQ(rig.fleet->stats().replays_total, 1U);
}

TEST(Devices, ABatchThatComesTooLateEndsOnBoth) {
  ServerRig rig(TwoDevices());
  const std::vector<v1::Handle> handles = rig.Create(6);
  rig.backend.Close();
  rig.more_backends[0].Close();
  // Two launches of each device are in flight, so that what follows waits.
  std::vector<std::thread> calls;
  for (size_t i = 0; i < 4; i += 2) {
    calls.emplace_back([&, i] {
      v1::DecodeResponse reply;
      EXPECT_TRUE(
          rig.Decode(rig.Step({handles[i], handles[i + 1]}, 0, {i + 10, i + 20}), &reply).ok());
    });
  }
  const auto all = [&](auto condition) {
    return Eventually(
        [&] { return condition(rig.fleet->Of(0).stats()) && condition(rig.fleet->Of(1).stats()); });
  };
  ASSERT_TRUE(all([](const engine::EngineStats& stats) { return stats.launches_inflight == 2; }));
  calls.emplace_back([&] {
    v1::DecodeRequest request = rig.Step({handles[4], handles[5]}, 0, {1, 2});
    request.set_timeout_ms(1);
    v1::DecodeResponse reply;
    EXPECT_EQ(rig.Decode(request, &reply).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  });
  ASSERT_TRUE(all([](const engine::EngineStats& stats) { return stats.queue_items == 3; }));
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
  ASSERT_TRUE(Eventually([&] { return std::chrono::steady_clock::now() > until; }));
  rig.backend.Open();
  rig.more_backends[0].Open();
  for (std::thread& call : calls) call.join();
  EXPECT_EQ(rig.fleet->stats().requests_late_total, 2U);
  EXPECT_EQ(rig.fleet->stats().rows_total, 4U);
}

TEST(Devices, AreToldByGetServerInfo) {
  ServerRig rig(TwoDevices());
  const std::vector<v1::Handle> handles = rig.Create(2);
  ASSERT_TRUE(rig.Append({rig.Chunk(handles[1], 0, Ids(70, 1), 0)}).ok());
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(rig.stub->GetServerInfo(&context, {}, &info).ok());
  ASSERT_EQ(info.devices_size(), 2);
  EXPECT_EQ(info.devices(0).name(), "fake:0");
  EXPECT_EQ(info.devices(0).pages_used(), 0U);
  EXPECT_EQ(info.devices(1).pages_used(), 2U);
  EXPECT_EQ(info.devices(1).pages_free(), 254U);
  EXPECT_EQ(info.models(0).groups(0).pages_total(), 512U);
  EXPECT_EQ(info.models(0).groups(0).pages_used(), 2U);
}

// Clients that create, decode, fork, truncate and free over both devices, each answer held against
// what the sequence should hold.
class RandomTraffic {
 public:
  RandomTraffic(ServerRig* rig, uint32_t seed) : rig_(*rig), random_(seed) {}

  void Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      const uint32_t dice = Below(10);
      if (seqs_.size() < 4 || dice == 0) {
        for (const v1::Handle& handle : rig_.Create(1 + static_cast<int>(Below(3)))) {
          seqs_.push_back({handle, {}});
        }
      } else if (dice <= 6) {
        Decode();
      } else if (dice == 7) {
        Fork();
      } else if (dice == 8) {
        Truncate();
      } else {
        Free();
      }
    }
  }
  void CheckAllListed() {
    std::set<std::pair<uint32_t, uint64_t>> listed;
    v1::ListSequencesRequest request;
    request.set_page_size(5);
    do {
      grpc::ClientContext context;
      v1::ListSequencesResponse response;
      ASSERT_TRUE(rig_.stub->ListSequences(&context, request, &response).ok());
      for (const v1::SequenceInfo& info : response.sequences()) {
        listed.emplace(info.handle().home(), info.handle().seq_id());
      }
      request.set_page_token(response.next_page_token());
    } while (!request.page_token().empty());
    std::set<std::pair<uint32_t, uint64_t>> live;
    for (const Seq& seq : seqs_) live.emplace(seq.handle.home(), seq.handle.seq_id());
    EXPECT_EQ(listed, live);
    EXPECT_EQ(HomesOf(Handles(seqs_)), (std::set<uint32_t>{0, 1}));
  }

 private:
  struct Seq {
    v1::Handle handle;
    std::vector<uint64_t> history;  // of layer 0
  };
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }
  static std::vector<v1::Handle> Handles(const std::vector<Seq>& seqs) {
    std::vector<v1::Handle> handles;
    for (const Seq& seq : seqs) handles.push_back(seq.handle);
    return handles;
  }
  Seq& Any() { return seqs_[Below(static_cast<uint32_t>(seqs_.size()))]; }

  // Of some sequences, each at its own length.
  void Decode() {
    std::vector<Seq*> chosen;
    for (Seq& seq : seqs_) {
      if (Below(2) == 0) chosen.push_back(&seq);
    }
    if (chosen.empty()) chosen.push_back(&seqs_[0]);
    std::vector<v1::Handle> handles;
    for (const Seq* seq : chosen) handles.push_back(seq->handle);
    const std::vector<uint64_t> ids = Ids(static_cast<int>(chosen.size()), next_id_);
    next_id_ += ids.size();
    v1::DecodeRequest step = rig_.Step(handles, 0, ids);
    for (size_t i = 0; i < chosen.size(); ++i) {
      step.set_positions(static_cast<int>(i), chosen[i]->history.size());
      chosen[i]->history.push_back(ids[i]);
    }
    v1::DecodeResponse reply;
    const grpc::Status status = rig_.Decode(step, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(reply.item_errors_size(), 0) << reply.item_errors(0).error().message();
    for (size_t i = 0; i < chosen.size(); ++i) {
      EXPECT_TRUE(
          rig_.IsAnswer(reply, static_cast<int32_t>(i), ids[i] + 500000, chosen[i]->history));
    }
  }
  void Fork() {
    const Seq parent = Any();
    v1::ForkSequencesRequest request;
    *request.mutable_parent() = parent.handle;
    grpc::ClientContext context;
    v1::ForkSequencesResponse response;
    ASSERT_TRUE(rig_.stub->ForkSequences(&context, request, &response).ok());
    EXPECT_EQ(response.handles(0).home(), parent.handle.home());
    seqs_.push_back({response.handles(0), parent.history});
  }
  void Truncate() {
    v1::TruncateSequencesRequest request;
    for (Seq& seq : seqs_) {
      if (Below(3) != 0) continue;
      seq.history.resize(Below(static_cast<uint32_t>(seq.history.size()) + 1));
      *request.add_handles() = seq.handle;
      request.add_seq_lens(seq.history.size());
    }
    if (request.handles_size() == 0) return;
    grpc::ClientContext context;
    v1::TruncateSequencesResponse response;
    ASSERT_TRUE(rig_.stub->TruncateSequences(&context, request, &response).ok());
    EXPECT_EQ(response.item_errors_size(), 0);
  }
  void Free() {
    v1::FreeSequencesRequest request;
    std::vector<Seq> kept;
    for (Seq& seq : seqs_) {
      if (Below(4) == 0) {
        *request.add_handles() = seq.handle;
      } else {
        kept.push_back(std::move(seq));
      }
    }
    seqs_ = std::move(kept);
    if (request.handles_size() == 0) return;
    grpc::ClientContext context;
    v1::FreeSequencesResponse response;
    ASSERT_TRUE(rig_.stub->FreeSequences(&context, request, &response).ok());
    EXPECT_EQ(response.item_errors_size(), 0);
  }

  ServerRig& rig_;
  std::mt19937 random_;
  std::vector<Seq> seqs_;
  uint64_t next_id_ = 1;
};

TEST(Devices, RandomTrafficFindsEverySequenceWhereItIs) {
  ServerRig rig(TwoDevices());
  RandomTraffic traffic(&rig, /*seed=*/5);
  traffic.Run(250);
  traffic.CheckAllListed();
  EXPECT_GT(rig.fleet->Of(0).stats().rows_total, 50U);
  EXPECT_GT(rig.fleet->Of(1).stats().rows_total, 50U);
  EXPECT_GT(rig.fleet->stats().page_copies_total, 0U);
}

// A device fails under a batch that is on both: the caller is told to go elsewhere.
TEST(Devices, OneThatFailsEndsTheWholeBatch) {
  ServerRig rig(TwoDevices());
  const std::vector<v1::Handle> handles = rig.Create(2);
  rig.more_backends[0].Break();
  v1::DecodeResponse reply;
  const grpc::Status status = rig.Decode(rig.Step(handles, 0, {1, 2}), &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("the device failed"));
}

}  // namespace
}  // namespace fp8kvd::testing
