#include "server/translate/replies.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "gtest/gtest.h"

#include "server/translate/control.h"
#include "server/translate/status.h"
#include "tests/translate/catalog.h"

namespace fp8kvd::translate {
namespace {

// Two items of the plain model: 2 and 1 tokens, attend only.
v1::DecodeRequest TwoItems() {
  v1::DecodeRequest request;
  request.set_request_id(9);
  request.set_model("plain");
  for (int i = 0; i < 2; ++i) {
    request.add_handles()->set_seq_id(i + 1);
    request.add_positions(0);
    request.add_q_lens(i == 0 ? 2 : 1);
  }
  request.set_q(std::string(3 * 4 * 64 * 2, '\0'));
  request.set_want_lse(true);
  request.set_out_type(v1::OUT_TYPE_FP32);
  return request;
}

class DecodeReplyTest : public testing::Test {
 protected:
  void SetUp() override {
    const Piece piece(reinterpret_cast<const uint8_t*>(bytes_.data()), bytes_.size());
    ASSERT_TRUE(message_.Check(catalog_, absl::MakeConstSpan(&piece, 1)).ok());
    slot_.resize(message_.parts()[0]->slot_bytes);
    message_.Load(0, slot_.data());
    auto* const out = static_cast<float*>(message_.parts()[0]->request.out);
    for (int i = 0; i < 3 * 256; ++i) out[i] = static_cast<float>(i + 1);
    for (int i = 0; i < 3 * 4; ++i)
      message_.parts()[0]->request.lse[i] = static_cast<float>(-i - 1);
  }
  v1::DecodeResponse Reply() {
    v1::DecodeResponse response;
    EXPECT_TRUE(Parse(DecodeReply(message_, /*now=*/1340), &response));
    return response;
  }
  static float At(const std::string& bytes, size_t index) {
    float value = 0;
    std::memcpy(&value, bytes.data() + index * 4, 4);
    return value;
  }

  const Catalog catalog_ = SmallCatalog();
  const std::string bytes_ = TwoItems().SerializeAsString();
  DecodeMessage message_;
  std::vector<uint8_t> slot_;
};

TEST_F(DecodeReplyTest, CarriesOutLseAndTimings) {
  engine::DecodeRequest& request = message_.parts()[0]->request;
  request.arrived = 1000;
  request.staged = 1030;
  request.launched = 1250;
  request.fenced = 1300;
  request.batch_items = 7;
  const v1::DecodeResponse response = Reply();
  EXPECT_EQ(response.request_id(), 9U);
  ASSERT_EQ(response.out().size(), 3U * 256 * 4);
  EXPECT_EQ(At(response.out(), 0), 1.0F);
  EXPECT_EQ(At(response.out(), 767), 768.0F);
  ASSERT_EQ(response.lse().size(), 3U * 4 * 4);
  EXPECT_EQ(At(response.lse(), 11), -12.0F);
  EXPECT_EQ(response.item_errors_size(), 0);
  EXPECT_EQ(response.timings().stage_us(), 30U);
  EXPECT_EQ(response.timings().queue_us(), 220U);
  EXPECT_EQ(response.timings().kernel_us(), 50U);
  EXPECT_EQ(response.timings().reply_us(), 40U);
  EXPECT_EQ(response.timings().batch_items(), 7U);
}

TEST_F(DecodeReplyTest, RowsOfAFailedItemAreZeroWhateverTheSlotHolds) {
  message_.parts()[0]->request.items[0].status = absl::OutOfRangeError("item 0: gap");
  message_.parts()[0]->request.items[0].retry_after_ms = 12;
  const v1::DecodeResponse response = Reply();
  for (size_t i = 0; i < 2 * 256; ++i) ASSERT_EQ(At(response.out(), i), 0.0F);
  EXPECT_EQ(At(response.out(), 512), 513.0F);
  for (size_t i = 0; i < 2 * 4; ++i) ASSERT_EQ(At(response.lse(), i), 0.0F);
  EXPECT_EQ(At(response.lse(), 8), -9.0F);
  ASSERT_EQ(response.item_errors_size(), 1);
  EXPECT_EQ(response.item_errors(0).index(), 0U);
  EXPECT_EQ(response.item_errors(0).error().code(), 11);
  EXPECT_EQ(response.item_errors(0).error().message(), "item 0: gap");
  EXPECT_EQ(response.item_errors(0).error().retry_after_ms(), 12U);
}

TEST(DecodeErrorReply, CarriesTheStatus) {
  v1::DecodeResponse response;
  ASSERT_TRUE(Parse(DecodeErrorReply(5, absl::ResourceExhaustedError("full"), /*retry_after_ms=*/3),
                    &response));
  EXPECT_EQ(response.request_id(), 5U);
  EXPECT_EQ(response.error().code(), 8);
  EXPECT_EQ(response.error().message(), "full");
  EXPECT_EQ(response.error().retry_after_ms(), 3U);
}

TEST(Status, CodesAndTextsAreTheSameOnBothSides) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    EXPECT_EQ(static_cast<int>(ToGrpc(status, 0).error_code()), code);
    EXPECT_EQ(ToGrpc(status, 0).error_message(), "why");
    EXPECT_TRUE(ToGrpc(status, 0).error_details().empty());
  }
  EXPECT_TRUE(ToGrpc(absl::OkStatus(), 0).ok());
}

