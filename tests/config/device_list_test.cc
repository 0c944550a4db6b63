#include "config/device_list.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "config/load.h"

namespace fp8kvd::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(DeviceList, NamesDevicesAsAListOfNumbersAndRanges) {
  EXPECT_THAT(ParseDeviceList("").value(), IsEmpty());
  EXPECT_THAT(ParseDeviceList("0").value(), ElementsAre(0));
  EXPECT_THAT(ParseDeviceList("2,0").value(), ElementsAre(0, 2));
  EXPECT_THAT(ParseDeviceList("0-3").value(), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(ParseDeviceList("0-15").value(), SizeIs(16));
}

TEST(DeviceList, RefusesWhatIsNone) {
  for (const char* text : {"all", "-1", "0,,1", "64", "0-16", "cuda:0"}) {
    const absl::Status status = ParseDeviceList(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("allowed are 16 numbers from 0 to 63 at most"));
  }
}

TEST(DeviceList, IsCheckedWhereAConfigurationIsLoaded) {
  const auto loaded = LoadText(
      "engine { devices: \"x\" }\n"
      "models { name: \"m\" layers: 2 q_heads: 4 kv_heads: 2 head_dim: 64 }\n",
      Format::kTextproto, "file", "", CommandLine(), {});
  EXPECT_THAT(std::string(loaded.status().message()), HasSubstr("devices is \"x\""));
}

// Parts are rounded up: as many sequences as one device would hold find a place on several.
TEST(OnOneOf, IsADevicesPartOfTheWorkload) {
  ModelOptions model;
  model.expected_seqs = 7;
  EXPECT_EQ(OnOneOf(1, model).expected_seqs, 7);
  EXPECT_EQ(OnOneOf(2, model).expected_seqs, 4);
  EXPECT_EQ(OnOneOf(8, model).expected_seqs, 1);
  CacheOptions cache;
  cache.pool_bytes = 1000;
  cache.pool_fraction = 0.5;
  EXPECT_EQ(OnOneOf(4, cache).pool_bytes, 250);
  EXPECT_EQ(OnOneOf(4, cache).pool_fraction, 0.5);  // of its own memory
}

}  // namespace
}  // namespace fp8kvd::config
