#include "config/load.h"

#include <cstdio>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/report.h"

namespace fp8kvd::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// Appended to whatever a test is about, since a configuration needs a model.
constexpr const char* kModel =
    "\nmodels { name: \"m\" layers: 2 q_heads: 2 kv_heads: 1 head_dim: 64 }\n";
constexpr const char* kJsonModel =
    R"("models": [{"name": "m", "layers": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 64}])";

struct Given {
  std::vector<const char*> flags;
  std::vector<std::string> environment;
};

absl::StatusOr<Loaded> LoadedFrom(const std::string& text, Format format, const Given& given) {
  const auto command_line = ParseCommandLine(given.flags);
  if (!command_line.ok()) return command_line.status();
  return LoadText(text, format, "file", "", *command_line, given.environment);
}

Loaded Good(const std::string& text, Format format = Format::kTextproto, const Given& given = {}) {
  auto loaded = LoadedFrom(text, format, given);
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  return loaded.ok() ? *std::move(loaded) : Loaded{};
}

Loaded Text(const std::string& text, const Given& given = {}) {
  return Good(text + kModel, Format::kTextproto, given);
}

std::string Refusal(const std::string& text, Format format = Format::kTextproto,
                    const Given& given = {}) {
  const auto loaded = LoadedFrom(text, format, given);
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(loaded.status().message());
}

std::string JsonRefusal(const std::string& text) { return Refusal(text, Format::kJson); }

// --- who wins

TEST(Load, WhatNobodySetsHasItsDefault) {
  EXPECT_EQ(Text("").options.server.poller_threads, ServerOptions().poller_threads);
  EXPECT_THAT(Text("").sources, IsEmpty());
}

TEST(Load, TheFileWinsOverTheDefaults) {
  EXPECT_EQ(Text("server { poller_threads: 3 }").options.server.poller_threads, 3);
}

TEST(Load, TheEnvironmentWinsOverTheFile) {
  const Loaded loaded = Text("server { poller_threads: 3 }",
                             {.flags = {}, .environment = {"FP8KVD_POLLER_THREADS=4"}});
  EXPECT_EQ(loaded.options.server.poller_threads, 4);
  EXPECT_EQ(loaded.sources.at("server.poller_threads"), "FP8KVD_POLLER_THREADS");
}

TEST(Load, FlagsWinOverAll) {
  const Loaded loaded =
      Text("server { poller_threads: 3 }",
           {.flags = {"--poller_threads=5"}, .environment = {"FP8KVD_POLLER_THREADS=4"}});
  EXPECT_EQ(loaded.options.server.poller_threads, 5);
  EXPECT_EQ(loaded.sources.at("server.poller_threads"), "--poller_threads");
}

TEST(Load, AZeroInTheFileIsAValueAndNotAnAbsence) {
  EXPECT_EQ(Text("drain { drain_ms_max: 0 }").options.drain.drain_ms_max, 0);
}

TEST(Load, EveryTypeOfValueIsRead) {
  const Options options =
      Text(
          "server { http_address: \"\" }"
          "engine { device: cpu staging_bytes: 300000000 batch_invariant: true }"
          "policy { cache_share_min: 0.35 }"
          "log { log_level: warning log_format: json }")
          .options;
  EXPECT_EQ(options.server.http_address, "");
  EXPECT_EQ(options.engine.device, DeviceChoice::kCpu);
  EXPECT_EQ(options.engine.staging_bytes, 300000000);
  EXPECT_TRUE(options.engine.batch_invariant);
  EXPECT_EQ(options.policy.cache_share_min, 0.35);
  EXPECT_EQ(options.log.log_level, LogLevel::kWarning);
  EXPECT_EQ(options.log.log_format, LogFormat::kJson);
}

// --- both formats

