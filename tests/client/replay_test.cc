// The verdict of a replay, against a server that answers with the captured output times a factor: a
// contract that a wrong answer passes would be none. The real daemon is replayed in tests/e2e_py.
#include "client/cc/ctl/replay.h"

#include <limits>
#include <sstream>

#include "gmock/gmock.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

#include "client/cc/ctl/commands.h"
#include "fp8kvd/v1/kv.grpc.pb.h"

namespace fp8kvd::ctl {
namespace {

using testing::HasSubstr;

const char kCapture[] = "tests/data/captures/smollm2_text_a_layer16.safetensors";

class CaptureServer final : public v1::DecodeAttention::Service {
 public:
  CaptureServer(v1::Precision precision, float factor)
      : precision_(precision), factor_(factor), capture_(ReadCapture(kCapture).value()) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }
  uint64_t tokens() const { return tokens_; }
  int chunks() const { return chunks_; }
  int freed() const { return freed_; }

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    v1::ModelInfo* model = response->add_models();
    model->set_name("smol");
    model->set_layers(1);
    model->set_q_heads(9);
    model->set_kv_heads(3);
    model->set_head_dim(64);
    model->set_sm_scale(0.125F);
    model->add_groups()->add_layers(0);
    model->mutable_groups(0)->set_precision(precision_);
    return {};
  }
  grpc::Status CreateSequences(grpc::ServerContext*, const v1::CreateSequencesRequest*,
                               v1::CreateSequencesResponse* response) override {
    response->add_handles();
    response->set_ttl_ms(60'000);
    return {};
  }
  grpc::Status Append(grpc::ServerContext*, grpc::ServerReader<v1::AppendRequest>* reader,
                      v1::AppendResponse*) override {
    v1::AppendRequest chunk;
    for (; reader->Read(&chunk); ++chunks_) tokens_ += chunk.n();
    return {};
  }
  grpc::Status Decode(grpc::ServerContext*, const v1::DecodeRequest* request,
                      v1::DecodeResponse* response) override {
    if (!request->k().empty()) ++tokens_;
    const size_t row = 9 * 64;
    const size_t step = request->positions(0) - 1500;
    std::vector<float> out(capture_.out.begin() + static_cast<int64_t>(step * row),
                           capture_.out.begin() + static_cast<int64_t>((step + 1) * row));
    for (float& x : out) x *= factor_;
    response->set_out(out.data(), out.size() * sizeof(float));
    return {};
  }
  grpc::Status StatSequences(grpc::ServerContext*, const v1::StatSequencesRequest*,
                             v1::StatSequencesResponse* response) override {
    response->add_sequences()->set_bytes(12'345);
    return {};
  }
  grpc::Status FreeSequences(grpc::ServerContext*, const v1::FreeSequencesRequest*,
                             v1::FreeSequencesResponse*) override {
    ++freed_;
    return {};
  }

 private:
  const v1::Precision precision_;
  const float factor_;
  const Capture capture_;
  int port_ = 0;
  uint64_t tokens_ = 0;
  int chunks_ = 0;
  int freed_ = 0;
  std::unique_ptr<grpc::Server> server_;  // last: destroyed first, while the rest still lives
};

struct Verdict {
  int exit_code = 0;
  std::string out;
};

Verdict ReplayAgainst(CaptureServer& server) {
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunCommandLine({"replay", "--target", server.target(), kCapture}, out, err);
  return {exit_code, out.str() + err.str()};
}

TEST(Replay, SendsEveryTokenOnceInSeveralChunksAndFrees) {
  CaptureServer server(v1::PRECISION_BF16, 1.0F);
  const Verdict verdict = ReplayAgainst(server);
  EXPECT_EQ(verdict.exit_code, kExitOk) << verdict.out;
  EXPECT_THAT(verdict.out, HasSubstr("accuracy contract held: 1 of 1"));
  EXPECT_EQ(server.tokens(), 1532U);
  EXPECT_GT(server.chunks(), 2);
  EXPECT_EQ(server.freed(), 1);
}

TEST(Replay, ABf16OutputThatIsOffByAHalfPercentBreaksTheContract) {
  CaptureServer server(v1::PRECISION_BF16, 1.005F);
  const Verdict verdict = ReplayAgainst(server);
  EXPECT_EQ(verdict.exit_code, kExitFailed);
  EXPECT_THAT(verdict.out, HasSubstr("accuracy contract BROKEN: 0 of 1"));
}

// The format's known error is 0.047971 here: too little is as wrong as too much.
TEST(Replay, AnFp8OutputMustBeAsFarOffAsTheFormatMakesIt) {
  for (const auto& [factor, exit_code] :
       {std::pair{1.0F, kExitFailed}, std::pair{1.047971F, kExitOk},
        std::pair{1.0465F, kExitFailed}, std::pair{1.0495F, kExitFailed}}) {
    CaptureServer server(v1::PRECISION_FP8_KV, factor);
    const Verdict verdict = ReplayAgainst(server);
    EXPECT_EQ(verdict.exit_code, exit_code) << factor << '\n' << verdict.out;
  }
}

TEST(Replay, AnOutputThatIsNotFiniteBreaksTheContract) {
  CaptureServer server(v1::PRECISION_BF16, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(ReplayAgainst(server).exit_code, kExitFailed);
}

TEST(Replay, ADaemonWithoutTheShapeIsToldFromABrokenOne) {
  const Capture capture = ReadCapture(kCapture).value();
  client::ServerInfo info;
  info.models.push_back({.name = "other", .q_heads = 9, .kv_heads = 3, .head_dim = 128});
  const absl::Status status =
      FindTargets(info, capture, "", client::Precision::kUnspecified).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("9 q_heads, 3 kv_heads, head_dim 64"));
}

TEST(RelativeL2, IsWorkedByHand) {
  EXPECT_DOUBLE_EQ(RelativeL2({3.0F, 5.0F}, {3.0F, 4.0F}), 0.2);
  EXPECT_EQ(RelativeL2({1.0F}, {1.0F, 2.0F}), std::numeric_limits<double>::infinity());
  EXPECT_EQ(RelativeL2({NAN}, {1.0F}), std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace fp8kvd::ctl
