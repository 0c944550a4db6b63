// More of bad_requests_test.cc: what is wrong only with a window, a full pool or a stale handle
// among others; bytes that are no message; and that tests/data/bad_fields.txt names a test for
// every field of every request.
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"

#include "server/rpc/services.h"
#include "tests/rpc/bad_calls.h"

namespace fp8kvd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

// Model w: windows of 32 tokens and 16 of slack.
template <typename Spoil>
auto AppendToWindow(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext*) {
    v1::AppendRequest request = world.rig.Chunk(world.other, 100, Ids(4, 2000), 0, "w");
    request.set_skip_to(100);
    spoil(&request);
    return world.rig.Append({request});
  };
}

template <typename Spoil>
auto List(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext* context) {
    v1::ListSequencesRequest request;
    request.set_model("m");
    spoil(&request);
    v1::ListSequencesResponse response;
    return world.rig.stub->ListSequences(context, request, &response);
  };
}

const BadCall kDecodes[] = {
    {"LayerOverflows", Decode([](auto* r) { r->set_layer(UINT32_MAX); }), kInvalid,
     "layer is 4294967295"},
    {"HandlesTooMany", Decode([](auto* r) {
       for (int i = 0; i < 1023; ++i) r->add_handles();
     }),
     kInvalid, "handles has 1025 entries, a call takes 1 to 1024"},
    {"PositionsMissing", Decode([](auto* r) { r->clear_positions(); }), kInvalid,
     "positions has 0 entries for 2 handles"},
    {"QLensZero", Decode([](auto* r) {
       r->add_q_lens(1);
       r->add_q_lens(0);
     }),
     kInvalid, "item 1: q_lens is 0, an item has 1 to 64"},
    {"QLensTooMany", Decode([](auto* r) {
       r->add_q_lens(65);
       r->add_q_lens(1);
     }),
     kInvalid, "item 0: q_lens is 65"},
    {"QLensOverflow", Decode([](auto* r) {
       r->add_q_lens(UINT32_MAX);
       r->add_q_lens(UINT32_MAX);
     }),
     kInvalid, "item 0: q_lens is 4294967295"},
    {"QMissing", Decode([](auto* r) { r->clear_q(); }), kInvalid, "q holds 0 bytes"},
    {"QTooLong", Decode([](auto* r) { r->mutable_q()->append(16, '\0'); }), kInvalid,
     "q holds 48 bytes, this request wants 32"},
    {"KMissing", Decode([](auto* r) { r->clear_k(); }), kInvalid, "k holds 0 bytes"},
    {"VTooLong", Decode([](auto* r) { r->mutable_v()->append(8, '\0'); }), kInvalid,
     "v holds 24 bytes, this request wants 16"},
    {"OutTypeNegative", Decode([](auto* r) { r->set_out_type(static_cast<v1::OutType>(-1)); }),
     kInvalid, "out_type is -1"},
    {"ReplyTooLarge", Decode([](auto* r) {  // twice what is sent, and the limit is 1 MiB
       r->Clear();
       r->set_model("m");
       for (int i = 0; i < 625; ++i) {
         r->add_handles();
         r->add_positions(0);
         r->add_q_lens(64);
       }
       r->set_q(std::string(int64_t{625} * 64 * 16, '\0'));
       r->set_out_type(v1::OUT_TYPE_FP32);
     }),
     kInvalid, "out and lse would hold 1280000 bytes"}};

