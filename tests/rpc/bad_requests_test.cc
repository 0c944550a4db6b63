// Every field of every request, wrong, over a socket: the documented code, a message that says what
// was asked, what is allowed and what to do, the items beside it served, and nothing lost (the rig
// looks at its end). What a message's bytes and shapes can do wrong is in tests/translate too, in
// more cases.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/rpc/bad_calls.h"

namespace fp8kvd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

// One item of three ---------------------------------------------------------------------------

struct BadItem {
  const char* name;
  std::function<void(World&, v1::DecodeRequest*)> spoil;  // item 1
  StatusCode code;
  const char* text;
};

class OneBadItem : public ::testing::TestWithParam<BadItem> {};

TEST_P(OneBadItem, FailsAloneAndTheOthersAreServed) {
  World world;
  ServerRig& rig = world.rig;
  v1::DecodeRequest request = rig.Step({world.good[0], world.bad, world.good[1]}, 10, {71, 72, 73});
  GetParam().spoil(world, &request);
  v1::DecodeResponse response;
  const grpc::Status status = rig.Decode(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.item_errors_size(), 1);
  EXPECT_EQ(response.item_errors(0).index(), 1U);
  const v1::Error& error = response.item_errors(0).error();
  ExpectRefusal(error.code(), error.message(), GetParam().code, GetParam().text);
  std::vector<uint64_t> history = Ids(10, 1000);
  history.push_back(71);
  EXPECT_TRUE(rig.IsAnswer(response, 0, 500071, history));
  history.back() = 73;
  EXPECT_TRUE(rig.IsAnswer(response, 2, 500073, history));
  const int64_t row_bytes = int64_t{rig.geometry().q_heads} * rig.geometry().head_dim * 2;
  EXPECT_EQ(response.out().substr(row_bytes, row_bytes), std::string(row_bytes, '\0'));
  EXPECT_EQ(rig.engine->staging().slots_used(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Decode, OneBadItem,
    ::testing::Values(
        BadItem{"HandleUnknown",
                [](World&, auto* r) { r->mutable_handles(1)->set_seq_id(1234567); },
                StatusCode::NOT_FOUND, ""},
        BadItem{"HandleEmpty", [](World&, auto* r) { r->mutable_handles(1)->Clear(); },
                StatusCode::NOT_FOUND, ""},
        BadItem{"HandleFreed", [](World& w, auto* r) { *r->mutable_handles(1) = w.freed; },
                StatusCode::NOT_FOUND, ""},
        BadItem{"HandleOfAnotherGeneration",
                [](World& w, auto* r) {
                  r->mutable_handles(1)->set_generation(w.bad.generation() + 1);
                },
                StatusCode::NOT_FOUND, ""},
        BadItem{"HandleOfAnotherRun",
                [](World&, auto* r) { r->mutable_handles(1)->set_incarnation(8); },
                StatusCode::NOT_FOUND, ""},
        BadItem{"HandleOfAnotherHome", [](World&, auto* r) { r->mutable_handles(1)->set_home(1); },
                StatusCode::NOT_FOUND, ""},
        BadItem{"HandleOfAnotherModel", [](World& w, auto* r) { *r->mutable_handles(1) = w.other; },
                StatusCode::INVALID_ARGUMENT, "of model w, the call names m"},
        BadItem{"HandleTwice", [](World& w, auto* r) { *r->mutable_handles(1) = w.good[0]; },
                StatusCode::INVALID_ARGUMENT, "item 1: handles names the sequence of item 0 again"},
        BadItem{"PositionGap", [](World&, auto* r) { r->set_positions(1, 11); },
                StatusCode::OUT_OF_RANGE, "10"},
        BadItem{"PositionCommittedWithOtherBytes", [](World&, auto* r) { r->set_positions(1, 0); },
                StatusCode::FAILED_PRECONDITION, ""},
        BadItem{"PositionPastTheLimit", [](World&, auto* r) { r->set_positions(1, 4096); },
                StatusCode::INVALID_ARGUMENT, "item 1: positions is 4096"},
        BadItem{"PositionOverflows", [](World&, auto* r) { r->set_positions(1, ~uint64_t{0}); },
                StatusCode::INVALID_ARGUMENT, "item 1: positions is 18446744073709551615"},
        BadItem{"QNan", [](World&, auto* r) { SetBf16(r->mutable_q(), 8, 0x7FC0); },
                StatusCode::INVALID_ARGUMENT, "item 1: q[0, 0, 0] is NaN"},
        BadItem{"KInfinite", [](World&, auto* r) { SetBf16(r->mutable_k(), 5, 0xFF80); },
                StatusCode::INVALID_ARGUMENT, "item 1: k[0, 0, 1] is -inf"},
        BadItem{"VTooLarge", [](World&, auto* r) { SetBf16(r->mutable_v(), 7, 0x4D80); },
                StatusCode::INVALID_ARGUMENT, "item 1: v[0, 0, 3] is 2.68435e+08"}),
    [](const auto& bad) { return bad.param.name; });

// A duplicate of a committed step: the same bytes are a replay, others are refused.
TEST(Decode, ARepeatedStepIsAReplayAndOtherBytesAreRefused) {
  World world;
  v1::DecodeResponse first;
  v1::DecodeResponse again;
  const v1::DecodeRequest step = world.rig.Step({world.good[0]}, 10, {71});
  ASSERT_TRUE(world.rig.Decode(step, &first).ok());
  ASSERT_TRUE(world.rig.Decode(step, &again).ok());
  EXPECT_EQ(again.item_errors_size(), 0);
  EXPECT_EQ(first.out(), again.out());
  v1::DecodeResponse other;
  ASSERT_TRUE(world.rig.Decode(world.rig.Step({world.good[0]}, 10, {72}), &other).ok());
  ASSERT_EQ(other.item_errors_size(), 1);
  const v1::Error& error = other.item_errors(0).error();
  ExpectRefusal(error.code(), error.message(), StatusCode::ALREADY_EXISTS, "");
}

TEST(Decode, AttendOnlyBeyondTheLengthNamesIt) {
  World world;
  v1::DecodeRequest request = world.rig.Step({world.good[0]}, 10, {1});
  request.clear_k();
  request.clear_v();
  v1::DecodeResponse response;
  ASSERT_TRUE(world.rig.Decode(request, &response).ok());
  ASSERT_EQ(response.item_errors_size(), 1);
  const v1::Error& error = response.item_errors(0).error();
  ExpectRefusal(error.code(), error.message(), StatusCode::OUT_OF_RANGE, "10");
}

// Whole calls -----------------------------------------------------------------------------------

TEST_P(BadCalls, AreRefused) {
  World world;
  grpc::ClientContext context;
  const grpc::Status status = GetParam().send(world, &context);
  ExpectRefusal(status.error_code(), status.error_message(), GetParam().code, GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    Decode, BadCalls,
    ::testing::Values(
        BadCall{"ModelUnknown", Decode([](auto* r) { r->set_model("x"); }), StatusCode::NOT_FOUND,
                "model \"x\" is not configured; name one of: m, w"},
        BadCall{"ModelMissing", Decode([](auto* r) { r->clear_model(); }), kInvalid,
                "model is empty"},
        BadCall{"Layer", Decode([](auto* r) { r->set_layer(2); }), kInvalid,
                "layer is 2, model \"m\" has layers 0 to 1"},
        BadCall{"Handles", Decode([](auto* r) { r->clear_handles(); }), kInvalid,
                "handles has 0 entries"},
        BadCall{"Positions", Decode([](auto* r) { r->add_positions(3); }), kInvalid,
                "positions has 3 entries for 2 handles"},
        BadCall{"QLens", Decode([](auto* r) { r->add_q_lens(1); }), kInvalid,
                "q_lens has 1 entries for 2 handles"},
        BadCall{"Q", Decode([](auto* r) { r->mutable_q()->pop_back(); }), kInvalid,
                "q holds 31 bytes, this request wants 32"},
        BadCall{"K", Decode([](auto* r) { r->mutable_k()->pop_back(); }), kInvalid,
                "k holds 15 bytes, this request wants 16"},
        BadCall{"V", Decode([](auto* r) { r->clear_v(); }), kInvalid, "v holds 0 bytes"},
        BadCall{"SinkLogits", Decode([](auto* r) { r->add_sink_logits(1); }), kInvalid,
                "sink_logits has 1 entries"},
        BadCall{"OutType", Decode([](auto* r) { r->set_out_type(static_cast<v1::OutType>(9)); }),
                kInvalid, "out_type is 9"}),
    NameOf);

INSTANTIATE_TEST_SUITE_P(
    Append, BadCalls,
    ::testing::Values(
        BadCall{"Model", Append([](auto* r) { r->set_model("x"); }), StatusCode::NOT_FOUND,
                "model \"x\" is not configured"},
        BadCall{"OtherModel", Append([](auto* r) { r->set_model("w"); }), kInvalid,
                "of model m, the call names w"},
        BadCall{"HandleMissing", Append([](auto* r) { r->clear_handle(); }), kInvalid,
                "handle is missing"},
        BadCall{"HandleStale", Append([](auto* r) { r->mutable_handle()->set_generation(99); }),
                StatusCode::NOT_FOUND, ""},
        BadCall{"Layer", Append([](auto* r) { r->set_layer(7); }), kInvalid, "layer is 7"},
        BadCall{"LayersCount", Append([](auto* r) { r->set_layers_count(3); }), kInvalid,
                "layers_count is 3"},
        BadCall{"PosGap", Append([](auto* r) { r->set_pos(11); }), StatusCode::OUT_OF_RANGE, "10"},
        BadCall{"PosOverflows", Append([](auto* r) { r->set_pos(~uint64_t{0}); }), kInvalid,
                "pos 18446744073709551615"},
        BadCall{"N", Append([](auto* r) { r->set_n(5); }), kInvalid, "k holds 32 bytes"},
        BadCall{"NOverflows", Append([](auto* r) { r->set_n(UINT32_MAX); }), kInvalid,
                "n 4294967295"},
        BadCall{"OtherBytes", Append([](auto* r) {
                  r->set_pos(0);
                  r->set_n(10);
                  r->set_k(std::string(80, '\1'));
                  r->set_v(std::string(80, '\1'));
                }),
                StatusCode::ALREADY_EXISTS, ""},
        BadCall{"TooOld", Append([](auto* r) { r->set_pos(5); }), StatusCode::FAILED_PRECONDITION,
                ""},
        BadCall{"KNan", Append([](auto* r) { SetBf16(r->mutable_k(), 6, 0x7FFF); }), kInvalid,
                "layer 0: k[1, 0, 2] is NaN"},
        BadCall{"VInfinite", Append([](auto* r) { SetBf16(r->mutable_v(), 0, 0x7F80); }), kInvalid,
                "layer 0: v[0, 0, 0] is inf"},
        BadCall{"SkipTo", Append([](auto* r) { r->set_skip_to(10); }), kInvalid, "has no window"}),
    NameOf);

INSTANTIATE_TEST_SUITE_P(Control, BadCalls,
                         ::
                             testing::
                                 Values(
                                     BadCall{"CreateModel",
                                             Create([](auto* r) { r->set_model("x"); }),
                                             StatusCode::NOT_FOUND, "model \"x\""},
                                     BadCall{"CreateCount",
                                             Create([](auto* r) { r->set_count(1025); }), kInvalid,
                                             "count is 1025, at most 1024"},
                                     BadCall{"CreateExpectedTokens", Create([](auto* r) {
                                               r->set_expected_tokens(~uint64_t{0});
                                             }),
                                             kInvalid, "expected_tokens is 18446744073709551615"},
                                     BadCall{"CreateTtl",
                                             Create([](auto* r) { r->set_ttl_ms(~uint64_t{0}); }),
                                             kInvalid, "ttl_ms is 18446744073709551615"},
                                     BadCall{"CreatePoolFull", Create([](auto* r) {
                                               r->set_count(40);
                                               r->set_expected_tokens(4096);
                                             }),
                                             StatusCode::RESOURCE_EXHAUSTED, ""},
                                     BadCall{"CreateSequencesFull",
                                             Create([](auto* r) { r->set_count(100); }),
                                             StatusCode::RESOURCE_EXHAUSTED, ""},
                                     BadCall{"ForkParentMissing",
                                             Fork([](auto* r) { r->clear_parent(); }), kInvalid,
                                             "parent is missing"},
                                     BadCall{"ForkParentStale", Fork([](auto* r) {
                                               r->mutable_parent()->set_incarnation(1);
                                             }),
                                             StatusCode::NOT_FOUND, ""},
                                     BadCall{"ForkCount",
                                             Fork([](auto* r) { r->set_count(UINT32_MAX); }),
                                             kInvalid, "count is 4294967295"},
                                     BadCall{"ForkExpectedTokens",
                                             Fork([](auto* r) { r->set_expected_tokens(5000); }),
                                             kInvalid, "expected_tokens is 5000"},
                                     BadCall{"ForkTtl",
                                             Fork([](auto* r) { r->set_ttl_ms(3600001); }),
                                             kInvalid, "ttl_ms is 3600001, at most 3600000"},
                                     BadCall{"TruncateHandles",
                                             Truncate([](auto* r) { r->Clear(); }), kInvalid,
                                             "handles has 0 entries"},
                                     BadCall{"TruncateSeqLensMissing",
                                             Truncate([](auto* r) { r->clear_seq_lens(); }),
                                             kInvalid, "seq_lens has 0 entries for 1 handles"},
                                     BadCall{"TruncateSeqLens", Truncate([](auto* r) {
                                               r->set_seq_lens(0, 1ULL << 40);
                                             }),
                                             kInvalid, "item 0: seq_lens is 1099511627776"},
                                     BadCall{"FreeHandles", Handles(&Stub::FreeSequences, 0),
                                             kInvalid, "handles has 0 entries"},
                                     BadCall{"FreeTooMany", Handles(&Stub::FreeSequences, 1025),
                                             kInvalid, "handles has 1025 entries"},
                                     BadCall{"RenewHandles", Handles(&Stub::RenewSequences, 0),
                                             kInvalid, "handles has 0 entries"},
                                     BadCall{"StatHandles", Handles(&Stub::StatSequences, 1025),
                                             kInvalid, "handles has 1025 entries"},
                                     BadCall{"MessageTooLargeForItsRpc",
                                             Handles(&Stub::StatSequences, 20000), kInvalid,
                                             "this rpc takes 131072"},
                                     BadCall{"ListModel",
                                             [](World& w, grpc::ClientContext* context) {
                                               v1::ListSequencesRequest request;
                                               request.set_model("x");
                                               v1::ListSequencesResponse response;
                                               return w.rig.stub->ListSequences(context, request,
                                                                                &response);
                                             },
                                             StatusCode::NOT_FOUND, "model \"x\""},
                                     BadCall{"ListPageToken",
                                             [](World& w, grpc::ClientContext* context) {
                                               v1::ListSequencesRequest request;
                                               request.set_page_token("../x");
                                               v1::ListSequencesResponse response;
                                               return w.rig.stub->ListSequences(context, request,
                                                                                &response);
                                             },
                                             kInvalid, "page_token"}),
                         NameOf);

INSTANTIATE_TEST_SUITE_P(
    Advice, BadCalls,
    ::testing::Values(
        BadCall{"PlanModel", Plan([](auto* r) { r->set_model("x"); }), StatusCode::NOT_FOUND,
                "model \"x\""},
        BadCall{"PlanBatch", Plan([](auto* r) { r->set_batch(~uint64_t{0}); }), kInvalid,
                "batch is 18446744073709551615"},
        BadCall{"PlanTokens", Plan([](auto* r) { r->set_tokens(~uint64_t{0}); }), kInvalid,
                "tokens is 18446744073709551615"},
        BadCall{"PlanOtherBytes", Plan([](auto* r) { r->set_other_bytes(~uint64_t{0}); }), kInvalid,
                "other_bytes is 18446744073709551615"},
        BadCall{"PlanHfConfigWithoutWorkload", Plan([](auto* r) { r->set_hf_config_json("{}"); }),
                kInvalid, "send both"},
        BadCall{"PlanHfConfig", Plan([](auto* r) {
                  r->set_hf_config_json("{");
                  r->set_batch(1);
                  r->set_tokens(1);
                }),
                kInvalid, "line 1"},
        BadCall{"MeasureKvHeads", Measure([](auto* r) { r->set_kv_heads(0); }), kInvalid,
                "kv_heads is 0"},
        BadCall{"MeasureHeadDim", Measure([](auto* r) { r->set_head_dim(100); }), kInvalid,
                "head_dim is 100"},
        BadCall{"MeasureK", Measure([](auto* r) { r->clear_k(); }), kInvalid, "k holds 0 bytes"},
        BadCall{"MeasureV", Measure([](auto* r) { r->mutable_v()->pop_back(); }), kInvalid,
                "v 127"},
        BadCall{"MeasureNan", Measure([](auto* r) { SetBf16(r->mutable_v(), 3, 0x7FC0); }),
                kInvalid, "v: element 3 is NaN"}),
    NameOf);

}  // namespace
}  // namespace fp8kvd::testing
