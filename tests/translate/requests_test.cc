#include "server/translate/requests.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/translate/rows.h"
#include "tests/translate/catalog.h"
#include "tests/translate/rows.h"

namespace fp8kvd::translate {
namespace {

using testing::HasSubstr;

// Three items of 1, 2 and 1 tokens of the plain model.
v1::DecodeRequest GoodDecode() {
  v1::DecodeRequest request;
  request.set_request_id(77);
  request.set_model("plain");
  request.set_layer(1);
  for (int i = 0; i < 3; ++i) {
    v1::Handle* handle = request.add_handles();
    handle->set_seq_id(10 + i);
    handle->set_generation(1);
    handle->set_incarnation(5);
    request.add_positions(i * 7);
    request.add_q_lens(i == 1 ? 2 : 1);
  }
  request.set_q(Rows(4 * kQRow));
  request.set_k(Rows(4 * kKvRow, 0x4000));
  request.set_v(Rows(4 * kKvRow, 0xC000));
  return request;
}

v1::AppendRequest GoodAppend() {
  v1::AppendRequest request;
  request.set_model("plain");
  request.mutable_handle()->set_seq_id(3);
  request.mutable_handle()->set_generation(1);
  request.set_layer(1);
  request.set_layers_count(2);
  request.set_pos(20);
  request.set_n(10);
  request.set_k(Rows(2 * 10 * kKvRow));
  request.set_v(Rows(2 * 10 * kKvRow, 0x4100));
  return request;
}

int64_t SlotBytes(const DecodeMessage& message) { return message.parts()[0]->slot_bytes; }
int64_t SlotBytes(const AppendMessage& message) { return message.slot_bytes(); }

// Parsed, checked and loaded; keeps the bytes that the pieces point into.
template <typename Message>
class Sent {
 public:
  template <typename Proto>
  explicit Sent(const Proto& proto) : bytes_(proto.SerializeAsString()), catalog_(SmallCatalog()) {
    // Cut unevenly, so that tensors come in pieces.
    const auto* data = reinterpret_cast<const uint8_t*>(bytes_.data());
    for (size_t at = 0; at < bytes_.size(); at += 100) {
      pieces_.emplace_back(data + at, std::min<size_t>(100, bytes_.size() - at));
    }
    status = message.Check(catalog_, pieces_);
  }
  uint8_t* slot() {
    slot_.assign(SlotBytes(message) / 8 + 1, ~uint64_t{0});
    return reinterpret_cast<uint8_t*>(slot_.data());
  }

  Message message;
  absl::Status status;