TEST(Load, JsonSaysTheSameAsTextproto) {
  const Loaded json = Good(
      R"({"server": {"poller_threads": 3},
          "engine": {"device": "cpu", "staging_bytes": "300000000"},
          "policy": {"allow_fp8_kv": true, "cache_share_min": 3.5e-1},
          "models": [{"name": "m", "layers": 4, "q_heads": 2, "kv_heads": 1, "head_dim": 64,
                      "window": 100, "softcap": 30.5, "precision": "fp8_kv", "bf16_layers": "0",
                      "layer_rules": [{"layers": "3", "window": 0, "has_sinks": true}]}]})",
      Format::kJson);
  const Loaded text = Good(
      "server { poller_threads: 3 } engine { device: cpu staging_bytes: 300000000 }"
      "policy { allow_fp8_kv: true cache_share_min: 0.35 }"
      "models { name: \"m\" layers: 4 q_heads: 2 kv_heads: 1 head_dim: 64 window: 100"
      "         softcap: 30.5 precision: fp8_kv bf16_layers: \"0\""
      "         layer_rules { layers: \"3\" window: 0 has_sinks: true } }");
  EXPECT_EQ(EffectiveConfig(json), EffectiveConfig(text));
  EXPECT_EQ(json.models[0].geometry.groups.size(), 3u);
}

TEST(Load, JsonNamesMayBeWrittenAsProtobufWritesThem) {
  const std::string text = absl::StrCat(R"({"server": {"pollerThreads": 3}, )", kJsonModel, "}");
  EXPECT_EQ(Good(text, Format::kJson).options.server.poller_threads, 3);
}

TEST(Load, JsonNullIsTheSameAsAbsent) {
  const std::string text =
      absl::StrCat(R"({"server": {"poller_threads": null}, "engine": null, )", kJsonModel, "}");
  EXPECT_EQ(Good(text, Format::kJson).options.server.poller_threads,
            ServerOptions().poller_threads);
}

TEST(Load, WhatTheReportPrintsLoadsToTheSame) {
  const Loaded loaded = Good(
      "server { listen_address: \"[::1]:0\" port_file: \"/tmp/a \\\"b\\\" \xC3\xA9\" }"
      "policy { allow_fp8_kv: true cache_share_min: 0.1 }"
      "models { name: \"m\" layers: 4 q_heads: 2 kv_heads: 1 head_dim: 64 sm_scale: 0.1"
      "         other_bytes: 0 layer_rules { layers: \"3\" window: 7 softcap: 1.1 } }");
  const std::string printed = EffectiveConfig(loaded);
  Loaded again = Good(printed);
  again.sources = loaded.sources;  // only the comments differ
  EXPECT_EQ(EffectiveConfig(again), printed);
  EXPECT_EQ(again.options.server.port_file, "/tmp/a \"b\" \xC3\xA9");
  EXPECT_EQ(again.options.models[0].other_bytes, 0);
}

// --- unknown names

TEST(Load, AnUnknownKeyIsRefusedWithItsLineAndASuggestion) {
  EXPECT_EQ(Refusal("server {\n  poller_threads: 3\n  lisen_address: \"a:1\"\n}\n"),
            "file:3: unknown key lisen_address; did you mean listen_address?");
  EXPECT_EQ(Refusal("\n\nsever { }"), "file:3: unknown key sever; did you mean server?");
  EXPECT_THAT(Refusal("models {\n layer: 2 }"),
              HasSubstr("file:2: unknown key layer; did you mean layers?"));
  EXPECT_THAT(Refusal("models { layer_rules {\n\n windows: 2 } }"),
              HasSubstr("file:3: unknown key windows; did you mean window?"));
  EXPECT_THAT(Refusal("drain { xyzzy: 1 }"),
              HasSubstr("unknown key xyzzy; known here: drain_ms_max, snapshot_dir"
                        ", snapshot_ms_max"));
}

TEST(Load, AnUnknownKeyInJsonIsRefusedTheSameWay) {
  EXPECT_EQ(JsonRefusal("{\n\"server\": {\n\"lisen_address\": \"a:1\"}}"),
            "file:3: unknown key \"lisen_address\"; did you mean listen_address?");
  EXPECT_EQ(JsonRefusal("{\n\"sever\": {}}"),
            "file:2: unknown key \"sever\"; did you mean server?");
  EXPECT_EQ(JsonRefusal("{\"models\": [\n{\"layer\": 2}]}"),
            "file:2: unknown key \"layer\"; did you mean layers?");
  EXPECT_EQ(JsonRefusal("{\"models\": [{\"layer_rules\": [\n\n{\"windows\": 2}]}]}"),
            "file:3: unknown key \"windows\"; did you mean window?");
  EXPECT_EQ(JsonRefusal("{\"poller_threads\": 2}"),
            "file:1: unknown key \"poller_threads\"; it belongs into server");
}

