// The C++ client against the built daemon over real sockets, with connections that break and
// processes that die.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cc/client.h"
#include "client/cc/decode_stream.h"
#include "tests/client/cutting_proxy.h"
#include "tests/client/daemon_process.h"

namespace fp8kvd::client {
namespace {

constexpr char kConfig[] = R"(
policy { allow_fp8_kv: true }
cache { lease_ttl_ms: 300 }
models {
  name: "m" layers: 2 q_heads: 8 kv_heads: 2 head_dim: 64
  expected_seqs: 8 expected_tokens: 8192 precision: fp8_kv
}
)";
constexpr size_t kKvRow = 2 * 64;
constexpr size_t kQRow = 8 * 64;

// bf16 of about 1, different at every index.
std::vector<uint16_t> Rows(size_t elements, uint32_t seed) {
  std::vector<uint16_t> rows(elements);
  uint32_t state = seed * 2'654'435'761U + 1;
  for (uint16_t& bits : rows) {
    state = state * 1'664'525U + 1'013'904'223U;
    bits = static_cast<uint16_t>(0x3F00U + ((state >> 16) & 0x80FFU));
  }
  return rows;
}

// Every test goes through both transports.
class DaemonTest : public testing::TestWithParam<Transport> {
 protected:
  static std::unique_ptr<Client> Connect(const std::string& target,
                                         Transport transport = GetParam()) {
    return Client::Connect({.target = target,
                            .timeout_ms = 20'000,
                            .retries_max = 10,
                            .backoff_ms_min = 20,
                            .append_chunk_bytes = 64 << 10,
                            .transport = transport})
        .value();
  }

  // A sequence with `tokens` tokens in both layers, sent through `client`.
  Sequence Filled(Client& client, uint64_t tokens) {
    std::vector<Sequence> made = client.CreateSequences({.expected_tokens = tokens}).value();
    const std::vector<uint16_t> k = Rows(2 * tokens * kKvRow, 1);
    const std::vector<uint16_t> v = Rows(2 * tokens * kKvRow, 2);
    const absl::Status status =
        client.Append({.handle = made[0].handle(), .layers_count = 2, .n = tokens, .k = k, .v = v});
    EXPECT_TRUE(status.ok()) << status;
    return std::move(made[0]);
  }

  static std::vector<float> Attend(Client& client, const Sequence& seq, uint32_t layer,
                                   uint64_t pos) {
    const std::vector<uint16_t> q = Rows(kQRow, 3);
    const DecodeReply reply = client
                                  .Decode({.layer = layer,
                                           .handles = {&seq.handle(), 1},
                                           .positions = {&pos, 1},
                                           .q = q,
                                           .out_type = OutType::kFp32})
                                  .value();
    EXPECT_TRUE(reply.item_errors.empty());
    return reply.out_fp32;
  }

  uint64_t PagesUsed() {
    uint64_t pages = 0;
    const ServerInfo info = client_->GetServerInfo().value();
    for (const LayerGroupInfo& group : info.models[0].groups) pages += group.pages_used;
    return pages;
  }