 private:
  const std::string bytes_;
  const Catalog catalog_;
  std::vector<Piece> pieces_;
  std::vector<uint64_t> slot_;
};

TEST(DecodeMessage, BecomesAnEngineRequest) {
  Sent<DecodeMessage> sent(GoodDecode());
  ASSERT_TRUE(sent.status.ok()) << sent.status;
  sent.message.Load(0, sent.slot());
  const engine::DecodeRequest& request = sent.message.parts()[0]->request;
  EXPECT_EQ(sent.message.request_id(), 77U);
  EXPECT_EQ(request.model, 0);
  EXPECT_EQ(request.layer, 1);
  ASSERT_EQ(request.items.size(), 3U);
  EXPECT_EQ(request.items[1].handle.seq_id, cache::SeqId{11});
  EXPECT_EQ(request.items[1].pos, 7);
  EXPECT_EQ(request.items[1].q_len, 2);
  EXPECT_EQ(request.items[1].row, 1);
  EXPECT_EQ(request.items[2].row, 3);
  EXPECT_EQ(std::memcmp(request.q, GoodDecode().q().data(), GoodDecode().q().size()), 0);
  EXPECT_EQ(std::memcmp(request.k, GoodDecode().k().data(), GoodDecode().k().size()), 0);
  EXPECT_EQ(std::memcmp(request.v, GoodDecode().v().data(), GoodDecode().v().size()), 0);
  EXPECT_EQ(request.lse, nullptr);
  EXPECT_EQ(request.sink_logits, nullptr);
  for (const engine::DecodeItem& item : request.items) EXPECT_TRUE(item.status.ok());
}

TEST(DecodeMessage, TensorsOfASlotDoNotOverlap) {
  v1::DecodeRequest proto = GoodDecode();
  proto.set_model("windowed");
  proto.set_want_lse(true);
  proto.set_out_type(v1::OUT_TYPE_FP32);
  for (int i = 0; i < 4; ++i) proto.add_sink_logits(1.0F);
  Sent<DecodeMessage> sent(proto);
  ASSERT_TRUE(sent.status.ok()) << sent.status;
  uint8_t* const slot = sent.slot();
  sent.message.Load(0, slot);
  const engine::DecodeRequest& request = sent.message.parts()[0]->request;
  const auto offset = [slot](const void* at) { return static_cast<const uint8_t*>(at) - slot; };
  EXPECT_EQ(offset(request.q), 0);
  EXPECT_GE(offset(request.k), 4 * kQRow * 2);
  EXPECT_GE(offset(request.v), offset(request.k) + 4 * kKvRow * 2);
  EXPECT_GE(offset(request.sink_logits), offset(request.v) + 4 * kKvRow * 2);
  EXPECT_GE(offset(request.out), offset(request.sink_logits) + 4 * 4);
  EXPECT_GE(offset(request.lse), offset(request.out) + 4 * kQRow * 4);
  EXPECT_LE(offset(request.lse) + 4 * 4 * 4, SlotBytes(sent.message));
  for (const void* at : {static_cast<const void*>(request.k), static_cast<const void*>(request.v),
                         static_cast<const void*>(request.out)}) {
    EXPECT_EQ(offset(at) % 256, 0);
  }
}

TEST(DecodeMessage, AbsentQLensMeanOneEachAndEmptyKvMeansAttendOnly) {
  v1::DecodeRequest proto = GoodDecode();
  proto.clear_q_lens();
  proto.set_q(Rows(3 * kQRow));
  proto.clear_k();
  proto.clear_v();
  Sent<DecodeMessage> sent(proto);
  ASSERT_TRUE(sent.status.ok()) << sent.status;
  sent.message.Load(0, sent.slot());
  EXPECT_EQ(sent.message.parts()[0]->request.items[2].row, 2);
  EXPECT_EQ(sent.message.parts()[0]->request.k, nullptr);
}

TEST(DecodeMessage, AnEmptyModelNameNeedsOnlyOneModel) {
  Catalog catalog = SmallCatalog();
  EXPECT_FALSE(FindModel(catalog, "", 0).ok());
  catalog.models.pop_back();
  EXPECT_EQ(FindModel(catalog, "", 0).value(), 0);
}

TEST(DecodeMessage, ANameThatOnlyStartsLikeAModelIsNotIt) {
  const Catalog catalog = SmallCatalog();
  EXPECT_TRUE(absl::IsNotFound(FindModel(catalog, "plain", 1000).status()));
  EXPECT_TRUE(absl::IsNotFound(FindModel(catalog, "plai", 4).status()));
}

TEST(DecodeMessage, ASequenceNamedAgainFailsAlone) {
  v1::DecodeRequest proto = GoodDecode();
  *proto.mutable_handles(2) = proto.handles(0);
  Sent<DecodeMessage> sent(proto);
  ASSERT_TRUE(sent.status.ok());
  const auto items = sent.message.parts()[0]->request.items;
  EXPECT_TRUE(items[0].status.ok());
  EXPECT_TRUE(items[1].status.ok());
  EXPECT_EQ(
      items[2].status.message(),
      "item 2: handles names the sequence of item 0 again, a call takes a sequence once; send "
      "its tokens as one item with q_lens, or in a call of their own");
}

TEST(DecodeMessage, APositionBeyondTheLimitFailsAlone) {
  for (const uint64_t pos : {uint64_t{4096}, uint64_t{1} << 32, ~uint64_t{0}}) {
    v1::DecodeRequest proto = GoodDecode();
    proto.set_positions(1, pos);
    Sent<DecodeMessage> sent(proto);
    ASSERT_TRUE(sent.status.ok());
    EXPECT_TRUE(sent.message.parts()[0]->request.items[0].status.ok());
    EXPECT_TRUE(absl::IsInvalidArgument(sent.message.parts()[0]->request.items[1].status));
  }
}

struct BadRows {
  const char* name;
  uint16_t value;
  const char* text;  // empty: allowed
};

class RangeOfValues : public testing::TestWithParam<BadRows> {};

TEST_P(RangeOfValues, IsHeldItemByItem) {
  for (const char* tensor : {"q", "k", "v"}) {
    v1::DecodeRequest proto = GoodDecode();
    std::string* const rows = tensor[0] == 'q'   ? proto.mutable_q()
                              : tensor[0] == 'k' ? proto.mutable_k()
                                                 : proto.mutable_v();
    const int64_t row = tensor[0] == 'q' ? kQRow : kKvRow;
    SetElement(rows, 2 * row + 64 + 3, GetParam().value);  // item 1, its second token, head 1
    Sent<DecodeMessage> sent(proto);
    ASSERT_TRUE(sent.status.ok());
    sent.message.Load(0, sent.slot());
    const auto items = sent.message.parts()[0]->request.items;
    EXPECT_TRUE(items[0].status.ok());
    EXPECT_TRUE(items[2].status.ok());
    if (std::string(GetParam().text).empty()) {
      EXPECT_TRUE(items[1].status.ok()) << tensor;
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(items[1].status)) << tensor;
      EXPECT_THAT(std::string(items[1].status.message()),
                  HasSubstr(absl::StrCat("item 1: ", tensor, "[1, 1, 3] is ", GetParam().text)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Edges, RangeOfValues,
    testing::Values(BadRows{"QuietNan", 0x7FC0, "NaN"}, BadRows{"NegativeNan", 0xFF81, "NaN"},
                    BadRows{"Infinity", 0x7F80, "inf"}, BadRows{"MinusInfinity", 0xFF80, "-inf"},
                    BadRows{"TwoTo28", 0x4D80, "2.68435e+08"},
                    BadRows{"MinusTwoTo28", 0xCD80, "-2.68435e+08"},
                    BadRows{"LargestAllowed", 0x4D7F, ""},
                    BadRows{"LargestAllowedNegative", 0xCD7F, ""}, BadRows{"MinusZero", 0x8000, ""},
                    BadRows{"Subnormal", 0x0001, ""}),
    [](const auto& edge) { return edge.param.name; });

TEST(DecodeMessage, DigestsCoverAnItemsOwnRows) {
  Sent<DecodeMessage> sent(GoodDecode());
  sent.message.Load(0, sent.slot());
  const uint64_t before = sent.message.parts()[0]->request.items[1].kv_digest;
  v1::DecodeRequest other = GoodDecode();
  SetElement(other.mutable_k(), 0, 0x3F00);           // item 0
  SetElement(other.mutable_v(), 3 * kKvRow, 0x3F00);  // item 2
  Sent<DecodeMessage> beside(other);
  beside.message.Load(0, beside.slot());
  EXPECT_EQ(beside.message.parts()[0]->request.items[1].kv_digest, before);
  EXPECT_NE(beside.message.parts()[0]->request.items[0].kv_digest,
            sent.message.parts()[0]->request.items[0].kv_digest);
  EXPECT_NE(beside.message.parts()[0]->request.items[2].kv_digest,
            sent.message.parts()[0]->request.items[2].kv_digest);
}

struct BadMessage {
  const char* name;
  std::function<void(v1::DecodeRequest*)> spoil;
  absl::StatusCode code;
  const char* text;
};

class BadDecode : public testing::TestWithParam<BadMessage> {};

TEST_P(BadDecode, IsRefusedWhole) {
  v1::DecodeRequest proto = GoodDecode();
  GetParam().spoil(&proto);
  const Sent<DecodeMessage> sent(proto);
  EXPECT_EQ(sent.status.code(), GetParam().code) << sent.status;
  EXPECT_THAT(std::string(sent.status.message()), HasSubstr(GetParam().text));
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

INSTANTIATE_TEST_SUITE_P(
    Fields, BadDecode,
    testing::Values(
        BadMessage{"ModelUnknown", [](auto* r) { r->set_model("x\n\"y"); },
                   absl::StatusCode::kNotFound,
                   R"(model "x\n\"y" is not configured; name one of: plain, windowed)"},
        BadMessage{"ModelMissing", [](auto* r) { r->clear_model(); }, kInvalid, "model is empty"},
        BadMessage{"LayerTooHigh", [](auto* r) { r->set_layer(3); }, kInvalid,
                   "layer is 3, model \"plain\" has layers 0 to 2"},
        BadMessage{"LayerHuge", [](auto* r) { r->set_layer(UINT32_MAX); }, kInvalid,
                   "layer is 4294967295"},
        BadMessage{"HandlesMissing", [](auto* r) { r->clear_handles(); }, kInvalid,
                   "handles has 0 entries, a call takes 1 to 1024"},
        BadMessage{"HandlesTooMany",
                   [](auto* r) {
                     for (int i = 0; i < 1022; ++i) r->add_handles();
                   },
                   kInvalid, "handles has 1025 entries"},
        BadMessage{"PositionsMissing", [](auto* r) { r->clear_positions(); }, kInvalid,
                   "positions has 0 entries for 3 handles"},
        BadMessage{"PositionsTooMany", [](auto* r) { r->add_positions(1); }, kInvalid,
                   "positions has 4 entries for 3 handles"},
        BadMessage{"QLensTooFew", [](auto* r) { r->mutable_q_lens()->RemoveLast(); }, kInvalid,
                   "q_lens has 2 entries for 3 handles"},
        BadMessage{"QLenZero", [](auto* r) { r->set_q_lens(2, 0); }, kInvalid,
                   "item 2: q_lens is 0, an item has 1 to 64"},
        BadMessage{"QLenTooHigh", [](auto* r) { r->set_q_lens(2, 65); }, kInvalid,
                   "item 2: q_lens is 65"},
        BadMessage{"QLenOverflows", [](auto* r) { r->set_q_lens(2, UINT32_MAX); }, kInvalid,
                   "item 2: q_lens is 4294967295"},
        BadMessage{
            "QMissing", [](auto* r) { r->clear_q(); }, kInvalid,
            "q holds 0 bytes, this request wants 2048 (4 query tokens x 4 q_heads x head_dim "
            "64 x 2 B)"},
        BadMessage{"QShort", [](auto* r) { r->mutable_q()->pop_back(); }, kInvalid,
                   "q holds 2047 bytes"},
        BadMessage{"KMissing", [](auto* r) { r->clear_k(); }, kInvalid, "k holds 0 bytes"},
        BadMessage{"VMissing", [](auto* r) { r->clear_v(); }, kInvalid, "v holds 0 bytes"},
        BadMessage{"KLong", [](auto* r) { r->mutable_k()->push_back(0); }, kInvalid,
                   "k holds 1025 bytes, this request wants 1024"},
        BadMessage{"VShort", [](auto* r) { r->mutable_v()->pop_back(); }, kInvalid,
                   "v holds 1023 bytes"},
        BadMessage{"OutTypeUnknown", [](auto* r) { r->set_out_type(static_cast<v1::OutType>(3)); },
                   kInvalid, "out_type is 3"},
        BadMessage{"OutTypeNegative",
                   [](auto* r) { r->set_out_type(static_cast<v1::OutType>(-1)); }, kInvalid,
                   "out_type is -1"}),
    [](const auto& bad) { return std::string(bad.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Sinks, BadDecode,
    testing::Values(
        BadMessage{"Refused", [](auto* r) { r->add_sink_logits(1); }, kInvalid,
                   "sink_logits has 1 entries, layer 1 of model \"plain\" has no sinks"},
        BadMessage{"Missing", [](auto* r) { r->set_model("windowed"); }, kInvalid,
                   "sink_logits has 0 entries, layer 1 of model \"windowed\" wants 4"},
        BadMessage{"TooMany",
                   [](auto* r) {
                     r->set_model("windowed");
                     for (int i = 0; i < 5; ++i) r->add_sink_logits(1);
                   },
                   kInvalid, "sink_logits has 5 entries"},
        BadMessage{"Nan",
                   [](auto* r) {
                     r->set_model("windowed");
                     for (int i = 0; i < 4; ++i) {
                       r->add_sink_logits(std::numeric_limits<float>::quiet_NaN());
                     }
                   },
                   kInvalid, "sink_logits[0] is not finite"},
        BadMessage{"BeyondWhatItsBaseTwoLogarithmHolds",
                   [](auto* r) {
                     r->set_model("windowed");
                     for (int i = 0; i < 4; ++i) r->add_sink_logits(i == 2 ? 3e38F : -3e38F);
                   },
                   kInvalid, "sink_logits[2] is 3e+38"}),
    [](const auto& bad) { return std::string(bad.param.name); });

TEST(DecodeMessage, OmitSinksNeedsNone) {
  v1::DecodeRequest proto = GoodDecode();
  proto.set_model("windowed");
  proto.set_omit_sinks(true);
  Sent<DecodeMessage> without(proto);
  EXPECT_TRUE(without.status.ok()) << without.status;
  for (int i = 0; i < 4; ++i) proto.add_sink_logits(1);
  Sent<DecodeMessage> with(proto);
  ASSERT_TRUE(with.status.ok()) << with.status;
  with.message.Load(0, with.slot());
  EXPECT_EQ(with.message.parts()[0]->request.sink_logits, nullptr);
}

TEST(DecodeMessage, AReplyBeyondTheMessageLimitIsRefusedBeforeAnySlot) {
  Catalog catalog = SmallCatalog();
  catalog.message_bytes_max = 4 * kQRow * 2 - 1;
  const std::string bytes = GoodDecode().SerializeAsString();
  const Piece piece(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  DecodeMessage message;
  const absl::Status status = message.Check(catalog, absl::MakeConstSpan(&piece, 1));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("split the batch"));
}

TEST(AppendMessage, BecomesAnEngineRequestWithADigestForEachSlice) {
  Sent<AppendMessage> sent(GoodAppend());
  ASSERT_TRUE(sent.status.ok()) << sent.status;
  ASSERT_TRUE(sent.message.Load(sent.slot()).ok());
  const engine::AppendRequest& request = sent.message.request();
  EXPECT_EQ(request.layer, 1);
  EXPECT_EQ(request.layers_count, 2);
  EXPECT_EQ(request.pos, 20);
  EXPECT_EQ(request.n, 10);
  EXPECT_EQ(request.slice_tokens, 8);
  ASSERT_EQ(request.slice_digests.size(), 4U);  // 2 layers x (8 + 2 tokens)
  EXPECT_EQ(request.slice_digests[3], RowsDigest({request.k + 18 * kKvRow, 2 * kKvRow},
                                                 {request.v + 18 * kKvRow, 2 * kKvRow}));
  EXPECT_EQ(request.seq_lens.size(), 2U);
}

TEST(AppendMessage, ABadValueNamesLayerAndToken) {
  v1::AppendRequest proto = GoodAppend();
  SetElement(proto.mutable_v(), (10 + 9) * kKvRow + 64,
             0x7F80);  // second layer, last token, head 1
  Sent<AppendMessage> sent(proto);
  ASSERT_TRUE(sent.status.ok());
  const absl::Status status = sent.message.Load(sent.slot());
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 2: v[9, 1, 0] is inf"));
}

TEST(AppendMessage, SkipToAloneIsRefused) {
  v1::AppendRequest proto = GoodAppend();
  proto.set_model("windowed");
  proto.set_n(0);
  proto.clear_k();
  proto.clear_v();
  proto.set_skip_to(20);
  Sent<AppendMessage> sent(proto);
  EXPECT_TRUE(absl::IsInvalidArgument(sent.status)) << sent.status;
  EXPECT_THAT(sent.status.message(), HasSubstr("n is 0"));
}

struct BadChunk {
  const char* name;
  std::function<void(v1::AppendRequest*)> spoil;
  absl::StatusCode code;
  const char* text;
};

class BadAppend : public testing::TestWithParam<BadChunk> {};

TEST_P(BadAppend, IsRefused) {
  v1::AppendRequest proto = GoodAppend();
  GetParam().spoil(&proto);
  const Sent<AppendMessage> sent(proto);
  EXPECT_EQ(sent.status.code(), GetParam().code) << sent.status;
  EXPECT_THAT(std::string(sent.status.message()), HasSubstr(GetParam().text));
}

INSTANTIATE_TEST_SUITE_P(
    Fields, BadAppend,
    testing::Values(
        BadChunk{"ModelUnknown", [](auto* r) { r->set_model("z"); }, absl::StatusCode::kNotFound,
                 "model \"z\" is not configured"},
        BadChunk{"HandleMissing", [](auto* r) { r->clear_handle(); }, kInvalid,
                 "handle is missing"},
        BadChunk{"LayerTooHigh", [](auto* r) { r->set_layer(3); }, kInvalid, "layer is 3"},
        BadChunk{"LayersCountTooHigh", [](auto* r) { r->set_layers_count(3); }, kInvalid,
                 "layers_count is 3, from layer 1 on model \"plain\" has 2"},
        BadChunk{"LayersCountOverflows", [](auto* r) { r->set_layers_count(UINT32_MAX); }, kInvalid,
                 "layers_count is 4294967295"},
        BadChunk{"PosOverflows", [](auto* r) { r->set_pos(~uint64_t{0}); }, kInvalid,
                 "pos 18446744073709551615"},
        BadChunk{"PosPlusNTooLong", [](auto* r) { r->set_pos(4090); }, kInvalid,
                 "pass the longest sequence of 4096 tokens"},
        BadChunk{"NZero", [](auto* r) { r->set_n(0); }, kInvalid, "n is 0"},
        BadChunk{"NOverflows", [](auto* r) { r->set_n(UINT32_MAX); }, kInvalid, "n 4294967295"},
        // 2^31 tokens x 2 layers x 2 heads x 64 x 2 B is 2^40: 0 in 32 bits, like the empty
        // tensors.
        BadChunk{"ShapeOverflows32Bits",
                 [](auto* r) {
                   r->set_n(1U << 31);
                   r->clear_k();
                   r->clear_v();
                 },
                 kInvalid, "n 2147483648"},
        BadChunk{"KShort", [](auto* r) { r->mutable_k()->pop_back(); }, kInvalid,
                 "k holds 5119 bytes, this request wants 5120 (2 layers x 10 tokens x 2 kv_heads x "
                 "head_dim 64 x 2 B)"},
        BadChunk{"VMissing", [](auto* r) { r->clear_v(); }, kInvalid, "v holds 0 bytes"},
        BadChunk{"SkipToWithoutWindow", [](auto* r) { r->set_skip_to(20); }, kInvalid,
                 "layer 1 of model \"plain\" has no window"},
        BadChunk{"SkipToElsewhere",
                 [](auto* r) {
                   r->set_model("windowed");
                   r->set_skip_to(19);
                 },
                 kInvalid, "skip_to is 19 and pos 20"},
        BadChunk{"SkipToOverflows",
                 [](auto* r) {
                   r->set_model("windowed");
                   r->set_skip_to(~uint64_t{0});
                 },
                 kInvalid, "skip_to 18446744073709551615"}),
    [](const auto& bad) { return std::string(bad.param.name); });

TEST(Messages, BytesThatAreNoMessageAreRefused) {
  const Catalog catalog = SmallCatalog();
  const uint8_t bytes[] = {0x3A, 0x7F, 0x00};
  const Piece piece(bytes, sizeof(bytes));
  DecodeMessage decode;
  EXPECT_TRUE(absl::IsInvalidArgument(decode.Check(catalog, absl::MakeConstSpan(&piece, 1))));
  AppendMessage append;
  EXPECT_TRUE(absl::IsInvalidArgument(append.Check(catalog, absl::MakeConstSpan(&piece, 1))));
}

}  // namespace
}  // namespace fp8kvd::translate
