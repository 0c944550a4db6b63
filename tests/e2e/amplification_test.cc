// Known fault: tiny messages amplify work more than 10x. Each message here is small and declares,
// or unpacks to, much more. The daemon answers with the documented code, holds nothing, takes no
// memory to speak of, and replies in proportion.
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/e2e/calls.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/http_get.h"

namespace fp8kvd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using Stub = v1::DecodeAttention::Stub;

constexpr int kItemsMax = 1024;
// Of growth; what is declared is far more. Address sanitizer keeps 256 MiB of what was freed.
#if defined(__has_feature)
constexpr int64_t kMemoryKibMax = (__has_feature(address_sanitizer) ? 16 + 256 : 16) << 10;
#else
constexpr int64_t kMemoryKibMax = 16 << 10;
#endif
constexpr int64_t kReplyFactor = 10;
constexpr int64_t kReplyBytesMin = 64 << 10;

// The most memory that the process ever had, KiB.
int64_t PeakKib(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  std::string word;
  int64_t kib = 0;
  while (status >> word) {
    if (word == "VmHWM:") status >> kib;
  }
  EXPECT_GT(kib, 0);
  return kib;
}

struct Answer {
  grpc::Status status;
  std::string item_error;  // of the first item that failed, if any
  int item_code = 0;
  int64_t request_bytes = 0;
  int64_t reply_bytes = 0;
};

template <typename Request, typename Response>
Answer Send(Stub* stub,
            grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
            const Request& request, grpc_compression_algorithm compression = GRPC_COMPRESS_NONE) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  context.set_compression_algorithm(compression);
  Response response;
  Answer answer;
  answer.status = (stub->*method)(&context, request, &response);
  answer.request_bytes = static_cast<int64_t>(request.ByteSizeLong());
  answer.reply_bytes = static_cast<int64_t>(response.ByteSizeLong());
  if constexpr (requires { response.item_errors(); }) {
    if (response.item_errors_size() > 0) {
      answer.item_error = response.item_errors(0).error().message();
      answer.item_code = response.item_errors(0).error().code();
      for (const auto& error : response.item_errors()) {
        EXPECT_EQ(error.error().code(), answer.item_code);
        EXPECT_FALSE(error.error().message().empty());
      }
    }
  }
  return answer;
}

struct Small {
  const char* name;
  std::function<Answer(Stub*)> send;
  StatusCode code;  // OK: each item fails, with NOT_FOUND
  const char* text;
};

template <typename Fill>
auto DecodeOf(Fill fill) {
  return [fill](Stub* stub) {
    v1::DecodeRequest request;
    request.set_model("m");
    fill(&request);
    return Send(stub, &Stub::Decode, request);
  };
}

template <typename Fill>
auto AppendOf(Fill fill) {
  return [fill](Stub* stub) {
    v1::AppendRequest request;
    request.set_model("m");
    *request.mutable_handle() = v1::Handle();
    fill(&request);
    grpc::ClientContext context;
    v1::AppendResponse response;
    Answer answer;
    answer.request_bytes = static_cast<int64_t>(request.ByteSizeLong());
    const auto writer = stub->Append(&context, &response);
    writer->Write(request);
    writer->WritesDone();
    answer.status = writer->Finish();
    answer.reply_bytes = static_cast<int64_t>(response.ByteSizeLong());
    return answer;
  };
}

template <typename Request, typename Response>
auto Handles(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
             int count) {
  return [method, count](Stub* stub) {
    Request request;
    for (int i = 0; i < count; ++i) request.add_handles();  // two bytes each
    return Send(stub, method, request);
  };
}

Answer Create(Stub* stub, uint32_t count, uint64_t expected_tokens) {
  v1::CreateSequencesRequest request;
  request.set_model("m");
  request.set_count(count);
  request.set_expected_tokens(expected_tokens);
  return Send(stub, &Stub::CreateSequences, request);
}

Answer Plan(Stub* stub, const std::string& hf_config) {
  v1::PlanPrecisionRequest request;
  request.set_hf_config_json(hf_config);
  request.set_batch(1);
  request.set_tokens(1);
  return Send(stub, &Stub::PlanPrecision, request);
}