const BadCall kAppends[] = {
    {"ModelMissing", Append([](auto* r) { r->clear_model(); }), kInvalid, "model is empty"},
    {"HandleUnknown", Append([](auto* r) { r->mutable_handle()->set_seq_id(1234567); }),
     StatusCode::NOT_FOUND, "no sequence has this handle"},
    {"HandleEmpty", Append([](auto* r) { r->mutable_handle()->Clear(); }), StatusCode::NOT_FOUND,
     "no sequence has this handle"},
    {"HandleOfAnotherRun", Append([](auto* r) { r->mutable_handle()->set_incarnation(8); }),
     StatusCode::NOT_FOUND, "no sequence has this handle"},
    {"HandleOfAnotherHome", Append([](auto* r) { r->mutable_handle()->set_home(3); }),
     StatusCode::NOT_FOUND, "no sequence has this handle"},
    {"LayerOverflows", Append([](auto* r) { r->set_layer(UINT32_MAX); }), kInvalid,
     "layer is 4294967295"},
    {"LayersCountOverflows", Append([](auto* r) { r->set_layers_count(UINT32_MAX); }), kInvalid,
     "layers_count is 4294967295, from layer 0"},
    {"LayersCountWithoutTheirRows", Append([](auto* r) { r->set_layers_count(2); }), kInvalid,
     "k holds 32 bytes, this request wants 64 (2 layers x 4 tokens"},
    {"NZero", Append([](auto* r) { r->set_n(0); }), kInvalid, "n is 0, a chunk has at least 1"},
    {"KMissing", Append([](auto* r) { r->clear_k(); }), kInvalid, "k holds 0 bytes"},
    {"VMissing", Append([](auto* r) { r->clear_v(); }), kInvalid, "v holds 0 bytes"},
    {"VTooLarge", Append([](auto* r) { SetBf16(r->mutable_v(), 5, 0xCD80); }), kInvalid,
     "layer 0: v[1, 0, 1] is -2.68435e+08"},
    {"SkipToIsNotPos", AppendToWindow([](auto* r) { r->set_skip_to(99); }), kInvalid,
     "skip_to is 99 and pos 100, they must be equal"},
    {"SkipToOverflows", AppendToWindow([](auto* r) { r->set_skip_to(~uint64_t{0}); }), kInvalid,
     "skip_to 18446744073709551615 pass the longest sequence"},
    {"LayerTooFarAhead", AppendToWindow([](auto* r) {
       r->set_pos(0);
       r->set_skip_to(0);
       r->set_n(49);
       r->set_k(std::string(49 * 8, '\1'));
       r->set_v(std::string(49 * 8, '\1'));
     }),
     StatusCode::FAILED_PRECONDITION, "layer 1"}};

const BadCall kControls[] = {
    {"CreateModelMissing", Create([](auto* r) { r->clear_model(); }), kInvalid, "model is empty"},
    {"CreateExpectedTokensBeyondASequence", Create([](auto* r) { r->set_expected_tokens(4097); }),
     kInvalid, "expected_tokens is 4097, at most 4096"},
    {"ForkParentFreed",
     [](World& world, grpc::ClientContext* context) {
       v1::ForkSequencesRequest request;
       *request.mutable_parent() = world.freed;
       v1::ForkSequencesResponse response;
       return world.rig.stub->ForkSequences(context, request, &response);
     },
     StatusCode::NOT_FOUND, "no sequence has this handle"},
    {"ForkParentOfAnotherHome", Fork([](auto* r) { r->mutable_parent()->set_home(1); }),
     StatusCode::NOT_FOUND, "no sequence has this handle"},
    {"ForkPoolFull", Fork([](auto* r) {
       r->set_count(40);
       r->set_expected_tokens(4096);
     }),
     StatusCode::RESOURCE_EXHAUSTED, "pages to reserve"},
    {"ForkSequencesFull", Fork([](auto* r) { r->set_count(100); }), StatusCode::RESOURCE_EXHAUSTED,
     "100 sequences asked"},
    {"TruncateHandlesTooMany", Truncate([](auto* r) {
       for (int i = 0; i < 1024; ++i) r->add_handles();
     }),
     kInvalid, "handles has 1025 entries"},
    {"TruncateSeqLensTooMany", Truncate([](auto* r) { r->add_seq_lens(3); }), kInvalid,
     "seq_lens has 2 entries for 1 handles"},
    {"RenewTooMany", Handles(&Stub::RenewSequences, 1025), kInvalid, "handles has 1025 entries"},
    {"StatHandles", Handles(&Stub::StatSequences, 0), kInvalid, "handles has 0 entries"},
    {"ListPageTokenOverflows", List([](auto* r) { r->set_page_token("99999999999999999999999"); }),
     kInvalid, "page_token"},
    {"ListPageTokenOfAnotherModel", List([](auto* r) { r->set_page_token("4294967297"); }),
     kInvalid, "the page token is not one that this server gave for this model"},
    {"ListPageTokenBeyondTheSequences", List([](auto* r) { r->set_page_token("4000000000"); }),
     kInvalid, "the page token is not one"}};