TEST(Load, AnEmptyNameInJsonIsAnUnknownKeyEverywhere) {
  for (const char* text : {R"({"": 1})", R"({"server": {"": 1}})", R"({"models": [{"": 1}]})",
                           R"({"models": [{"layer_rules": [{"": 1}]}]})"}) {
    EXPECT_THAT(JsonRefusal(text), StartsWith("file:1: unknown key \"\"; known here: ")) << text;
  }
}

TEST(Load, AKeyInBothSpellingsStandsTwice) {
  EXPECT_THAT(JsonRefusal("{\"server\": {\"poller_threads\": 1,\n\"pollerThreads\": 2}}"),
              StartsWith("file:2: poller_threads stands twice"));
  EXPECT_THAT(JsonRefusal("{\"models\": [{\"head_dim\": 64,\n\"headDim\": 64}]}"),
              StartsWith("file:2: head_dim stands twice"));
}

TEST(Load, AnUnknownFlagIsRefusedWithASuggestion) {
  EXPECT_EQ(Refusal("", Format::kTextproto, {.flags = {"--poler-threads=2"}, .environment = {}}),
            "unknown flag --poler-threads; did you mean --poller_threads?");
}

TEST(Load, AnUnknownVariableIsAWarningBecauseOrchestratorsSetSome) {
  const Loaded loaded =
      Text("", {.flags = {},
                .environment = {"FP8KVD_PORT=tcp://10.0.0.1:50051", "FP8KVD_POLER_THREADS=1",
                                "PATH=/bin", "broken", "fp8kvd_poller_threads=7"}});
  EXPECT_THAT(loaded.warnings, ElementsAre(HasSubstr("FP8KVD_PORT is no key of ours"),
                                           HasSubstr("did you mean FP8KVD_POLLER_THREADS?")));
}

// --- wrong values

TEST(Load, OutOfRangeSaysWhatIsAskedWhatIsAllowedAndWhatToDo) {
  const std::string rest =
      "poller_threads is \"65\", allowed is a whole number, 1 to 64 threads; set it within, or "
      "leave "
      "it out for the default";
  EXPECT_EQ(Refusal("server {\n poller_threads: 65 }"), "file:2: " + rest);
  EXPECT_EQ(JsonRefusal("{\"server\": {\n\"poller_threads\": 65}}"), "file:2: " + rest);
  EXPECT_EQ(Refusal("", Format::kTextproto, {.flags = {"--poller_threads=65"}, .environment = {}}),
            "--poller_threads: " + rest);
  EXPECT_EQ(
      Refusal("", Format::kTextproto, {.flags = {}, .environment = {"FP8KVD_POLLER_THREADS=65"}}),
      "FP8KVD_POLLER_THREADS: " + rest);
}

TEST(Load, NumbersThatOverflowTheirTypeAreRefused) {
  EXPECT_THAT(Refusal("server { poller_threads: 4294967298 }"),  // 2 in 32 bits
              StartsWith("file:1: Integer out of range"));
  EXPECT_THAT(JsonRefusal(R"({"server": {"poller_threads": 4294967298}})"),
              HasSubstr("poller_threads is \"4294967298\", allowed is"));
  EXPECT_THAT(JsonRefusal(R"({"cache": {"pool_bytes": 18446744073709551617}})"),
              HasSubstr("pool_bytes is \"18446744073709551617\""));
  EXPECT_THAT(JsonRefusal(R"({"policy": {"cache_share_min": 1e999}})"),
              HasSubstr("cache_share_min is \"1e999\""));
  EXPECT_THAT(JsonRefusal(R"({"policy": {"cache_share_min": NaN}})"),
              HasSubstr("cache_share_min is \"NaN\""));
  EXPECT_THAT(Refusal("policy { cache_share_min: nan }"), HasSubstr("allowed is a number"));
}

