#include "config/keys.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/config.pb.h"
#include "config/suggest.h"

namespace fp8kvd::config {
namespace {

using ::testing::HasSubstr;

// Section and name of every scalar of a message.
template <typename Owner>
std::set<std::string> Names(absl::Span<const Key<Owner>> keys, const std::string& section) {
  std::set<std::string> names;
  for (const Key<Owner>& key : keys) {
    if (section == key.section) names.insert(key.name);
  }
  return names;
}

std::set<std::string> ScalarFields(const google::protobuf::Descriptor* message) {
  std::set<std::string> names;
  for (int i = 0; i < message->field_count(); ++i) {
    if (message->field(i)->message_type() == nullptr) names.insert(message->field(i)->name());
  }
  return names;
}

TEST(Keys, AreTheFieldsOfTheConfigurationFile) {
  const google::protobuf::Descriptor* config = v1::Config::descriptor();
  for (int i = 0; i < config->field_count(); ++i) {
    if (config->field(i)->is_repeated()) continue;
    EXPECT_EQ(Names(Keys(), config->field(i)->name()),
              ScalarFields(config->field(i)->message_type()))
        << config->field(i)->name();
  }
  EXPECT_EQ(Names(ModelKeys(), ""), ScalarFields(v1::Model::descriptor()));
  EXPECT_EQ(Names(LayerRuleKeys(), ""), ScalarFields(v1::LayerRule::descriptor()));
  EXPECT_EQ(Names(TenantKeys(), ""), ScalarFields(v1::Tenant::descriptor()));
}

TEST(Keys, EnumeratorsAreThoseOfTheConfigurationFile) {
  const std::pair<const google::protobuf::EnumDescriptor*, std::vector<std::string>> cases[] = {
      {v1::Engine::Device_descriptor(), {"auto", "cpu", "cuda"}},
      {v1::Model::Precision_descriptor(), {"auto", "bf16", "fp8_kv"}},
      {v1::Log::Level_descriptor(), {"debug", "info", "warning", "error"}},
      {v1::Log::Format_descriptor(), {"text", "json"}}};
  for (const auto& [descriptor, names] : cases) {
    ASSERT_EQ(descriptor->value_count(), static_cast<int>(names.size()));
    for (int i = 0; i < descriptor->value_count(); ++i) {
      EXPECT_EQ(descriptor->value(i)->name(), names[i]);
    }
  }
  EXPECT_EQ(PrintValue(DeviceChoice::kCuda), "cuda");
  EXPECT_EQ(PrintValue(PrecisionChoice::kFp8Kv), "fp8_kv");
  EXPECT_EQ(PrintValue(LogLevel::kError), "error");
  EXPECT_EQ(PrintValue(LogFormat::kJson), "json");
}

TEST(Keys, NamesAreDistinctBecauseFlagsHaveNoSection) {
  std::set<std::string> names;
  for (const Key<Options>& key : Keys()) EXPECT_TRUE(names.insert(key.name).second) << key.name;
}

TEST(Keys, EveryDefaultIsWithinItsOwnRange) {
  for (const Key<Options>& key : Keys()) {
    Options options;
    std::string text = ValueText(key, options);
    if (text.size() >= 2 && text.front() == '"') text = text.substr(1, text.size() - 2);
    EXPECT_TRUE(SetValue(key, text, options).ok()) << key.name << " " << text;
  }
}

TEST(Keys, BothEdgesOfARangeAreAllowedAndTheirNeighboursAreNot) {
  for (const Key<Options>& key : Keys()) {
    if (KindOf(key) != ValueKind::kNumber || std::string(key.unit) == "ratio") continue;
    Options options;
    const auto min = static_cast<int64_t>(key.min);
    const auto max = static_cast<int64_t>(key.max);
    EXPECT_TRUE(SetValue(key, std::to_string(min), options).ok()) << key.name;
    EXPECT_TRUE(SetValue(key, std::to_string(max), options).ok()) << key.name;
    EXPECT_FALSE(SetValue(key, std::to_string(min - 1), options).ok()) << key.name;
    EXPECT_FALSE(SetValue(key, std::to_string(max + 1), options).ok()) << key.name;
  }
}

TEST(Help, NamesEveryKeyOnce) {
  const std::string help = HelpText();
  for (const Key<Options>& key : Keys()) {
    EXPECT_THAT(help, HasSubstr("\n  " + FlagName(key) + "\n      " + key.text));
  }
  for (const Key<ModelOptions>& key : ModelKeys()) EXPECT_THAT(help, HasSubstr(key.text));
  EXPECT_THAT(help, HasSubstr("  --poller_threads\n"
                              "      threads that read and answer calls "
                              "(1 to 64 threads; default 1)\n"));
}

TEST(Help, WritesWholeNumbersOut) {
  EXPECT_THAT(HelpText(), HasSubstr("(1048576 to 1125899906842624 bytes; default 268435456)"));
}

TEST(Suggestion, IsTheNearestWordIfItIsNear) {
  const std::vector<std::string> words = {"listen_address", "http_address", "drain_ms_max"};
  EXPECT_EQ(NearestWord("listen_adress", words), "listen_address");
  EXPECT_EQ(NearestWord("Listen-Address", words), "listen_address");
  EXPECT_EQ(NearestWord("address", words), "");
  EXPECT_EQ(NearestWord("", words), "");
  EXPECT_EQ(NearestWord(std::string(100000, 'a'), words), "");
}

}  // namespace
}  // namespace fp8kvd::config
