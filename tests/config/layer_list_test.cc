#include "config/layer_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fp8kvd::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int32_t> Parsed(const char* text, int32_t layers) {
  const auto list = ParseLayerList(text, layers);
  EXPECT_TRUE(list.ok()) << list.status();
  return list.value_or(std::vector<int32_t>{});
}

TEST(LayerList, NamesSingleLayersRangesAndSteps) {
  EXPECT_THAT(Parsed("5,11,17", 18), ElementsAre(5, 11, 17));
  EXPECT_THAT(Parsed("0-3", 18), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Parsed("5-17/6", 18), ElementsAre(5, 11, 17));
  EXPECT_THAT(Parsed("1-4/2, 9", 18), ElementsAre(1, 3, 9));
}

TEST(LayerList, IsASetInAscendingOrder) {
  EXPECT_THAT(Parsed("7,2,7,1-2", 18), ElementsAre(1, 2, 7));
}

TEST(LayerList, RefusesALayerThatTheModelLacksAndNamesTheLast) {
  const auto list = ParseLayerList("16-18", 18);
  ASSERT_EQ(list.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(list.status().message()), HasSubstr("names layer 18"));
  EXPECT_THAT(std::string(list.status().message()), HasSubstr("0 to 17"));
}

TEST(LayerList, RefusesEveryOtherForm) {
  for (const char* text : {"", ",", "a", "1,", "-1", "1-", "3-1", "1-5/0", "1/2", "1-5/-1", "+1",
                           "1-2-3", "1 2", "0x1", "99999999999", "1-99999999999", "1.0"}) {
    EXPECT_EQ(ParseLayerList(text, 18).status().code(), absl::StatusCode::kInvalidArgument)
        << "\"" << text << "\"";
  }
}

TEST(LayerList, AStepPastTheEndDoesNotOverflow) {
  EXPECT_THAT(Parsed("1-17/2147483647", 18), ElementsAre(1));
}

TEST(LayerList, FormatsToTheShortestFormAndBack) {
  const std::vector<std::pair<std::vector<int32_t>, std::string>> cases = {
      {{}, ""},
      {{4}, "4"},
      {{4, 5}, "4,5"},
      {{4, 5, 6}, "4-6"},
      {{5, 11, 17}, "5-17/6"},
      {{0, 2, 4, 5, 6, 7}, "0-4/2,5-7"},
  };
  for (const auto& [layers, text] : cases) {
    EXPECT_EQ(FormatLayerList(layers), text);
    if (!text.empty()) {
      EXPECT_EQ(Parsed(text.c_str(), 18), layers);
    }
  }
}

}  // namespace
}  // namespace fp8kvd::config
