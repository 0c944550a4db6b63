// Which way tensors go, against the built daemon.
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cc/client.h"
#include "client/cc/decode_stream.h"
#include "tests/client/daemon_process.h"

namespace fp8kvd::client {
namespace {

using testing::HasSubstr;

constexpr char kConfig[] = R"(
models {
  name: "m" layers: 2 q_heads: 8 kv_heads: 2 head_dim: 64
  expected_seqs: 8 expected_tokens: 2048 precision: bf16
}
)";
constexpr size_t kKvRow = 2 * 64;
constexpr size_t kQRow = 8 * 64;

std::unique_ptr<Client> Connect(const DaemonProcess& daemon, Transport transport,
                                int64_t shared_memory_bytes = 32 << 20) {
  return Client::Connect({.target = daemon.target(),
                          .timeout_ms = 20'000,
                          .retries_max = 0,
                          .transport = transport,
                          .shared_memory_bytes = shared_memory_bytes})
      .value();
}

// The first token of a new sequence, sent this way.
absl::Status Step(Client& client) {
  const std::vector<Sequence> seqs = client.CreateSequences({}).value();
  const Handle handle = seqs[0].handle();
  const uint64_t pos = 0;
  const std::vector<uint16_t> q(kQRow, 0x3F80);
  const std::vector<uint16_t> k(kKvRow, 0x3F80);
  return client.Decode({.handles = {&handle, 1}, .positions = {&pos, 1}, .q = q, .k = k, .v = k})
      .status();
}

TEST(Transport, AutoTakesSharedMemoryOnTheSameHost) {
  const DaemonProcess daemon(kConfig);
  const auto client = Connect(daemon, Transport::kAuto);
  EXPECT_EQ(client->transport().why_not_shared, "nothing was sent yet");
  ASSERT_TRUE(Step(*client).ok());
  EXPECT_EQ(client->transport().in_use, Transport::kSharedMemory);
  EXPECT_EQ(client->transport().why_not_shared, "");
}

TEST(Transport, AutoFallsBackToGrpcAndSaysWhy) {
  const DaemonProcess daemon(kConfig, 0, {"--shm_enabled=false"});
  const auto client = Connect(daemon, Transport::kAuto);
  ASSERT_TRUE(Step(*client).ok());
  EXPECT_EQ(client->transport().in_use, Transport::kGrpc);
  EXPECT_THAT(client->transport().why_not_shared, HasSubstr("is off here"));
  const auto strict = Connect(daemon, Transport::kSharedMemory);
  const absl::Status status = Step(*strict);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is off here"));
}

TEST(Transport, WhatASessionDoesNotHoldGoesByGrpc) {
  const DaemonProcess daemon(kConfig);
  const auto client = Connect(daemon, Transport::kAuto, 64 << 10);
  const std::vector<Sequence> seqs = client->CreateSequences({.expected_tokens = 2000}).value();
  const Handle handle = seqs[0].handle();
  const std::vector<uint16_t> rows(2000 * kKvRow, 0x3F80);  // chunks of 1 MiB
  ASSERT_TRUE(client->Append({.handle = handle, .n = 2000, .k = rows, .v = rows}).ok());
  const uint64_t pos = 100;
  const auto stream = client->OpenDecodeStream(4).value();
  uint64_t request_id = 0;
  for (const uint32_t q_len : {1U, 64U, 1U}) {
    const std::vector<uint16_t> q(q_len * kQRow, 0x3F80);
    const absl::Status sent = stream->Send(
        ++request_id,
        {.handles = {&handle, 1}, .positions = {&pos, 1}, .q_lens = {&q_len, 1}, .q = q});
    ASSERT_TRUE(sent.ok()) << sent;
  }
  for (int i = 0; i < 3; ++i) {
    const auto reply = stream->Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(reply->status.ok()) << reply->status;
    EXPECT_TRUE(reply->reply.item_errors.empty());
  }
  const auto strict = Connect(daemon, Transport::kSharedMemory, 64 << 10);
  EXPECT_EQ(strict->Append({.handle = handle, .pos = 2000, .n = 2000, .k = rows, .v = rows}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Transport, ARequestThatNoSessionHoldsDoesNotEndItsStream) {
  const DaemonProcess daemon(kConfig);
  const auto client = Connect(daemon, Transport::kSharedMemory, 64 << 10);
  const std::vector<Sequence> seqs = client->CreateSequences({}).value();
  const Handle handle = seqs[0].handle();
  const std::vector<uint16_t> rows(64 * kQRow, 0x3F80);
  const auto stream = client->OpenDecodeStream(4).value();
  const uint64_t pos = 0;
  const auto send = [&](uint64_t id, uint32_t q_len) {
    return stream->Send(id, {.handles = {&handle, 1},
                             .positions = {&pos, 1},
                             .q_lens = {&q_len, 1},
                             .q = absl::MakeConstSpan(rows).first(q_len * kQRow),
                             .k = absl::MakeConstSpan(rows).first(q_len * kKvRow),
                             .v = absl::MakeConstSpan(rows).first(q_len * kKvRow)});
  };
  EXPECT_EQ(send(1, 64).code(), absl::StatusCode::kInvalidArgument) << "the first of the stream";
  const absl::Status sent = send(1, 1);  // its id is free again
  ASSERT_TRUE(sent.ok()) << sent;
  EXPECT_EQ(send(2, 64).code(), absl::StatusCode::kInvalidArgument) << "in an open session";
  const auto reply = stream->Receive();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->status.ok()) << reply->status;
}

// Hangs up every session of this process, as a daemon does that ends them.
int CutSessions() {
  int cut = 0;
  for (int fd = 3; fd < 256; ++fd) {
    int type = 0;
    socklen_t size = sizeof(type);
    sockaddr_un peer = {};
    socklen_t peer_size = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET &&
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0) {
      cut += shutdown(fd, SHUT_RDWR) == 0 ? 1 : 0;
    }
  }
  return cut;
}

// What is sent again comes out of the memory of the session that broke, what was answered does not:
// the daemon takes a step again with the same rows only.
TEST(Transport, AStreamOfStepsSurvivesItsSessions) {
  constexpr uint64_t kSteps = 400;
  const DaemonProcess daemon(kConfig);
  const auto client = Client::Connect({.target = daemon.target(),
                                       .timeout_ms = 20'000,
                                       .backoff_ms_min = 1,
                                       .transport = Transport::kSharedMemory,
                                       .shared_memory_bytes = 1 << 20})
                          .value();
  const std::vector<Sequence> seqs = client->CreateSequences({.count = 2}).value();
  const Handle handles[] = {seqs[0].handle(), seqs[1].handle()};
  const auto stream = client->OpenDecodeStream(4).value();
  std::map<uint64_t, std::vector<uint16_t>> answers;
  const auto receive = [&] {
    const auto reply = stream->Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    ASSERT_TRUE(reply->status.ok()) << reply->status;
    ASSERT_TRUE(reply->reply.item_errors.empty()) << reply->reply.item_errors[0].status;
    EXPECT_TRUE(answers.emplace(reply->request_id, reply->reply.out_bf16).second);
  };
  int cuts = 0;
  for (uint64_t id = 0; id < 2 * kSteps && !HasFatalFailure(); ++id) {
    const uint64_t pos = id % kSteps;
    // The second sequence has the same rows, and nobody cuts its sessions.
    if (id < kSteps && pos % 20 == 10) cuts += CutSessions();
    const std::vector<uint16_t> rows(kQRow, static_cast<uint16_t>(0x3F80 + pos % 64));
    const absl::Span<const uint16_t> kv = absl::MakeConstSpan(rows).first(kKvRow);
    if (id >= 4) receive();
    const absl::Status sent = stream->Send(id, {.handles = {&handles[id / kSteps], 1},
                                                .positions = {&pos, 1},
                                                .q = rows,
                                                .k = kv,
                                                .v = kv});
    ASSERT_TRUE(sent.ok()) << sent;
  }
  while (answers.size() < 2 * kSteps && !HasFatalFailure()) receive();
  EXPECT_GE(cuts, 20);
  for (uint64_t pos = 0; pos < kSteps; ++pos) EXPECT_EQ(answers[pos], answers[kSteps + pos]) << pos;
}

// Rows of a session that holds them once, but not a copy beside them.
TEST(Transport, RowsInPlaceAreNotCopied) {
  const DaemonProcess daemon(kConfig);
  const auto client = Connect(daemon, Transport::kSharedMemory, 1 << 20);
  auto rows = client->MakeRows(2000 * kKvRow);  // half of it
  ASSERT_TRUE(rows.ok()) << rows.status();
  std::fill(rows->elements().begin(), rows->elements().end(), uint16_t{0x4000});
  EXPECT_EQ(client->MakeRows(2100 * kKvRow).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(client->MakeRows(0).status().code(), absl::StatusCode::kInvalidArgument);

  const std::vector<Sequence> seqs = client->CreateSequences({.expected_tokens = 2000}).value();
  const Handle handle = seqs[0].handle();
  const absl::Span<const uint16_t> span = rows->elements();
  ASSERT_TRUE(client->Append({.handle = handle, .n = 2000, .k = span, .v = span}).ok());
  const uint64_t pos = 1999;
  const auto reply = client->Decode(
      {.handles = {&handle, 1}, .positions = {&pos, 1}, .q = span.subspan(kQRow, kQRow)});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->out_bf16, std::vector<uint16_t>(kQRow, 0x4000));

  rows = absl::CancelledError("dropped");
  EXPECT_TRUE(client->MakeRows(2100 * kKvRow).ok());
}

TEST(Transport, RowsInPlaceOutliveTheirSessionAndGoByGrpcToo) {
  const DaemonProcess daemon(kConfig);
  for (const Transport transport : {Transport::kSharedMemory, Transport::kGrpc}) {
    const auto client =
        Client::Connect({.target = daemon.target(), .backoff_ms_min = 1, .transport = transport})
            .value();
    const SharedRows rows = client->MakeRows(kQRow).value();
    std::fill(rows.elements().begin(), rows.elements().end(), uint16_t{0x4000});
    const absl::Span<const uint16_t> q = rows.elements();
    const absl::Span<const uint16_t> kv = q.first(kKvRow);
    const std::vector<Sequence> seqs = client->CreateSequences({}).value();
    const Handle handle = seqs[0].handle();
    for (uint64_t pos = 0; pos < 3; ++pos) {
      const auto reply = client->Decode(
          {.handles = {&handle, 1}, .positions = {&pos, 1}, .q = q, .k = kv, .v = kv});
      ASSERT_TRUE(reply.ok()) << reply.status();
      EXPECT_EQ(reply->out_bf16, std::vector<uint16_t>(kQRow, 0x4000));
      EXPECT_EQ(CutSessions() > 0, transport == Transport::kSharedMemory);
    }
  }
}

TEST(Transport, ManyThreadsShareASession) {
  const DaemonProcess daemon(kConfig);
  const auto client = Connect(daemon, Transport::kSharedMemory);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const std::vector<Sequence> seqs = client->CreateSequences({}).value();
      const Handle handle = seqs[0].handle();
      const auto value = static_cast<uint16_t>(0x3F80 + seqs[0].handle().seq_id % 64);
      const std::vector<uint16_t> q(kQRow, 0x3F80);
      const std::vector<uint16_t> k(kKvRow, 0x3F80);
      const std::vector<uint16_t> v(kKvRow, value);
      for (uint64_t pos = 0; pos < 100; ++pos) {
        const auto reply = client->Decode(
            {.handles = {&handle, 1}, .positions = {&pos, 1}, .q = q, .k = k, .v = v});
        // Every V of the sequence is the same, so the answer is, too.
        if (reply.ok() && reply->out_bf16 == std::vector<uint16_t>(kQRow, value)) ++right;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 400);
}

// One client, one handle, two runs of the daemon: it calls again and knows nothing of it.
TEST(Transport, AClientGoesOnOverAPlannedRestart) {
  for (const Transport transport : {Transport::kGrpc, Transport::kSharedMemory}) {
    std::string folder = std::filesystem::temp_directory_path() / "fp8kvd_snapshots_XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    const std::string flag = "--snapshot_dir=" + folder;
    DaemonProcess daemon(kConfig, 0, {flag});
    const int port = daemon.port();
    const auto client = Client::Connect({.target = daemon.target(),
                                         .timeout_ms = 20'000,
                                         .retries_max = 20,
                                         .backoff_ms_min = 20,
                                         .transport = transport})
                            .value();
    const std::vector<Sequence> seqs = client->CreateSequences({}).value();
    const Handle handle = seqs[0].handle();
    const std::vector<uint16_t> q(kQRow, 0x3F80);
    const std::vector<uint16_t> k(kKvRow, 0x3F80);
    const auto step = [&](uint64_t pos, uint16_t value) {
      const std::vector<uint16_t> v(kKvRow, value);
      const auto reply =
          client->Decode({.handles = {&handle, 1}, .positions = {&pos, 1}, .q = q, .k = k, .v = v});
      EXPECT_TRUE(reply.ok() && reply->item_errors.empty()) << reply.status();
      return reply.ok() && !reply->out_bf16.empty() ? reply->out_bf16[0] : uint16_t{0};
    };
    EXPECT_EQ(step(0, 0x4000), 0x4000);  // 2.0
    EXPECT_EQ(daemon.End(SIGTERM), 0) << daemon.Log();
    daemon.Start(port, {flag});
    EXPECT_EQ(step(0, 0x4000), 0x4000) << "a retry";
    EXPECT_EQ(step(1, 0x4080), 0x4040) << "2.0 and 4.0 make 3.0";
    std::filesystem::remove_all(folder);
  }
}

bool HasDaemonsMemory() {
  std::ifstream maps("/proc/self/maps");
  return std::string(std::istreambuf_iterator<char>(maps), {}).find("/memfd:fp8kvd") !=
         std::string::npos;
}

// A crash leaves nothing that the next start minds, and the memory goes with its last user.
TEST(Transport, ADaemonKilledInASessionLeavesNeitherSocketNorMemory) {
  DaemonProcess daemon(kConfig);
  const int port = daemon.port();
  auto client = Connect(daemon, Transport::kSharedMemory);
  ASSERT_TRUE(Step(*client).ok());
  ASSERT_TRUE(HasDaemonsMemory());
  EXPECT_EQ(daemon.End(SIGKILL), -SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(daemon.shm_socket())) << "a dead one removes nothing";
  client.reset();
  EXPECT_FALSE(HasDaemonsMemory());

  daemon.Start(port);
  client = Connect(daemon, Transport::kSharedMemory);
  EXPECT_TRUE(Step(*client).ok());
  client.reset();
  EXPECT_FALSE(HasDaemonsMemory());
  EXPECT_EQ(daemon.End(SIGTERM), 0) << daemon.Log();
  EXPECT_FALSE(std::filesystem::exists(daemon.shm_socket()));
  EXPECT_FALSE(std::filesystem::exists(daemon.shm_socket().string() + ".lock"));
}

}  // namespace
}  // namespace fp8kvd::client
