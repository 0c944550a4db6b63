// Large messages for a device, which go past the caches: all that is seen of them is what is seen
// of copied ones.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/translate/requests.h"
#include "tests/translate/catalog.h"
#include "tests/translate/rows.h"

namespace fp8kvd::translate {
namespace {

using testing::HasSubstr;

constexpr int64_t kQRow = 4 * 64;
constexpr int64_t kKvRow = 2 * 64;

// A message whose tensors came beside it, loaded into a slot as an engine has them.
template <typename Message>
struct Whole {
  template <typename Proto>
  Whole(Proto proto, const std::string& q, bool streams) : slot(1 << 17, ~uint64_t{0}) {
    catalog.streams_rows = streams;
    const auto piece = [](const std::string& bytes) {
      return Piece(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    };
    k.swap(*proto.mutable_k());
    v.swap(*proto.mutable_v());
    const std::string head = proto.SerializeAsString();
    const Piece message_head = piece(head);
    const Beside tensors{.q = piece(q), .k = piece(k), .v = piece(v)};
    status = message.Check(catalog, {&message_head, 1}, &tensors);
  }
  uint8_t* SlotBegin() {
    const auto begin = reinterpret_cast<uintptr_t>(slot.data());
    return reinterpret_cast<uint8_t*>((begin + 255) / 256 * 256);
  }
  std::string k;
  std::string v;
  Catalog catalog = SmallCatalog();
  std::vector<uint64_t> slot;
  Message message;
  absl::Status status;
};

// 512 tokens, half a megabyte; the item at 5 has a NaN in its v.
TEST(DecodeMessage, ComesToTheSameStreamedAndCopied) {
  v1::DecodeRequest proto;
  proto.set_model("plain");
  for (int i = 0; i < 8; ++i) {
    proto.add_handles()->set_seq_id(10 + i);
    proto.add_positions(i);
    proto.add_q_lens(64);
  }
  const std::string q = Rows(512 * kQRow);
  proto.set_k(Rows(512 * kKvRow, 0x4000));
  proto.set_v(Rows(512 * kKvRow, 0xC000));
  SetElement(proto.mutable_v(), (5 * 64 + 3) * kKvRow + 65, 0x7FC0);
  Whole<DecodeMessage> copied(proto, q, /*streams=*/false);
  Whole<DecodeMessage> streamed(proto, q, /*streams=*/true);
  const engine::DecodeRequest* requests[2] = {};
  for (Whole<DecodeMessage>* const whole : {&copied, &streamed}) {
    ASSERT_TRUE(whole->status.ok()) << whole->status;
    whole->message.Load(0, whole->SlotBegin());
    const engine::DecodeRequest& request = whole->message.parts()[0]->request;
    requests[whole == &streamed ? 1 : 0] = &request;
    EXPECT_EQ(std::memcmp(request.q, q.data(), q.size()), 0);
    EXPECT_EQ(std::memcmp(request.k, proto.k().data(), proto.k().size()), 0);
    EXPECT_EQ(std::memcmp(request.v, proto.v().data(), proto.v().size()), 0);
    EXPECT_THAT(std::string(request.items[5].status.message()),
                HasSubstr("item 5: v[3, 1, 1] is NaN"));
  }
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(requests[0]->items[i].status, requests[1]->items[i].status);
    if (i == 5) continue;
    EXPECT_EQ(requests[0]->items[i].kv_digest, requests[1]->items[i].kv_digest);
  }
}

TEST(AppendMessage, ComesToTheSameStreamedAndCopied) {
  v1::AppendRequest proto;
  proto.set_model("plain");
  proto.mutable_handle()->set_seq_id(3);
  proto.set_layer(1);
  proto.set_layers_count(2);
  proto.set_n(300);
  proto.set_k(Rows(2 * 300 * kKvRow));
  proto.set_v(Rows(2 * 300 * kKvRow, 0x4100));
  Whole<AppendMessage> copied(proto, "", /*streams=*/false);
  Whole<AppendMessage> streamed(proto, "", /*streams=*/true);
  for (Whole<AppendMessage>* const whole : {&copied, &streamed}) {
    ASSERT_TRUE(whole->status.ok()) << whole->status;
    ASSERT_TRUE(whole->message.Load(whole->SlotBegin()).ok());
    const engine::AppendRequest& request = whole->message.request();
    EXPECT_EQ(std::memcmp(request.k, proto.k().data(), proto.k().size()), 0);
    EXPECT_EQ(std::memcmp(request.v, proto.v().data(), proto.v().size()), 0);
  }
  EXPECT_EQ(copied.message.request().slice_digests, streamed.message.request().slice_digests);

  SetElement(proto.mutable_k(), (300 + 299) * kKvRow, 0xFF80);
  Whole<AppendMessage> bad(proto, "", /*streams=*/true);
  ASSERT_TRUE(bad.status.ok());
  EXPECT_THAT(std::string(bad.message.Load(bad.SlotBegin()).message()),
              HasSubstr("layer 2: k[299, 0, 0] is -inf"));
}

// Who loads one has others to serve between its parts, so none may take long.
TEST(AppendMessage, IsLoadedInPartsThatEachCopyALittle) {
  v1::AppendRequest proto;
  proto.set_model("plain");
  proto.mutable_handle()->set_seq_id(3);
  proto.set_layers_count(2);
  proto.set_n(800);
  proto.set_k(Rows(2 * 800 * kKvRow));
  proto.set_v(Rows(2 * 800 * kKvRow, 0x4100));
  Whole<AppendMessage> whole(proto, "", /*streams=*/true);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  auto* const slot = reinterpret_cast<uint16_t*>(whole.SlotBegin());
  whole.message.BeginLoad(whole.SlotBegin());
  const int64_t elements = 2 * 2 * 800 * kKvRow;
  const auto copied = [&] {
    return elements - std::count(slot, slot + elements, uint16_t{0xFFFF});
  };
  int64_t before = copied();
  for (bool has_more = true; has_more;) {
    const absl::StatusOr<bool> continued = whole.message.ContinueLoad();
    ASSERT_TRUE(continued.ok()) << continued.status();
    has_more = *continued;
    EXPECT_LE(copied() - before, RowStream::kPart);
    before = copied();
  }
  EXPECT_EQ(before, elements);
}

}  // namespace
}  // namespace fp8kvd::translate