class SmallMessages : public ::testing::TestWithParam<Small> {
 protected:
  static void SetUpTestSuite() { daemon = new Daemon(); }
  static void TearDownTestSuite() {
    EXPECT_EQ(daemon->Stop(), 0) << daemon->log();
    delete daemon;
  }
  static Daemon* daemon;
};
Daemon* SmallMessages::daemon = nullptr;

TEST_P(SmallMessages, AreAnsweredInProportionAndHoldNothing) {
  const auto stub = Connect(daemon->address());
  // What a first call of any kind takes is not the message's.
  v1::DecodeResponse ignored;
  static_cast<void>(Decode(stub.get(), v1::DecodeRequest(), &ignored));
  const int64_t before = PeakKib(daemon->process().pid());
  const Answer answer = GetParam().send(stub.get());
  EXPECT_EQ(answer.status.error_code(), GetParam().code) << answer.status.error_message();
  if (answer.status.ok()) {
    EXPECT_EQ(answer.item_code, StatusCode::NOT_FOUND);
    EXPECT_THAT(answer.item_error, HasSubstr(GetParam().text));
  } else {
    EXPECT_THAT(answer.status.error_message(), HasSubstr(GetParam().text));
  }
  EXPECT_LE(answer.reply_bytes, kReplyFactor * answer.request_bytes + kReplyBytesMin);
  EXPECT_LE(PeakKib(daemon->process().pid()) - before, kMemoryKibMax);
  EXPECT_THAT(HttpGet(daemon->http_port(), "/metrics"),
              HasSubstr("fp8kvd_staging_slots{state=\"used\"} 0\n"));
}

