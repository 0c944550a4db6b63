#include "server/translate/rows.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include <xxhash.h>

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

}  // namespace
}  // namespace fp8kvd::translate
