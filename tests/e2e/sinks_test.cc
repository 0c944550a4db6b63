// Sinks over a socket: what the daemon answers is what double precision says of the same keys,
// sinks in and left out, in both precisions; and who sends them wrong is told.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/bf16.h"
#include "kernels/reference/format.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/daemon_process.h"
#include "tests/kernels/judge.h"

namespace fp8kvd::testing {
namespace {

namespace reference = kernels::reference;
using ::testing::HasSubstr;

constexpr int kQHeads = 6;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;
constexpr int kTokens = 150;
constexpr int kWindow = 40;  // of layer 1

// Layer 0 sees all, layer 1 a window; layer 2 has no sinks.
std::string Model(const std::string& name, const std::string& precision) {
  return "models { name: \"" + name + "\" layers: 3 q_heads: 6 kv_heads: 2 head_dim: 64\n" +
         "  has_sinks: true precision: " + precision +
         " expected_seqs: 8 expected_tokens: 256\n"
         "  layer_rules { layers: \"1\" window: 40 }\n"
         "  layer_rules { layers: \"2\" has_sinks: false } }\n";
}

// From far below every score to far above.
const std::vector<float> kSinks = {-60.0F, -1.0F, 0.0F, 2.5F, 8.0F, 40.0F};

using Rows = std::vector<uint16_t>;

Rows Random(int rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Rows values(static_cast<size_t>(rows) * kHeadDim);
  for (uint16_t& value : values) value = kernels::FloatToBf16(normal(random));
  return values;
}

std::string Bytes(const Rows& rows) {
  return {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(uint16_t)};
}

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> floats(bytes.size() / sizeof(float));
  std::memcpy(floats.data(), bytes.data(), floats.size() * sizeof(float));
  return floats;
}

// Tokens of one sequence and layer, and queries at the last of them.
struct History {
  explicit History(uint32_t seed, int tokens_count = kTokens)
      : tokens(tokens_count),
        k(Random(tokens * kKvHeads, seed)),
        v(Random(tokens * kKvHeads, seed + 1)) {}
  int tokens;
  Rows k;
  Rows v;
};

reference::DecodeOutput Right(const History& history, const Rows& q, int q_len, bool is_fp8,
                              int window, const float* sinks) {
  const reference::Fp8Rows k8 = reference::quantize_fp8_kv(history.k, kHeadDim);
  const reference::Fp8Rows v8 = reference::quantize_fp8_kv(history.v, kHeadDim);
  reference::DecodeInput input;
  input.precision = is_fp8 ? Precision::kFp8Kv : Precision::kBf16;
  input.k = {.codes = k8.codes.data(), .scales = k8.scales.data(), .rows = history.k.data()};
  input.v = {.codes = v8.codes.data(), .scales = v8.scales.data(), .rows = history.v.data()};
  input.q = q.data();
  input.sink_logits = sinks;
  input.pos = history.tokens - q_len;
  input.q_len = q_len;
  input.kv_heads = kKvHeads;
  input.group = kQHeads / kKvHeads;
  input.head_dim = kHeadDim;
  input.window = window;
  input.sm_scale = 1.0F / std::sqrt(static_cast<float>(kHeadDim));
  return reference::Decode(input);
}

class Sinks : public ::testing::TestWithParam<const char*> {
 protected:
  Sinks()
      : daemon_({.models = Model("bf16", "bf16") + Model("fp8_kv", "fp8_kv")}),
        stub_(Connect(daemon_.address())) {}
  ~Sinks() override { EXPECT_EQ(daemon_.Stop(), 0) << daemon_.log(); }

  bool is_fp8() const { return std::string(GetParam()) == "fp8_kv"; }

  // A sequence that holds the tokens in this layer.
  v1::Handle Fill(const History& history, int layer) {
    const v1::Handle handle = Create(stub_.get(), 1, GetParam())[0];
    v1::AppendRequest chunk = ChunkOf(handle, layer, 0, 0, 0, GetParam());
    chunk.set_n(history.tokens);
    chunk.set_k(Bytes(history.k));
    chunk.set_v(Bytes(history.v));
    grpc::ClientContext context;
    v1::AppendResponse appended;
    const auto writer = stub_->Append(&context, &appended);
    EXPECT_TRUE(writer->Write(chunk));
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return handle;
  }

  // Attends only; fp32 and lse.
  v1::DecodeRequest Ask(const v1::Handle& handle, int layer, int pos, const Rows& q,
                        int q_len) const {
    v1::DecodeRequest request;
    request.set_model(GetParam());
    request.set_layer(layer);
    *request.add_handles() = handle;
    request.add_positions(pos);
    request.add_q_lens(q_len);
    request.set_q(Bytes(q));
    request.set_out_type(v1::OUT_TYPE_FP32);
    request.set_want_lse(true);
    return request;
  }

  kernels::cases::Answer Answer(const v1::DecodeRequest& request) {
    v1::DecodeResponse reply;
    const grpc::Status status = Decode(stub_.get(), request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.item_errors_size(), 0);
    return {.out = Floats(reply.out()), .lse = Floats(reply.lse())};
  }