const Small kRows[] = {
    Small{"DecodeOfManyQueriesWithoutThem", DecodeOf([](auto* r) {
            for (int i = 0; i < kItemsMax; ++i) {
              r->add_handles();
              r->add_positions(0);
              r->add_q_lens(64);
            }
          }),
          StatusCode::INVALID_ARGUMENT, "q holds 0 bytes, this request wants 33554432"},
    Small{"DecodeOfMoreItemsThanAllowed", DecodeOf([](auto* r) {
            for (int i = 0; i < 500'000; ++i) r->add_handles();
          }),
          StatusCode::INVALID_ARGUMENT, "handles has 500000 entries, a call takes 1 to 1024"},
    Small{"DecodeOfMorePositionsThanItems", DecodeOf([](auto* r) {
            r->add_handles();
            for (int i = 0; i < 1'000'000; ++i) r->add_positions(0);
          }),
          StatusCode::INVALID_ARGUMENT, "positions has 1000000 entries for 1 handles"},
    Small{"DecodeOfAHugeQLen", DecodeOf([](auto* r) {
            r->add_handles();
            r->add_positions(0);
            r->add_q_lens(UINT32_MAX);
          }),
          StatusCode::INVALID_ARGUMENT, "q_lens is 4294967295"},
    Small{"DecodeOfManyUnknownSequences", DecodeOf([](auto* r) {
            for (int i = 0; i < kItemsMax; ++i) {
              r->add_handles()->set_seq_id(1'000'000 + i);
              r->add_positions(0);
            }
            r->set_q(std::string(int64_t{kItemsMax} * kQRowBytes, '\0'));
          }),
          StatusCode::OK, "no sequence has this handle"},
    Small{"AppendOfManyTokensWithoutThem", AppendOf([](auto* r) {
            r->set_layers_count(2);
            r->set_n(131'072);
          }),
          StatusCode::INVALID_ARGUMENT, "k holds 0 bytes, this request wants 67108864"},
    Small{"AppendOfTokensThatOverflow", AppendOf([](auto* r) {
            r->set_layers_count(UINT32_MAX);
            r->set_n(UINT32_MAX);
          }),
          StatusCode::INVALID_ARGUMENT, "layers_count is 4294967295"}};

const Small kOthers[] = {
    Small{"CreateOfMany", [](Stub* stub) { return Create(stub, UINT32_MAX, 0); },
          StatusCode::INVALID_ARGUMENT, "count is 4294967295, at most 1024"},
    Small{"CreateOfLong", [](Stub* stub) { return Create(stub, kItemsMax, 131'072); },
          StatusCode::RESOURCE_EXHAUSTED, "reserve"},
    Small{"FreeOfManyNobodies", Handles(&Stub::FreeSequences, kItemsMax), StatusCode::OK,
          "no sequence has this handle"},
    Small{"RenewOfManyNobodies", Handles(&Stub::RenewSequences, kItemsMax), StatusCode::OK,
          "no sequence has this handle"},
    Small{"StatOfManyNobodies", Handles(&Stub::StatSequences, kItemsMax), StatusCode::OK,
          "no sequence has this handle"},
    Small{"FreeOfMoreThanAllowed", Handles(&Stub::FreeSequences, 65'000),
          StatusCode::INVALID_ARGUMENT, "handles has 65000 entries, a call takes 1 to 1024"},
    Small{"PlanOfADeepConfiguration",
          [](Stub* stub) { return Plan(stub, std::string(1 << 20, '[')); },
          StatusCode::INVALID_ARGUMENT, "hf_config_json: "},
    Small{"PlanOfMoreLayersThanThereAre",
          [](Stub* stub) {
            return Plan(stub,
                        R"({"model_type": "llama", "num_hidden_layers": 2000000000,
                                "num_attention_heads": 8, "hidden_size": 512})");
          },
          StatusCode::INVALID_ARGUMENT, "num_hidden_layers"},
    Small{"MeasureOfRowsWithoutThem",
          [](Stub* stub) {
            v1::MeasureKvErrorRequest request;
            request.set_kv_heads(256);
            request.set_head_dim(256);
            request.set_k("x");
            return Send(stub, &Stub::MeasureKvError, request);
          },
          StatusCode::INVALID_ARGUMENT, "a multiple of 131072"},
    // 128 MiB of zeros, in an eighth of one.
    Small{"ACompressedMessage",
          [](Stub* stub) {
            v1::DecodeRequest request;
            request.set_q(std::string(128 << 20, '\0'));
            Answer answer = Send(stub, &Stub::Decode, request, GRPC_COMPRESS_GZIP);
            answer.request_bytes = 128 << 10;
            return answer;
          },
          StatusCode::UNIMPLEMENTED, "'gzip' is disabled"}};

std::string NameOf(const ::testing::TestParamInfo<Small>& message) { return message.param.name; }

INSTANTIATE_TEST_SUITE_P(OfRows, SmallMessages, ::testing::ValuesIn(kRows), NameOf);
INSTANTIATE_TEST_SUITE_P(WithoutRows, SmallMessages, ::testing::ValuesIn(kOthers), NameOf);

// Each empty message is answered with a text; a client that does not read them gets no more than
// its own window's worth.
TEST(ManySmallMessages, OnAStreamThatIsNotReadHoldNothing) {
  Daemon daemon;
  const auto stub = Connect(daemon.address());
  grpc::ClientContext context;
  const auto stream = stub->DecodeStream(&context);
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Write(v1::DecodeRequest()));
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.error().code(), StatusCode::INVALID_ARGUMENT);
  const int64_t before = PeakKib(daemon.process().pid());
  constexpr int kMessages = 20'000;
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) ASSERT_TRUE(stream->Write(v1::DecodeRequest()));
    stream->WritesDone();
  });
  v1::DecodeResponse beside;  // others are served meanwhile
  const std::vector<v1::Handle> handles = testing::Create(stub.get(), 1);
  EXPECT_TRUE(Decode(stub.get(), StepOf(handles, 0, 0, 0x4000), &beside).ok());
  EXPECT_LE(PeakKib(daemon.process().pid()) - before, kMemoryKibMax);
  int replies = 0;
  while (stream->Read(&reply)) ++replies;
  writer.join();
  EXPECT_EQ(replies, kMessages);
  EXPECT_LE(PeakKib(daemon.process().pid()) - before, kMemoryKibMax);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
}

}  // namespace
}  // namespace fp8kvd::testing