const BadCall kAdvices[] = {
    {"PlanSubjectMissing", Plan([](auto* r) { r->clear_model(); }), kInvalid, "model is empty"},
    {"PlanHfConfigOfWhatCannotBeServed", Plan([](auto* r) {
       r->set_hf_config_json(R"({"model_type": "deepseek_v3", "kv_lora_rank": 512})");
       r->set_batch(1);
       r->set_tokens(1);
     }),
     kInvalid, "MLA"},
    {"PlanRpcUsNegative", Plan([](auto* r) { r->set_rpc_us(-1); }), kInvalid,
     "rpc_us is -1, allowed are 0 to 1e+06"},
    {"PlanRpcUsNan", Plan([](auto* r) { r->set_rpc_us(std::nan("")); }), kInvalid, "rpc_us is nan"},
    {"MeasureKvHeadsTooMany", Measure([](auto* r) { r->set_kv_heads(257); }), kInvalid,
     "kv_heads is 257, allowed are 1 to 256"},
    {"MeasureHeadDimOverflows", Measure([](auto* r) { r->set_head_dim(UINT32_MAX); }), kInvalid,
     "head_dim is 4294967295"},
    {"MeasureKPartOfAToken", Measure([](auto* r) { r->set_kv_heads(3); }), kInvalid,
     "a multiple of 384"},
    {"MeasureKInfinite", Measure([](auto* r) { SetBf16(r->mutable_k(), 9, 0x7F80); }), kInvalid,
     "k: element 9 is inf"},
    {"MeasureVMissing", Measure([](auto* r) { r->clear_v(); }), kInvalid, "v 0, they must be"}};

INSTANTIATE_TEST_SUITE_P(MoreDecode, BadCalls, ::testing::ValuesIn(kDecodes), NameOf);
INSTANTIATE_TEST_SUITE_P(MoreAppend, BadCalls, ::testing::ValuesIn(kAppends), NameOf);
INSTANTIATE_TEST_SUITE_P(MoreControl, BadCalls, ::testing::ValuesIn(kControls), NameOf);
INSTANTIATE_TEST_SUITE_P(MoreAdvice, BadCalls, ::testing::ValuesIn(kAdvices), NameOf);

// One handle of three ---------------------------------------------------------------------------

struct BadHandle {
  const char* name;
  std::function<void(const World&, v1::Handle*)> spoil;
};

class OneBadHandle : public ::testing::TestWithParam<BadHandle> {
 protected:
  // Sends it between two good ones, and wants it alone to fail.
  template <typename Request, typename Response>
  void ExpectFailsAlone(World& world,
                        grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                     Response*),
                        Request request) {
    for (const v1::Handle& handle : {world.good[0], world.bad, world.good[1]}) {
      *request.add_handles() = handle;
    }
    GetParam().spoil(world, request.mutable_handles(1));
    grpc::ClientContext context;
    Response response;
    const grpc::Status status = (world.rig.stub.get()->*method)(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(response.item_errors_size(), 1);
    EXPECT_EQ(response.item_errors(0).index(), 1U);
    const v1::Error& error = response.item_errors(0).error();
    ExpectRefusal(error.code(), error.message(), StatusCode::NOT_FOUND, "");
    if constexpr (requires { response.sequences(); }) {
      ASSERT_EQ(response.sequences_size(), 3);
      EXPECT_EQ(response.sequences(0).seq_lens(0), 10U);
      EXPECT_EQ(response.sequences(1).ByteSizeLong(), 0U);
      EXPECT_EQ(response.sequences(2).seq_lens(0), 10U);
    }
  }
};

TEST_P(OneBadHandle, FailsAloneInEveryRpcThatTakesSeveral) {
  World world;
  ExpectFailsAlone(world, &Stub::RenewSequences, v1::RenewSequencesRequest());
  ExpectFailsAlone(world, &Stub::StatSequences, v1::StatSequencesRequest());
  v1::TruncateSequencesRequest truncate;
  for (int i = 0; i < 3; ++i) truncate.add_seq_lens(10);
  ExpectFailsAlone(world, &Stub::TruncateSequences, truncate);
  const int64_t pages = world.rig.PagesUsed();
  ExpectFailsAlone(world, &Stub::FreeSequences, v1::FreeSequencesRequest());
  EXPECT_EQ(world.rig.PagesUsed(), pages - 2);  // the two good ones, and nobody else's
}