TEST(Load, WrongTypesAreRefusedWithTheirLine) {
  EXPECT_THAT(JsonRefusal("{\n\"server\":\n3}"),
              StartsWith("file:2: server is a number, allowed is an object"));
  EXPECT_THAT(JsonRefusal("{\"server\": {\"listen_address\":\n3}}"),
              HasSubstr("listen_address is a number, allowed is a text in quotes"));
  EXPECT_THAT(JsonRefusal(R"({"engine": {"batch_invariant": 1}})"),
              HasSubstr("batch_invariant is a number, allowed is true or false"));
  EXPECT_THAT(JsonRefusal(R"({"server": {"poller_threads": [2]}})"),
              HasSubstr("poller_threads is an array, allowed is a number"));
  EXPECT_THAT(JsonRefusal(R"({"server": {"poller_threads": "2x"}})"),
              HasSubstr("poller_threads is \"2x\", allowed is a whole number"));
  EXPECT_THAT(JsonRefusal(R"({"server": {"poller_threads": 2.5}})"),
              HasSubstr("poller_threads is \"2.5\", allowed is a whole number"));
  EXPECT_THAT(JsonRefusal(R"({"engine": {"device": "gpu"}})"),
              HasSubstr("device is \"gpu\", allowed is auto, cpu, cuda; did you mean cpu?"));
  EXPECT_THAT(JsonRefusal(R"({"models": {"name": "m"}})"),
              HasSubstr("models is an object, allowed is an array"));
  EXPECT_THAT(JsonRefusal("[]"), HasSubstr("the configuration is an array"));
  EXPECT_THAT(Refusal("server { poller_threads: \"2\" }"), StartsWith("file:1: "));
  EXPECT_THAT(Refusal("engine { device: gpu }"), StartsWith("file:1: "));
}

TEST(Load, AddressesNamesAndTextsKeepTheirForms) {
  for (const char* bad : {"", ":1", "host", "host:", "host:65536", "host:-1", "host:x", "a b:1",
                          "a\\n:1", "::1:50051", "[]:1"}) {
    EXPECT_THAT(Refusal(absl::StrCat("server { listen_address: \"", bad, "\" }")),
                HasSubstr("allowed is"))
        << bad;
  }
  for (const char* good : {"127.0.0.1:0", "[::1]:65535", "0.0.0.0:1", "node-1.local:50051"}) {
    EXPECT_EQ(Text(absl::StrCat("server { listen_address: \"", good, "\" }"))
                  .options.server.listen_address,
              good);
  }
  EXPECT_THAT(Refusal("models { name: \"a b\" }"),
              HasSubstr("name is \"a b\", allowed is 1 to 128"));
  EXPECT_THAT(Refusal("models { name: \"" + std::string(129, 'a') + "\" }"), HasSubstr("1 to 128"));
  EXPECT_THAT(Refusal("server { port_file: \"a\\nb\" }"), HasSubstr("without control characters"));
  EXPECT_THAT(Refusal("server { port_file: \"\\xff\" }"), HasSubstr("allowed is UTF-8"));
}

TEST(Load, AFlagTakesOneValueWithAnEqualsSign) {
  const auto refusal = [](std::vector<const char*> flags) {
    return Refusal("", Format::kTextproto, {.flags = std::move(flags), .environment = {}});
  };
  EXPECT_THAT(refusal({"--poller_threads"}), HasSubstr("lacks its value; write --key=value"));
  EXPECT_THAT(refusal({"--poller_threads="}), HasSubstr("poller_threads is \"\""));
  EXPECT_THAT(refusal({"--poller_threads=1", "--poller_threads=2"}), HasSubstr("given twice"));
  EXPECT_THAT(refusal({"--help=yes"}), HasSubstr("takes no value"));
  EXPECT_THAT(refusal({"models"}), HasSubstr("\"models\" is no flag"));
  EXPECT_THAT(refusal({"-h"}), HasSubstr("is no flag"));
  EXPECT_THAT(refusal({"--"}), HasSubstr("unknown flag --"));
  EXPECT_TRUE(
      Text("", {.flags = {"--allow_fp8_kv"}, .environment = {}}).options.policy.allow_fp8_kv);
  EXPECT_FALSE(
      Text("policy { allow_fp8_kv: true }", {.flags = {"--allow_fp8_kv=false"}, .environment = {}})
          .options.policy.allow_fp8_kv);
}

