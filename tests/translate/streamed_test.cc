// Large messages for a device, which go past the caches: all that is seen of them is what is seen
// of copied ones.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/translate/requests.h"
#include "tests/translate/catalog.h"
#include "tests/translate/rows.h"

namespace fp8kvd::translate {
namespace {

using testing::HasSubstr;

enum class How : uint8_t { kCopied, kStreamed, kStreamedInPieces };

// A message loaded into a slot as an engine has it: its tensors came beside it, or all of it in
// pieces that end within rows and elements.
template <typename Message>
struct Loaded {
  template <typename Proto>
  Loaded(Proto proto, const std::string& q, How how, size_t devices = 1) {
    catalog.streams_rows = how != How::kCopied;
    catalog.devices.resize(devices);
    if constexpr (std::is_same_v<Proto, v1::DecodeRequest>) {
      if (how == How::kStreamedInPieces) proto.set_q(q);
    }
    if (how == How::kStreamedInPieces) {
      cut.emplace(proto.SerializeAsString(), 5001);
      status = message.Check(catalog, cut->pieces().pieces);
      return;
    }
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
  uint8_t* SlotBegin(size_t part = 0) {
    std::vector<uint64_t>& slot = slots[part];
    slot.assign(1 << 17, ~uint64_t{0});
    const auto begin = reinterpret_cast<uintptr_t>(slot.data());
    return reinterpret_cast<uint8_t*>((begin + 255) / 256 * 256);
  }
  std::string k;
  std::string v;
  std::optional<CutField> cut;
  Catalog catalog = SmallCatalog();
  std::vector<uint64_t> slots[2];
  Message message;
  absl::Status status;
};

// 512 tokens, half a megabyte; the item at 5 has a NaN in its v.
v1::DecodeRequest LargeDecode() {
  v1::DecodeRequest proto;
  proto.set_model("plain");
  for (int i = 0; i < 8; ++i) {
    proto.add_handles()->set_seq_id(10 + i);
    proto.add_positions(i);
    proto.add_q_lens(64);
  }
  proto.set_k(Rows(512 * kKvRow, 0x4000));
  proto.set_v(Rows(512 * kKvRow, 0xC000));
  SetElement(proto.mutable_v(), (5 * 64 + 3) * kKvRow + 65, 0x7FC0);
  return proto;
}

TEST(DecodeMessage, ComesToTheSameStreamedAndCopied) {
  const v1::DecodeRequest proto = LargeDecode();
  const std::string q = Rows(512 * kQRow);
  Loaded<DecodeMessage> copied(proto, q, How::kCopied);
  for (const How how : {How::kCopied, How::kStreamed, How::kStreamedInPieces}) {
    Loaded<DecodeMessage> other(proto, q, how);
    Loaded<DecodeMessage>& loaded = how == How::kCopied ? copied : other;
    ASSERT_TRUE(loaded.status.ok()) << loaded.status;
    loaded.message.Load(0, loaded.SlotBegin());
    const engine::DecodeRequest& request = loaded.message.parts()[0]->request;
    EXPECT_EQ(std::memcmp(request.q, q.data(), q.size()), 0);
    EXPECT_EQ(std::memcmp(request.k, proto.k().data(), proto.k().size()), 0);
    EXPECT_EQ(std::memcmp(request.v, proto.v().data(), proto.v().size()), 0);
    EXPECT_THAT(std::string(request.items[5].status.message()),
                HasSubstr("item 5: v[3, 1, 1] is NaN"));
    for (size_t i = 0; i < 8; ++i) {
      const engine::DecodeItem& item = copied.message.parts()[0]->request.items[i];
      EXPECT_EQ(request.items[i].status, item.status);
      if (i == 5) continue;
      EXPECT_EQ(request.items[i].kv_digest, item.kv_digest);
    }
  }
}

// Every third item is of the second device.
TEST(DecodeMessage, OfTwoDevicesComesToTheSameStreamedAndCopied) {
  v1::DecodeRequest proto = LargeDecode();
  for (int i = 0; i < 8; i += 3) proto.mutable_handles(i)->set_home(1);
  const std::string q = Rows(512 * kQRow);
  Loaded<DecodeMessage> copied(proto, q, How::kCopied, /*devices=*/2);
  Loaded<DecodeMessage> streamed(proto, q, How::kStreamedInPieces, /*devices=*/2);
  const size_t items_count[2] = {5, 3};
  for (size_t part = 0; part < 2; ++part) {
    for (Loaded<DecodeMessage>* const loaded : {&copied, &streamed}) {
      ASSERT_TRUE(loaded->status.ok()) << loaded->status;
      ASSERT_EQ(loaded->message.parts().size(), 2U);
      loaded->message.Load(part, loaded->SlotBegin(part));
    }
    const engine::DecodeRequest& request = streamed.message.parts()[part]->request;
    const engine::DecodeRequest& expected = copied.message.parts()[part]->request;
    ASSERT_EQ(request.items.size(), items_count[part]);
    const size_t tokens = request.items.size() * 64;
    EXPECT_EQ(std::memcmp(request.q, expected.q, tokens * kQRow * 2), 0);
    EXPECT_EQ(std::memcmp(request.k, expected.k, tokens * kKvRow * 2), 0);
    EXPECT_EQ(std::memcmp(request.v, expected.v, tokens * kKvRow * 2), 0);
    for (size_t i = 0; i < request.items.size(); ++i) {
      EXPECT_EQ(request.items[i].status, expected.items[i].status);
      if (!request.items[i].status.ok()) continue;
      EXPECT_EQ(request.items[i].kv_digest, expected.items[i].kv_digest);
    }
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
  v1::AppendRequest bad = proto;
  SetElement(bad.mutable_k(), (300 + 299) * kKvRow, 0xFF80);
  std::vector<uint64_t> digests;
  for (const How how : {How::kCopied, How::kStreamed, How::kStreamedInPieces}) {
    Loaded<AppendMessage> loaded(proto, "", how);
    ASSERT_TRUE(loaded.status.ok()) << loaded.status;
    ASSERT_TRUE(loaded.message.Load(loaded.SlotBegin()).ok());
    const engine::AppendRequest& request = loaded.message.request();
    EXPECT_EQ(std::memcmp(request.k, proto.k().data(), proto.k().size()), 0);
    EXPECT_EQ(std::memcmp(request.v, proto.v().data(), proto.v().size()), 0);
    if (how == How::kCopied)
      digests.assign(request.slice_digests.begin(), request.slice_digests.end());
    EXPECT_EQ(request.slice_digests, absl::Span<const uint64_t>(digests));

    Loaded<AppendMessage> refused(bad, "", how);
    ASSERT_TRUE(refused.status.ok());
    EXPECT_THAT(std::string(refused.message.Load(refused.SlotBegin()).message()),
                HasSubstr("layer 2: k[299, 0, 0] is -inf"));
  }
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
  Loaded<AppendMessage> whole(proto, "", How::kStreamed);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  uint8_t* const begin = whole.SlotBegin();
  auto* const slot = reinterpret_cast<uint16_t*>(begin);
  whole.message.BeginLoad(begin);
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