INSTANTIATE_TEST_SUITE_P(
    Control, OneBadHandle,
    ::testing::Values(
        BadHandle{"Unknown", [](const World&, auto* h) { h->set_seq_id(1234567); }},
        BadHandle{"Empty", [](const World&, auto* h) { h->Clear(); }},
        BadHandle{"Freed", [](const World& w, auto* h) { *h = w.freed; }},
        BadHandle{"OfAnotherGeneration",
                  [](const World& w, auto* h) { h->set_generation(w.bad.generation() + 1); }},
        BadHandle{"OfAnotherRun", [](const World&, auto* h) { h->set_incarnation(8); }},
        BadHandle{"OfAnotherHome", [](const World&, auto* h) { h->set_home(1); }}),
    [](const auto& bad) { return std::string(bad.param.name); });

// Full pools, windows, limits -------------------------------------------------------------------

TEST(Decode, AnItemThatFindsNoPageFailsAlone) {
  ServerRigOptions options;
  options.models[0].pages = 2;
  ServerRig rig(options);
  const std::vector<v1::Handle> handles = rig.Create(3);
  for (const int i : {0, 2}) {
    ASSERT_TRUE(rig.Append({rig.Chunk(handles[i], 0, Ids(10, 1000), 0)}).ok());
  }
  v1::DecodeRequest request = rig.Step(handles, 10, {71, 72, 73});
  request.set_positions(1, 0);
  v1::DecodeResponse response;
  ASSERT_TRUE(rig.Decode(request, &response).ok());
  ASSERT_EQ(response.item_errors_size(), 1);
  const v1::Error& error = response.item_errors(0).error();
  ExpectRefusal(error.code(), error.message(), StatusCode::RESOURCE_EXHAUSTED, "page");
  EXPECT_GT(error.retry_after_ms(), 0U);
  std::vector<uint64_t> history = Ids(10, 1000);
  history.push_back(73);
  EXPECT_TRUE(rig.IsAnswer(response, 2, 500073, history));
}

// In model w, 200 tokens in both layers: those from 128 on are left, 48 and the rest of a page.
class Window : public ::testing::Test {
 protected:
  Window() {
    for (uint64_t pos = 0; pos < 200; pos += 20) {
      for (const int layer : {0, 1}) {
        EXPECT_TRUE(
            world_.rig.Append({world_.rig.Chunk(world_.other, pos, Ids(20, pos), layer, "w")})
                .ok());
      }
    }
  }
  World world_;
};

TEST_F(Window, AQueryOfWhatItHasDroppedNamesTheLowestPositionPossible) {
  v1::DecodeRequest request = world_.rig.Step({world_.other}, 40, {1});
  request.set_model("w");
  request.clear_k();
  request.clear_v();
  v1::DecodeResponse response;
  ASSERT_TRUE(world_.rig.Decode(request, &response).ok());
  ASSERT_EQ(response.item_errors_size(), 1);
  const v1::Error& error = response.item_errors(0).error();
  ExpectRefusal(error.code(), error.message(), StatusCode::FAILED_PRECONDITION, "159");
}

TEST_F(Window, ATruncationBelowWhatItHasKeptNamesTheLowestPossible) {
  v1::TruncateSequencesRequest request;
  *request.add_handles() = world_.other;
  request.add_seq_lens(20);
  *request.add_handles() = world_.good[0];
  request.add_seq_lens(4);
  grpc::ClientContext context;
  v1::TruncateSequencesResponse response;
  ASSERT_TRUE(world_.rig.stub->TruncateSequences(&context, request, &response).ok());
  ASSERT_EQ(response.item_errors_size(), 1);
  EXPECT_EQ(response.item_errors(0).index(), 0U);
  const v1::Error& error = response.item_errors(0).error();
  ExpectRefusal(error.code(), error.message(), StatusCode::FAILED_PRECONDITION, "possible is 128");
}

TEST(List, APageSizeBeyondTheLimitMeansTheLimit) {
  World world;
  for (const uint32_t page_size : {0U, UINT32_MAX}) {
    grpc::ClientContext context;
    v1::ListSequencesRequest request;
    request.set_page_size(page_size);
    v1::ListSequencesResponse response;
    ASSERT_TRUE(world.rig.stub->ListSequences(&context, request, &response).ok());
    EXPECT_EQ(response.sequences_size(), 4);
  }
}

TEST(Plan, AConfigurationBeyondTheLimitIsRefused) {
  ServerRigOptions options;
  options.server.message_bytes_max = 4 << 20;
  ServerRig rig(options);
  grpc::ClientContext context;
  v1::PlanPrecisionRequest request;
  request.set_hf_config_json(std::string((1 << 20) + 1, ' '));
  v1::PlanPrecisionResponse response;
  const grpc::Status status = rig.stub->PlanPrecision(&context, request, &response);
  ExpectRefusal(status.error_code(), status.error_message(), kInvalid,
                "hf_config_json has 1048577 bytes, at most 1048576");
}