// --- broken files

TEST(Load, TheFirstErrorOfATextprotoNamesItsLine) {
  EXPECT_THAT(Refusal("server {\n poller_threads 3 }"), StartsWith("file:2: "));
  EXPECT_THAT(Refusal("server {\n"), StartsWith("file:2: "));
  EXPECT_THAT(Refusal("server { poller_threads: 1\n poller_threads: 2 }"), StartsWith("file:2: "));
  EXPECT_THAT(Refusal("server { port_file: \"a\nb\" }"), StartsWith("file:1: "));
  EXPECT_THAT(Refusal("server {\n port_file: \"\xFF\" }"), StartsWith("file:2: bytes"));
  EXPECT_THAT(Refusal("[type.googleapis.com/x] { }"), StartsWith("file:1: "));
}

TEST(Load, AnEmptyFileIsToldThatAModelIsMissing) {
  for (const char* empty : {"", "\n# nothing\n"}) {
    EXPECT_THAT(Refusal(empty),
                HasSubstr("no model is configured, 1 to 64 are allowed; add models"));
  }
  EXPECT_THAT(JsonRefusal("{}"), HasSubstr("no model is configured"));
  EXPECT_THAT(JsonRefusal(""), HasSubstr("got the end of the file"));
}

TEST(Load, AHugeTextIsRefusedUnread) {
  const std::string huge(kConfigBytesMax + 1, ' ');
  EXPECT_THAT(Refusal(huge), HasSubstr("1048577 bytes, allowed are 1048576"));
  EXPECT_THAT(JsonRefusal(huge), HasSubstr("allowed are 1048576"));
}

// --- what belongs together

TEST(Load, ModelsNeedDistinctNamesAndThereIsABoundOfThem) {
  EXPECT_THAT(Refusal(std::string(kModel) + kModel),
              HasSubstr("model \"m\" is configured twice; give each model its own name"));
  EXPECT_THAT(Refusal("models { layers: 2 q_heads: 2 kv_heads: 1 head_dim: 64 }"),
              HasSubstr("a model has no name"));
  std::string many;
  for (int i = 0; i < 65; ++i) absl::StrAppend(&many, "models { name: \"m", i, "\" }\n");
  EXPECT_THAT(Refusal(many), StartsWith("file:65: models are more than 64"));
}

TEST(Load, Fp8KvWithoutTheOptInIsAConfigurationError) {
  const std::string fp8 =
      "models { name: \"m\" layers: 2 q_heads: 2 kv_heads: 1 head_dim: 64 precision: fp8_kv }";
  EXPECT_THAT(Refusal(fp8), HasSubstr("needs the opt-in allow_fp8_kv"));
  const Loaded loaded =
      Good(fp8, Format::kTextproto, {.flags = {"--allow_fp8_kv"}, .environment = {}});
  EXPECT_EQ(loaded.models[0].geometry.groups[0].precision, Precision::kFp8Kv);
}