  DaemonProcess daemon_{kConfig};
  std::unique_ptr<Client> client_ = Connect(daemon_.target());
};

TEST_P(DaemonTest, AnAppendSurvivesItsConnection) {
  constexpr uint64_t kTokens = 4096;  // 2 MiB of K and V a layer
  const Sequence whole = Filled(*client_, kTokens);
  for (const int64_t cut_after : {1'000, 70'000, 1'000'000, 3'000'000}) {
    SCOPED_TRACE(cut_after);
    CuttingProxy proxy(daemon_.port());
    auto through = Connect(proxy.target(), Transport::kGrpc);  // what the proxy can cut
    proxy.CutAfterBytesUp(cut_after);
    const Sequence cut = Filled(*through, kTokens);
    EXPECT_EQ(proxy.cuts(), 1);
    const Handle handle = cut.handle();
    EXPECT_THAT(client_->StatSequences({&handle, 1})->sequences[0].seq_lens,
                testing::ElementsAre(kTokens, kTokens));
    for (const uint32_t layer : {0U, 1U}) {
      EXPECT_EQ(Attend(*client_, cut, layer, kTokens - 1),
                Attend(*client_, whole, layer, kTokens - 1));
    }
  }
}

// Steps that append must land once each, whether the request or its answer was lost.
TEST_P(DaemonTest, AStreamOfStepsSurvivesItsConnection) {
  constexpr uint64_t kSteps = 300;
  for (const bool up : {true, false}) {
    SCOPED_TRACE(up ? "requests are lost" : "answers are lost");
    CuttingProxy proxy(daemon_.port());
    auto through = Connect(proxy.target(), Transport::kGrpc);  // what the proxy can cut
    std::vector<Sequence> seqs = through->CreateSequences({.count = 1}).value();
    const Handle handle = seqs[0].handle();
    auto stream = through->OpenDecodeStream(4).value();
    std::set<uint64_t> answered;
    const auto receive = [&] {
      absl::StatusOr<StreamReply> reply = stream->Receive();
      ASSERT_TRUE(reply.ok()) << reply.status();
      ASSERT_TRUE(reply->status.ok()) << reply->status;
      ASSERT_TRUE(reply->reply.item_errors.empty()) << reply->reply.item_errors[0].status;
      EXPECT_TRUE(answered.insert(reply->request_id).second);
    };
    for (uint64_t pos = 0; pos < kSteps; ++pos) {
      if (pos == 50) up ? proxy.CutAfterBytesUp(100'000) : proxy.CutAfterBytesDown(100'000);
      const std::vector<uint16_t> k = Rows(kKvRow, static_cast<uint32_t>(pos));
      const std::vector<uint16_t> q = Rows(kQRow, static_cast<uint32_t>(pos));
      if (pos >= 4) receive();
      const absl::Status sent = stream->Send(
          pos, {.handles = {&handle, 1}, .positions = {&pos, 1}, .q = q, .k = k, .v = k});
      ASSERT_TRUE(sent.ok()) << sent;
    }
    while (answered.size() < kSteps && !HasFatalFailure()) receive();
    EXPECT_EQ(proxy.cuts(), 1);
    EXPECT_THAT(client_->StatSequences({&handle, 1})->sequences[0].seq_lens,
                testing::ElementsAre(kSteps, 0));
  }
}

// Asks until it is so; false after half a minute. What is asked is a call, so nothing spins.
template <typename Condition>
bool Eventually(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
  }
  return false;
}

TEST_P(DaemonTest, ALivingClientKeepsItsSequencesPastTheirLease) {
  const Sequence seq = Filled(*client_, 100);
  const uint64_t ttl_ms = client_->StatSequences({&seq.handle(), 1})->sequences[0].ttl_ms;
  ASSERT_EQ(ttl_ms, 300U);
  // A second sequence that nobody renews is the clock: when it is gone, a lease has passed.
  const Handle unowned = client_->CreateSequences({.ttl_ms = 2 * ttl_ms}).value()[0].Release();
  const auto lives = [&](const Handle& handle) {
    const std::vector<SequenceInfo> all = client_->ListSequences("", 100).value();
    return std::any_of(all.begin(), all.end(), [&](const auto& s) { return s.handle == handle; });
  };
  ASSERT_TRUE(Eventually([&] { return !lives(unowned); }));
  EXPECT_TRUE(lives(seq.handle()));
}

TEST_P(DaemonTest, AKilledClientsPagesComeBackWithinItsLease) {
  for (const char* seq_len : {"64", "8000"}) {  // killed in its decodes, killed in its appends
    SCOPED_TRACE(seq_len);
    const pid_t pid = Spawn({BuiltProgram("fp8kvctl"), "bench", "--target=" + daemon_.target(),
                             "--batch=4", std::string("--seq_len=") + seq_len, "--seconds=60"},
                            -1);
    EXPECT_TRUE(Eventually([&] { return PagesUsed() > 0; }));
    const Sequence other = Filled(*client_, 100);
    const std::vector<float> before = Attend(*client_, other, 0, 99);
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    const auto killed = std::chrono::steady_clock::now();
    EXPECT_TRUE(Eventually([&] { return client_->ListSequences("", 100)->size() <= 1; }));
    // A lease of 0.3 s; generous, for a busy machine.
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(5));
    EXPECT_EQ(Attend(*client_, other, 0, 99), before);
    EXPECT_EQ(PagesUsed(), client_->StatSequences({&other.handle(), 1})->sequences[0].pages);
  }
}