TEST(Status, ALongTextIsCutBelowWhatClientsAccept) {
  const absl::Status status = absl::InternalError(std::string(100000, 'x'));
  EXPECT_LT(ToGrpc(status, 0).error_message().size(), 8192U / 3);
}

TEST(ItemErrors, ManyHaveTheirCodesAndTheFirstTheirTexts) {
  ItemErrors errors(/*text_bytes_max=*/100);
  const absl::Status status = absl::NotFoundError(std::string(40, 'x'));
  for (size_t i = 0; i < 1000; ++i) {
    const v1::ItemError error = errors.Next(i, status, /*retry_after_ms=*/7);
    EXPECT_EQ(error.index(), i);
    EXPECT_EQ(error.error().code(), 5);
    EXPECT_EQ(error.error().retry_after_ms(), 7U);
    EXPECT_EQ(error.error().message(), i < 3 ? status.message() : "see the items before") << i;
  }
}

TEST(Status, ALongTextIsCutBetweenCharacters) {
  for (size_t before = 2040; before < 2049; ++before) {
    const v1::Error error =
        ToError(absl::InternalError(std::string(before, 'x') + "\xE2\x82\xAC\xF0\x9F\x98\x80"), 0);
    v1::Error parsed;  // protobuf refuses a string that is no UTF-8
    EXPECT_TRUE(parsed.ParseFromString(error.SerializeAsString())) << before;
    EXPECT_LE(error.message().size(), 2048U);
    EXPECT_GE(error.message().size(), std::min<size_t>(before, 2040));
  }
}

// google.rpc.Status and RetryInfo, read as any client's protobuf would read unknown messages.
TEST(Status, DetailsAreARetryInfo) {
  const std::string details = StatusDetails(absl::ResourceExhaustedError("full"), 1250);
  google::protobuf::Any any;  // {type_url = 1; value = 2}
  google::protobuf::Duration delay;
  delay.set_seconds(1);
  delay.set_nanos(250000000);
  const std::string duration = delay.SerializeAsString();
  any.set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  any.set_value(std::string("\x0A") + static_cast<char>(duration.size()) + duration);
  const std::string any_bytes = any.SerializeAsString();
  EXPECT_EQ(details, std::string("\x08\x08\x12\x04") + "full" + "\x1A" +
                         static_cast<char>(any_bytes.size()) + any_bytes);
}

TEST(Control, CreateTakesDefaultsAndBounds) {
  const Catalog catalog = SmallCatalog();
  v1::CreateSequencesRequest request;
  request.set_model("windowed");
  const auto to = ToControl(catalog, request);
  ASSERT_TRUE(to.ok());
  EXPECT_EQ((*to)->count, 1);
  EXPECT_EQ((*to)->model, 1);
  v1::CreateSequencesResponse response;
  (*to)->handles = {{.seq_id = cache::SeqId{4}, .generation = 2, .incarnation = 8}};
  ToReply(catalog, **to, &response);
  EXPECT_EQ(response.ttl_ms(), 60000U);
  ASSERT_EQ(response.handles_size(), 1);
  EXPECT_EQ(response.handles(0).seq_id(), 4U);
  EXPECT_EQ(response.handles(0).generation(), 2U);
  EXPECT_EQ(response.handles(0).incarnation(), 8U);
}

TEST(Control, ServerInfoHasShapesAndLimits) {
  const v1::GetServerInfoResponse info = ServerInfo(SmallCatalog());
  ASSERT_EQ(info.models_size(), 2);
  EXPECT_EQ(info.models(1).name(), "windowed");
  EXPECT_EQ(info.models(1).kv_heads(), 2U);
  ASSERT_EQ(info.models(1).groups_size(), 1);
  EXPECT_EQ(info.models(1).groups(0).window(), 100U);
  EXPECT_TRUE(info.models(1).groups(0).has_sinks());
  EXPECT_EQ(info.models(1).groups(0).precision(), v1::PRECISION_FP8_KV);
  EXPECT_EQ(info.models(1).groups(0).page_bytes(), 12345U);
  EXPECT_EQ(info.limits().seq_len_max(), 4096U);
  EXPECT_LE(info.limits().append_chunk_bytes_max(), info.limits().message_bytes_max());
}

}  // namespace
}  // namespace fp8kvd::translate