TEST(Load, SettingsThatContradictEachOtherAreRefused) {
  const std::string model = kModel;
  EXPECT_THAT(Refusal("cache { pool_bytes: 1000000 pool_fraction: 0.5 }" + model),
              HasSubstr("pool_bytes and pool_fraction are both set"));
  EXPECT_THAT(Refusal("cache { lease_ttl_ms: 1000 lease_ttl_ms_max: 500 }" + model),
              HasSubstr("lease_ttl_ms is 1000, allowed is up to lease_ttl_ms_max 500"));
  EXPECT_THAT(Refusal("engine { staging_bytes: 1048576 }" + model),
              HasSubstr("allowed is from twice message_bytes_max, 134217728"));
  EXPECT_THAT(Refusal("server { transport_bytes_max: 16777216 }" + model),
              HasSubstr("allowed is from four times message_bytes_max, 268435456"));
  EXPECT_THAT(Refusal("server { http_address: \"127.0.0.1:50051\" }" + model),
              HasSubstr("are both 127.0.0.1:50051"));
  EXPECT_THAT(Refusal("cache { seqs_max: 15 }" + model),
              HasSubstr("seqs_max is 15, the models' expected_seqs are 16"));
  EXPECT_THAT(Refusal("cache { seq_len_max: 4095 }" + model),
              HasSubstr("expected_tokens is 4096, allowed is up to seq_len_max 4095"));
  EXPECT_THAT(Refusal("cache { pool_bytes: 1 }" + model), HasSubstr("raise pool_bytes"));
  EXPECT_THAT(Refusal("models { name: \"m\" hf_config: \"x\" layers: 2 }"),
              HasSubstr("hf_config gives the whole shape"));
}

// --- files

class LoadFile : public ::testing::Test {
 protected:
  // A file of this test's own, gone with it.
  std::string Written(const std::string& name, const std::string& text) {
    const std::string path = ::testing::TempDir() + "fp8kvd_load_test_" + name;
    std::ofstream(path, std::ios::binary) << text;
    paths_.push_back(path);
    return path;
  }

  void TearDown() override {
    for (const std::string& path : paths_) std::remove(path.c_str());
  }

  static absl::StatusOr<Loaded> FromPath(const std::string& path,
                                         const std::vector<std::string>& environment = {}) {
    CommandLine command_line;
    command_line.config_path = path;
    return Load(command_line, environment);
  }

 private:
  std::vector<std::string> paths_;
};

TEST_F(LoadFile, TheNameTellsTheFormat) {
  EXPECT_TRUE(FromPath(Written("a.textproto", kModel)).ok());
  EXPECT_TRUE(FromPath(Written("a.json", absl::StrCat("{", kJsonModel, "}"))).ok());
  const auto other = FromPath(Written("a.yaml", kModel));
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("allowed are .textproto and .json"));
}

TEST_F(LoadFile, TheEnvironmentMayNameTheFile) {
  const std::string path = Written("env.textproto", kModel);
  EXPECT_TRUE(FromPath("", {"FP8KVD_CONFIG=" + path}).ok());
  EXPECT_THAT(std::string(FromPath("").status().message()), HasSubstr("start with --config=FILE"));
}

TEST_F(LoadFile, AFileThatCannotBeReadSaysWhy) {
  const auto missing = FromPath(::testing::TempDir() + "fp8kvd_no_such_file.json");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("No such file"));
  for (const char* no_file : {"/", "/dev/zero"}) {
    EXPECT_THAT(std::string(ReadFileBounded(no_file, 100).status().message()),
                HasSubstr("cannot be read (not a regular file)"));
  }
}

TEST_F(LoadFile, AFileIsReadNoFurtherThanItsBound) {
  EXPECT_EQ(*ReadFileBounded(Written("b", "12345"), 5), "12345");
  EXPECT_EQ(ReadFileBounded(Written("c", "123456"), 5).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(LoadFile, TheExampleLoadsAndHasEveryModelOfTheQuickStart) {
  const auto loaded = FromPath("deploy/example.textproto");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  std::vector<std::string> names;
  for (const PlannedModel& model : loaded->models) names.push_back(model.geometry.name);
  EXPECT_THAT(names, ElementsAre("gemma3_270m_bf16", "gemma3_270m_fp8", "smollm2_135m_bf16",
                                 "smollm2_135m_fp8"));
  EXPECT_EQ(loaded->models[1].geometry.layer[11].window, 0);
  EXPECT_EQ(loaded->models[1].geometry.layer[10].window, 512);
  EXPECT_EQ(loaded->models[3].geometry.groups[0].precision, Precision::kFp8Kv);
}

}  // namespace
}  // namespace fp8kvd::config