TEST_P(DaemonTest, BenchSaysWhereACallsTimeGoes) {
  const std::string command = BuiltProgram("fp8kvctl") + " bench --target=" + daemon_.target() +
                              " --json --breakdown --seconds=0.2 --batch=2 --seq_len=64";
  std::FILE* const pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string out;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) out += static_cast<char>(c);
  EXPECT_EQ(pclose(pipe), 0);
  const size_t at = out.find("\"breakdown\"");
  ASSERT_NE(at, std::string::npos) << out;
  size_t before = at;
  for (const char* part : {"stage_us", "queue_us", "kernel_us", "reply_us", "wire_us"}) {
    const size_t found = out.find(part, at);
    ASSERT_NE(found, std::string::npos) << part << " is missing: " << out;
    EXPECT_GT(found, before) << part;
    before = found;
  }
}

TEST_P(DaemonTest, ARestartIsNoticedAndOldHandlesAreNotFound) {
  Sequence seq = Filled(*client_, 10);
  const uint64_t incarnation = client_->GetServerInfo()->incarnation;
  const int port = daemon_.port();
  EXPECT_EQ(daemon_.End(SIGTERM), 0);
  DaemonProcess next(kConfig, port);
  EXPECT_NE(client_->GetServerInfo()->incarnation, incarnation);  // the same client, reconnected
  const Handle handle = seq.Release();
  const StatReply stat = client_->StatSequences({&handle, 1}).value();
  ASSERT_EQ(stat.item_errors.size(), 1U);
  EXPECT_EQ(stat.item_errors[0].status.code(), absl::StatusCode::kNotFound);
  Filled(*client_, 10);
}

TEST_P(DaemonTest, AnAdoptedSequenceOutlivesTheClientThatMadeIt) {
  Handle handle;
  {
    const auto maker = Connect(daemon_.target());
    handle = Filled(*maker, 10).Release();
  }
  Sequence seq = client_->AdoptSequence(handle).value();
  EXPECT_EQ(seq.handle(), handle);
  const StatReply stat = client_->StatSequences({&handle, 1}).value();
  EXPECT_THAT(stat.sequences[0].seq_lens, testing::ElementsAre(10, 10));
  EXPECT_TRUE(seq.Free().ok());
  EXPECT_EQ(client_->AdoptSequence(handle).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(DaemonTest, ARenewalStartsTheLeaseAnewAndNamesWhatIsGone) {
  Sequence seq = Filled(*client_, 1);
  const Handle kept = seq.handle();
  const Handle gone = Filled(*client_, 1).Release();
  ASSERT_TRUE(client_->FreeSequences({&gone, 1}).ok());
  const Handle both[] = {kept, gone};
  const std::vector<ItemError> errors = client_->RenewSequences(both).value();
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_EQ(errors[0].index, 1U);
  EXPECT_EQ(errors[0].status.code(), absl::StatusCode::kNotFound);
}

TEST_P(DaemonTest, MeasuresWhatFp8KvDoesToRows) {
  std::vector<uint16_t> exact(2 * 64, 0x43E0);  // 448, so that the scale is 1
  const KvError none = client_->MeasureKvError(2, 64, exact, exact).value();
  EXPECT_EQ(none.k, 0);
  EXPECT_EQ(none.v_worst_row, 0);
  std::vector<uint16_t> rounded = exact;
  rounded[5] = 0x43D7;  // 430, between the codes 416 and 448
  const KvError some = client_->MeasureKvError(2, 64, rounded, exact).value();
  EXPECT_NEAR(some.k_worst_row, 14.0 / (448 * 8), 1e-5);  // off by 14 in a row of 64
  EXPECT_NEAR(some.k, some.k_worst_row / std::sqrt(2.0), 1e-5);
  EXPECT_EQ(some.v, 0);
  EXPECT_FALSE(client_->MeasureKvError(2, 63, exact, exact).ok());
}

INSTANTIATE_TEST_SUITE_P(Over, DaemonTest,
                         testing::Values(Transport::kGrpc, Transport::kSharedMemory),
                         [](const auto& of) {
                           return of.param == Transport::kGrpc ? "Grpc" : "SharedMemory";
                         });

}  // namespace
}  // namespace fp8kvd::client