// Bytes that are no message ---------------------------------------------------------------------

TEST(Bytes, ThatAreNoMessageAreRefusedByEveryUnaryRpc) {
  ServerRig rig;
  grpc::GenericStub stub(rig.Channel());
  const google::protobuf::ServiceDescriptor* const service =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(rpc::Services::kName);
  int refused = 0;
  for (int i = 0; i < service->method_count(); ++i) {
    const google::protobuf::MethodDescriptor* const method = service->method(i);
    if (method->client_streaming() || method->name() == "OpenSharedMemory") continue;
    for (const std::string bytes : {"\xFF\xFF\xFF\xFF\xFF", "\x0A\x7F", "\x07"}) {
      grpc::Slice slice(bytes);
      const grpc::ByteBuffer message(&slice, 1);
      grpc::ClientContext context;
      grpc::CompletionQueue queue;
      grpc::ByteBuffer reply;
      grpc::Status status;
      const auto call = stub.PrepareUnaryCall(
          &context, std::string("/") + rpc::Services::kName + "/" + method->name(), message,
          &queue);
      call->StartCall();
      call->Finish(&reply, &status, nullptr);
      void* tag = nullptr;
      bool ok = false;
      ASSERT_TRUE(queue.Next(&tag, &ok));
      ExpectRefusal(status.error_code(), status.error_message(), kInvalid,
                    "no message of this rpc");
      ++refused;
    }
  }
  EXPECT_GE(refused, 11 * 3);
}

TEST(Bytes, ThatAreNoMessageEndAnAppendStream) {
  World world;
  v1::AppendRequest broken = world.rig.Chunk(world.bad, 10, Ids(4, 2000), 0);
  v1::AppendRequest::GetReflection()->MutableUnknownFields(&broken)->AddLengthDelimited(
      v1::AppendRequest::kModelFieldNumber, "\xFF");  // no UTF-8
  const grpc::Status status = world.rig.Append({broken});
  ExpectRefusal(status.error_code(), status.error_message(), kInvalid, "no message of this rpc");
}

// Every field -----------------------------------------------------------------------------------

// tests/data/bad_fields.txt: a field's name -> its test, or "-".
std::map<std::string, std::string> FieldsInTheTable() {
  std::ifstream file("tests/data/bad_fields.txt");
  std::map<std::string, std::string> fields;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string field;
    std::string test;
    std::string why;
    if (!(words >> field >> test) || field[0] == '#') continue;
    EXPECT_TRUE(fields.emplace(field, test).second) << field << " stands there twice";
    EXPECT_TRUE(test != "-" || (words >> why)) << field << " has neither a test nor a reason";
  }
  return fields;
}

void AddFields(const google::protobuf::Descriptor* message, std::set<std::string>* fields) {
  for (int i = 0; i < message->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* const field = message->field(i);
    fields->insert(message->name() + "." + field->name());
    if (field->message_type() != nullptr) AddFields(field->message_type(), fields);
  }
}

std::set<std::string> FieldsOfRequests() {
  std::set<std::string> fields;
  const google::protobuf::ServiceDescriptor* const service =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(rpc::Services::kName);
  for (int i = 0; i < service->method_count(); ++i) {
    AddFields(service->method(i)->input_type(), &fields);
  }
  return fields;
}

std::set<std::string> TestsOfThisProgram() {
  std::set<std::string> tests;
  const ::testing::UnitTest& program = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *program.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      tests.insert(std::string(suite.name()) + "." + suite.GetTestInfo(j)->name());
    }
  }
  return tests;
}

TEST(BadFields, EveryFieldOfEveryRequestHasATest) {
  const std::map<std::string, std::string> table = FieldsInTheTable();
  const std::set<std::string> tests = TestsOfThisProgram();
  std::set<std::string> in_table;
  for (const auto& [field, test] : table) {
    in_table.insert(field);
    EXPECT_TRUE(test == "-" || tests.contains(test)) << field << ": there is no test " << test;
  }
  EXPECT_EQ(in_table, FieldsOfRequests());
}

}  // namespace
}  // namespace fp8kvd::testing
