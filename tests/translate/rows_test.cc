#include "server/translate/rows.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include <xxhash.h>

#include "tests/translate/rows.h"

namespace fp8kvd::translate {
namespace {

TEST(FindBad, FindsTheFirstAtEveryPlaceOfEveryLength) {
  for (size_t size = 1; size <= 40; ++size) {
    for (size_t at = 0; at < size; ++at) {
      std::vector<uint16_t> values(size, 0x4D7F);
      values[at] = 0x4D80;
      values[size - 1] = 0xFFFF;
      const auto bad = FindBad(values);
      ASSERT_TRUE(bad.has_value());
      EXPECT_EQ(bad->index, static_cast<int64_t>(at));
    }
    EXPECT_FALSE(FindBad(std::vector<uint16_t>(size, 0xCD7F)).has_value());
  }
  std::vector<uint16_t> values(5000, 0x3F80);
  values[4321] = 0x7F80;
  EXPECT_EQ(FindBad(values)->index, 4321);
}

TEST(RowsDigest, KAndVDoNotStandForEachOther) {
  const std::vector<uint16_t> a(64, 1);
  const std::vector<uint16_t> b(64, 2);
  EXPECT_NE(RowsDigest(a, b), RowsDigest(b, a));
  EXPECT_EQ(RowsDigest(a, b), XXH3_64bits_withSeed(b.data(), 128, XXH3_64bits(a.data(), 128)));
}

// Where a tensor begins in a slot.
struct alignas(256) Slot {
  uint16_t rows[20000] = {};
};

std::string Bytes(const std::vector<uint16_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

// Sizes below, at and beyond a block of the digest, behind three other bytes of their field, which
// lies in one piece, or in pieces that end within blocks and within elements.
TEST(StreamRows, CopiesAndSeesAndDigestsAsTheOthersDo) {
  const auto slot = std::make_unique<Slot>();
  constexpr size_t kWhole = 1 << 20;
  for (const size_t piece_bytes : {kWhole, size_t{65536}, size_t{8191}, size_t{13}}) {
    for (const int64_t count : {16, 48, 4096, 4112, 20000}) {
      std::vector<uint16_t> values(count);
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<uint16_t>(0x3F00 + i % 251);
      const CutField field("abc" + Bytes(values), piece_bytes);
      std::optional<BadElement> bad;
      for (const uint64_t seed : {uint64_t{0}, uint64_t{12345}}) {
        std::fill(std::begin(slot->rows), std::end(slot->rows), uint16_t{0});
        RangeReader reader(&field.pieces());
        EXPECT_EQ(StreamRows({&reader, 3}, slot->rows, count, seed, &bad),
                  XXH3_64bits_withSeed(values.data(), static_cast<size_t>(count) * 2, seed));
        FinishStreaming();
        EXPECT_TRUE(std::equal(values.begin(), values.end(), slot->rows)) << count;
      }
      EXPECT_FALSE(bad.has_value());
      for (const int64_t at : {count - 1, count / 2, int64_t{0}}) {
        values[at] = 0x7F80;  // so are those after it
        const CutField spoiled("abc" + Bytes(values), piece_bytes);
        std::optional<BadElement> found;
        std::optional<BadElement> found_beside_a_digest;
        RangeReader reader(&spoiled.pieces());
        StreamRows({&reader, 3}, slot->rows, count, &found);
        RangeReader again(&spoiled.pieces());
        StreamRows({&again, 3}, slot->rows, count, 0, &found_beside_a_digest);
        FinishStreaming();
        EXPECT_TRUE(std::equal(values.begin(), values.end(), slot->rows)) << count;
        for (const auto& first : {found, found_beside_a_digest}) {
          ASSERT_TRUE(first.has_value()) << count << " " << at;
          EXPECT_EQ(first->index, at);
          EXPECT_EQ(first->text, "inf");
        }
      }
    }
  }
}

TEST(CopyRows, CopiesAndSeesAndDigestsAsTheOthersDo) {
  for (const int64_t count : {1, 63, 64, 2048, 8195}) {
    std::vector<uint16_t> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<uint16_t>(0x3F00 + i % 251);
    const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
    std::vector<uint16_t> copy(count);
    std::vector<uint16_t> digested(count);
    std::optional<BadElement> bad;
    CopyRows(bytes, copy.data(), count, &bad);
    EXPECT_EQ(CopyRows(bytes, digested.data(), count, 12345, &bad),
              XXH3_64bits_withSeed(bytes, static_cast<size_t>(count) * 2, 12345));
    EXPECT_EQ(copy, values);
    EXPECT_EQ(digested, values);
    EXPECT_FALSE(bad.has_value());
    values[count - 1] = 0xFF80;
    CopyRows(bytes, copy.data(), count, &bad);
    ASSERT_TRUE(bad.has_value());
    EXPECT_EQ(bad->index, count - 1);
    EXPECT_EQ(bad->text, "-inf");
  }
}

// Rows of one part, of a part and a little, and of several.
TEST(RowStream, ComesPartByPartToWhatOneCallDoes) {
  for (const int64_t count : {int64_t{16}, RowStream::kPart, 2 * RowStream::kPart + 48}) {
    std::vector<uint16_t> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<uint16_t>(0x3F00 + i % 251);
    const CutField field(Bytes(values), 16385);
    RangeReader reader(&field.pieces());
    std::vector<Slot> slots(1 + count * 2 / sizeof(Slot));
    uint16_t* const slot = slots[0].rows;
    RowStream stream;
    stream.Begin({&reader, 0}, slot, count, 12345);
    std::optional<BadElement> bad;
    int64_t parts = 1;
    while (stream.Continue(&bad)) ++parts;
    FinishStreaming();
    EXPECT_EQ(parts, (count + RowStream::kPart - 1) / RowStream::kPart);
    EXPECT_FALSE(bad.has_value());
    EXPECT_TRUE(std::equal(values.begin(), values.end(), slot)) << count;
    EXPECT_EQ(stream.digest(),
              XXH3_64bits_withSeed(values.data(), static_cast<size_t>(count) * 2, 12345));

    values[count - 1] = 0x7F80;
    const CutField spoiled(Bytes(values), 16385);
    RangeReader again(&spoiled.pieces());
    stream.Begin({&again, 0}, slot, count, 0);
    while (stream.Continue(&bad)) EXPECT_FALSE(bad.has_value()) << "it is in the last part";
    ASSERT_TRUE(bad.has_value());
    EXPECT_EQ(bad->index, count - 1);
  }
}

}  // namespace
}  // namespace fp8kvd::translate