  Daemon daemon_;
  std::unique_ptr<v1::DecodeAttention::Stub> stub_;
};

TEST_P(Sinks, JoinTheDenominatorAndNothingElse) {
  const History history(/*seed=*/1);
  for (const int layer : {0, 1}) {
    const v1::Handle handle = Fill(history, layer);
    for (const int q_len : {1, 3}) {
      const Rows q = Random(q_len * kQHeads, 7);
      v1::DecodeRequest request = Ask(handle, layer, kTokens - q_len, q, q_len);
      request.mutable_sink_logits()->Add(kSinks.begin(), kSinks.end());
      const kernels::cases::Verdict with = kernels::cases::Judge(
          Answer(request),
          Right(history, q, q_len, is_fp8(), layer == 1 ? kWindow : 0, kSinks.data()),
          kernels::OutType::kFp32);
      EXPECT_TRUE(with.holds) << "layer " << layer << ": " << with.why;
    }
  }
}

TEST_P(Sinks, AreLeftOutOfOutAndLseWithOmitSinks) {
  const History history(/*seed=*/2);
  const v1::Handle handle = Fill(history, 0);
  const Rows q = Random(kQHeads, 8);
  const reference::DecodeOutput right = Right(history, q, 1, is_fp8(), 0, nullptr);
  v1::DecodeRequest request = Ask(handle, 0, kTokens - 1, q, 1);
  request.set_omit_sinks(true);
  const kernels::cases::Verdict without =
      kernels::cases::Judge(Answer(request), right, kernels::OutType::kFp32);
  EXPECT_TRUE(without.holds) << without.why;
  request.mutable_sink_logits()->Add(kSinks.begin(), kSinks.end());
  const kernels::cases::Verdict sent =
      kernels::cases::Judge(Answer(request), right, kernels::OutType::kFp32);
  EXPECT_TRUE(sent.holds) << sent.why;
  request.set_omit_sinks(false);  // and they do matter
  EXPECT_FALSE(kernels::cases::Judge(Answer(request), right, kernels::OutType::kFp32).holds);
}

// A history over two daemons, here two sequences: one includes the sink, and the parts merge by
// their lse to what one daemon with all keys answers.
TEST_P(Sinks, OfOneOfTwoPartsMergeToTheWhole) {
  const History first(/*seed=*/3, 90);
  const History second(/*seed=*/5, 60);
  History whole = first;
  whole.tokens += second.tokens;
  whole.k.insert(whole.k.end(), second.k.begin(), second.k.end());
  whole.v.insert(whole.v.end(), second.v.begin(), second.v.end());
  const Rows q = Random(kQHeads, 9);
  v1::DecodeRequest request = Ask(Fill(first, 0), 0, first.tokens - 1, q, 1);
  request.mutable_sink_logits()->Add(kSinks.begin(), kSinks.end());
  const kernels::cases::Answer a = Answer(request);
  request = Ask(Fill(second, 0), 0, second.tokens - 1, q, 1);
  request.set_omit_sinks(true);
  const kernels::cases::Answer b = Answer(request);
  kernels::cases::Answer merged = a;
  for (size_t head = 0; head < kQHeads; ++head) {
    const double most = std::max(a.lse[head], b.lse[head]);
    const double of_a = std::exp(a.lse[head] - most);
    const double of_b = std::exp(b.lse[head] - most);
    merged.lse[head] = static_cast<float>(most + std::log(of_a + of_b));
    for (size_t i = head * kHeadDim; i < (head + 1) * kHeadDim; ++i) {
      merged.out[i] = static_cast<float>((of_a * a.out[i] + of_b * b.out[i]) / (of_a + of_b));
    }
  }
  const kernels::cases::Verdict verdict = kernels::cases::Judge(
      merged, Right(whole, q, 1, is_fp8(), 0, kSinks.data()), kernels::OutType::kFp32);
  EXPECT_TRUE(verdict.holds) << verdict.why;
}

TEST_P(Sinks, SentWrongAreRefusedAndCommitNothing) {
  const History history(/*seed=*/4);
  const v1::Handle handle = Fill(history, 0);
  const Rows q = Random(kQHeads, 10);
  const auto refusal = [&](int layer, std::vector<float> sinks) {
    v1::DecodeRequest request = Ask(handle, layer, layer == 0 ? kTokens : 0, q, 1);
    request.set_k(Bytes(Random(kKvHeads, 11)));
    request.set_v(Bytes(Random(kKvHeads, 12)));
    request.mutable_sink_logits()->Add(sinks.begin(), sinks.end());
    v1::DecodeResponse reply;
    const grpc::Status status = Decode(stub_.get(), request, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    return status.error_message();
  };
  EXPECT_THAT(refusal(0, {}), HasSubstr("sink_logits has 0 entries"));
  EXPECT_THAT(refusal(0, {}), HasSubstr("wants 6 (one for each query head); send them"));
  EXPECT_THAT(refusal(0, {1.0F, 2.0F}), HasSubstr("sink_logits has 2 entries"));
  EXPECT_THAT(refusal(2, kSinks), HasSubstr("has no sinks; leave them out"));
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    std::vector<float> sinks = kSinks;
    sinks[4] = bad;
    EXPECT_THAT(refusal(0, sinks), HasSubstr("sink_logits[4] is not finite; send finite"));
  }
  grpc::ClientContext context;
  v1::StatSequencesRequest stat;
  *stat.add_handles() = handle;
  v1::StatSequencesResponse found;
  ASSERT_TRUE(stub_->StatSequences(&context, stat, &found).ok());
  EXPECT_THAT(found.sequences(0).seq_lens(), ::testing::ElementsAre(kTokens, 0, 0));
}

INSTANTIATE_TEST_SUITE_P(In, Sinks, ::testing::Values("bf16", "fp8_kv"),
                         [](const auto& precision) { return std::string(precision.param); });

}  // namespace
}  // namespace fp8kvd::testing
