// A Decode whose sequences are on two devices: into their slots, and back into one reply.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/translate/replies.h"
#include "server/translate/requests.h"
#include "tests/translate/catalog.h"

namespace fp8kvd::translate {
namespace {

std::string Rows(int64_t elements, uint16_t first) {
  std::vector<uint16_t> values(elements);
  for (int64_t i = 0; i < elements; ++i) values[i] = static_cast<uint16_t>(first + i);
  return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

// Items of 1, 2 and 1 tokens; the first and the last are on device `home`.
v1::DecodeRequest ThreeItems(uint32_t home) {
  v1::DecodeRequest request;
  request.set_model("plain");
  for (int i = 0; i < 3; ++i) {
    v1::Handle* const handle = request.add_handles();
    handle->set_seq_id(10 + i);
    handle->set_generation(1);
    if (i != 1) handle->set_home(home);
    request.add_positions(i * 7);
    request.add_q_lens(i == 1 ? 2 : 1);
  }
  request.set_q(Rows(4 * kQRow, 0x3F80));
  request.set_k(Rows(4 * kKvRow, 0x4000));
  request.set_v(Rows(4 * kKvRow, 0xC000));
  request.set_want_lse(true);
  request.set_out_type(v1::OUT_TYPE_FP32);
  return request;
}

// Checked against two devices, and loaded; its message comes in uneven pieces.
struct Loaded {
  explicit Loaded(const v1::DecodeRequest& proto) : bytes(proto.SerializeAsString()) {
    catalog.devices.resize(2);
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    for (size_t at = 0; at < bytes.size(); at += 100) {
      pieces.emplace_back(data + at, std::min<size_t>(100, bytes.size() - at));
    }
    const absl::Status status = message.Check(catalog, pieces);
    EXPECT_TRUE(status.ok()) << status;
    for (size_t i = 0; status.ok() && i < message.parts().size(); ++i) {
      slots.emplace_back(message.parts()[i]->slot_bytes / 8 + 1, ~uint64_t{0});
      message.Load(i, reinterpret_cast<uint8_t*>(slots.back().data()));
    }
  }
  engine::DecodeRequest& request(size_t part) const { return message.parts()[part]->request; }

  const std::string bytes;
  Catalog catalog = SmallCatalog();
  std::vector<Piece> pieces;
  DecodeMessage message;
  std::vector<std::vector<uint64_t>> slots;
};

// The rows of each device's items lie in its own slot, one after the other, and are digested there.
TEST(DecodeOfTwoDevices, IsARequestForEach) {
  Loaded split(ThreeItems(/*home=*/1));
  Loaded whole(ThreeItems(/*home=*/0));
  ASSERT_EQ(split.message.parts().size(), 2U);
  ASSERT_EQ(whole.message.parts().size(), 1U);
  const engine::DecodeRequest& all = whole.request(0);
  const std::vector<std::vector<size_t>> of_device = {{1}, {0, 2}};
  for (size_t part = 0; part < 2; ++part) {
    EXPECT_EQ(split.message.parts()[part]->device, static_cast<int32_t>(part));
    const engine::DecodeRequest& request = split.request(part);
    ASSERT_EQ(request.items.size(), of_device[part].size());
    int32_t row = 0;
    for (size_t i = 0; i < request.items.size(); ++i) {
      const engine::DecodeItem& item = request.items[i];
      const engine::DecodeItem& same = all.items[of_device[part][i]];
      EXPECT_EQ(item.row, row);
      row += item.q_len;
      EXPECT_EQ(item.handle.seq_id, same.handle.seq_id);
      EXPECT_EQ(item.pos, same.pos);
      EXPECT_EQ(item.kv_digest, same.kv_digest);
      EXPECT_EQ(split.message.RowOf(item), same.row);
      const auto is_same = [&](const uint16_t* ours, const uint16_t* theirs, int64_t elements) {
        return std::memcmp(ours + item.row * elements, theirs + same.row * elements,
                           item.q_len * elements * 2) == 0;
      };
      EXPECT_TRUE(is_same(request.q, all.q, kQRow));
      EXPECT_TRUE(is_same(request.k, all.k, kKvRow));
      EXPECT_TRUE(is_same(request.v, all.v, kKvRow));
    }
  }
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(split.message.item(i).handle.seq_id, all.items[i].handle.seq_id) << i;
  }
}

// Which refuses it: no store of ours has that home.
TEST(DecodeOfTwoDevices, WithAHandleOfNoneOfThemGoesToTheFirst) {
  const Loaded split(ThreeItems(/*home=*/2));
  ASSERT_EQ(split.message.parts().size(), 1U);
  EXPECT_EQ(split.message.parts()[0]->device, 0);
  EXPECT_EQ(split.message.item(0).handle.home, 2U);
  EXPECT_EQ(split.message.item(1).handle.home, 0U);
}

TEST(DecodeOfTwoDevices, NamesAnItemByItsPlaceInTheMessage) {
  v1::DecodeRequest proto = ThreeItems(/*home=*/1);
  const uint16_t infinite = 0x7F80;
  std::memcpy(proto.mutable_q()->data() + 3 * kQRow * 2, &infinite, 2);
  const Loaded split(proto);  // the second item of its device
  EXPECT_THAT(std::string(split.message.item(2).status.message()),
              testing::StartsWith("item 2: q["));
  EXPECT_TRUE(split.message.item(0).status.ok());
  EXPECT_TRUE(split.message.item(1).status.ok());
}

TEST(DecodeOfTwoDevices, IsAnsweredInTheMessagesOrder) {
  Loaded split(ThreeItems(/*home=*/1));
  for (size_t part = 0; part < 2; ++part) {
    engine::DecodeRequest& request = split.request(part);
    for (int i = 0; i < 2 * kQRow; ++i) {  // two rows each
      static_cast<float*>(request.out)[i] = static_cast<float>(1000 * (part + 1) + i);
    }
    for (int i = 0; i < 2 * 4; ++i) request.lse[i] = static_cast<float>(100 * (part + 1) + i);
    request.batch_items = 3 + static_cast<int32_t>(part);
    request.fenced = 1300 - static_cast<int64_t>(100 * part);  // the first was the last
  }
  v1::DecodeResponse reply;
  ASSERT_TRUE(Parse(DecodeReply(split.message, /*now=*/1340), &reply));
  ASSERT_EQ(reply.out().size(), static_cast<size_t>(4 * kQRow * 4));
  const auto at = [](const std::string& floats, size_t index) {
    float value = 0;
    std::memcpy(&value, floats.data() + index * 4, 4);
    return value;
  };
  EXPECT_EQ(at(reply.out(), 0), 2000);      // item 0: device 1, its row 0
  EXPECT_EQ(at(reply.out(), kQRow), 1000);  // item 1: device 0, rows 0 and 1
  EXPECT_EQ(at(reply.out(), 3 * kQRow - 1), 1511);
  EXPECT_EQ(at(reply.out(), 3 * kQRow), 2256);  // item 2: device 1, its row 1
  EXPECT_EQ(at(reply.out(), 4 * kQRow - 1), 2511);
  EXPECT_EQ(at(reply.lse(), 0), 200);
  EXPECT_EQ(at(reply.lse(), 4), 100);
  EXPECT_EQ(at(reply.lse(), 12), 204);
  EXPECT_EQ(reply.timings().batch_items(), 3U);
  EXPECT_EQ(reply.timings().reply_us(), 40U);

  split.request(1).items[1].status = absl::NotFoundError("gone");
  ASSERT_TRUE(Parse(DecodeReply(split.message, /*now=*/1340), &reply));
  ASSERT_EQ(reply.item_errors_size(), 1);
  EXPECT_EQ(reply.item_errors(0).index(), 2U);
  EXPECT_EQ(at(reply.out(), 3 * kQRow), 0);
  EXPECT_EQ(at(reply.lse(), 12), 0);
  EXPECT_EQ(at(reply.out(), 0), 2000);
}

}  // namespace
}  // namespace fp8kvd::translate
