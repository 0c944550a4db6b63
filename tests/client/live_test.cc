// What a daemon says of the load that it really serves, of a calibration and of rows sent to it:
// the built programs over real sockets, a capture replayed as the load.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cc/client.h"
#include "client/cc/ctl/commands.h"
#include "config/calibration.h"
#include "tests/client/daemon_process.h"

namespace fp8kvd::client {
namespace {

using testing::HasSubstr;
using testing::Not;

// SmolLM2's layer 16 as a model of one layer, so that a replayed capture is whole steps: 768 bytes
// a token in bf16. A replay decodes one sequence of 1,500 tokens: 1.15 MB a step.
std::string Config(int expected_seqs, int expected_tokens, int64_t other_bytes) {
  std::ostringstream text;
  text << "policy { allow_fp8_kv: true }\n"
       << "models { name: \"m\" layers: 1 q_heads: 9 kv_heads: 3 head_dim: 64\n  expected_seqs: "
       << expected_seqs << " expected_tokens: " << expected_tokens
       << " other_bytes: " << other_bytes << " }\n";
  return text.str();
}

struct Ran {
  int exit_code = 0;
  std::string out;
};

Ran Ctl(std::vector<std::string> words) {
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = ctl::RunCommandLine(words, out, err);
  return {exit_code, out.str() + err.str()};
}

Ran Replay(const DaemonProcess& daemon) {
  return Ctl({"replay", "tests/data/captures/smollm2_text_a_layer16.safetensors", "--rounds=1",
              "--target=" + daemon.target()});
}

TEST(Live, AReplayedLoadThatIsSmallerThanConfiguredContradictsFp8Kv) {
  // 16 x 4,096 x 768 B beside 20 MB: a share of 0.72. Replayed: 1.17 MB beside it, 0.055.
  DaemonProcess daemon(Config(16, 4096, 20'000'000));
  const Ran before = Ctl({"plan", "--live", "--target=" + daemon.target()});
  EXPECT_THAT(before.out, HasSubstr("no whole step of this model was served yet"));
  ASSERT_EQ(Replay(daemon).exit_code, ctl::kExitOk);

  const Ran live = Ctl({"plan", "--live", "--target=" + daemon.target()});
  EXPECT_EQ(live.exit_code, ctl::kExitOk);
  EXPECT_THAT(live.out,
              HasSubstr("hint: model \"m\" is fp8_kv for the configured 16 x 4096 tokens"));
  EXPECT_THAT(live.out, HasSubstr("it served 1 x 1516 tokens a step: cache_share 0.055"));
  EXPECT_THAT(live.out, HasSubstr("so bf16 would be the choice"));
  EXPECT_EQ(daemon.End(SIGTERM), 0);
  EXPECT_THAT(daemon.Log(), HasSubstr("it served 1 x 1516 tokens a step"));
}

TEST(Live, AReplayedLoadAsConfiguredAgrees) {
  DaemonProcess daemon(Config(1, 1516, 1'000'000));  // 1.16 MB beside 1 MB
  ASSERT_EQ(Replay(daemon).exit_code, ctl::kExitOk);
  const Ran live = Ctl({"plan", "--live", "--json", "--target=" + daemon.target()});
  EXPECT_EQ(live.exit_code, ctl::kExitOk);
  EXPECT_THAT(live.out, HasSubstr(R"("batch":1,"tokens":1516.5,"cache_share":0.53)"));
  EXPECT_THAT(live.out, HasSubstr(R"("contradicts":false)"));
  EXPECT_THAT(live.out, HasSubstr(R"("r_source":"bytes")"));
  EXPECT_EQ(daemon.End(SIGTERM), 0);
  EXPECT_THAT(daemon.Log(), Not(HasSubstr("but over")));
}

// Rows sent to the daemon come to what they come to here, bit for bit: JSON's numbers have all
// their digits. Only the check of the kernels stays where they are.
TEST(Remote, AccuracyIsThatOfTheLocalReport) {
  DaemonProcess daemon(Config(1, 1, 1));
  const std::string capture = "tests/data/captures/smollm2_text_a_layer16.safetensors";
  const Ran here = Ctl({"accuracy", "--json", capture});
  ASSERT_EQ(here.exit_code, ctl::kExitOk) << here.out;
  const size_t kernel = here.out.find(R"("kernel":{)");
  ASSERT_NE(kernel, std::string::npos);
  std::string wanted = here.out;
  wanted.replace(kernel, here.out.find('}', kernel) + 1 - kernel, R"("kernel":null)");
  const std::string html = testing::TempDir() + "/remote.html";
  const std::string target = "--target=" + daemon.target();
  const Ran there = Ctl({"accuracy", "--json", "--remote", target, capture});
  EXPECT_EQ(there.exit_code, ctl::kExitOk);
  EXPECT_EQ(there.out, wanted);
  const Ran table = Ctl({"accuracy", "--remote", target, capture, "--html=" + html});
  EXPECT_EQ(table.exit_code, ctl::kExitOk) << table.out;
  EXPECT_THAT(table.out, HasSubstr("the daemon's kernels were not checked"));
  EXPECT_THAT(table.out, Not(HasSubstr("V scale x 1.05")));
  std::ifstream file(html);
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(file), {}),
              HasSubstr("Measured by a daemon"));
}

TEST(Remote, AccuracyWithoutADaemonSaysThatItIsNotThere) {
  const Ran ran = Ctl({"accuracy", "--remote", "--target=127.0.0.1:1", "--timeout_ms=200",
                       "tests/data/captures/smollm2_text_a_layer16.safetensors"});
  EXPECT_EQ(ran.exit_code, ctl::kExitUnreachable) << ran.out;
}

// Runs fp8kvd --calibrate and gives its exit code.
int Calibrate(const std::string& config_path, const std::string& calibration_path) {
  const pid_t pid =
      Spawn({BuiltProgram("fp8kvd"), "--config=" + config_path, "--device=" + DeviceUnderTest(),
             "--calibrate", "--calibration_file=" + calibration_path},
            -1);
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

class Calibrated : public testing::Test {
 protected:
  Calibrated() {
    char name[] = "/tmp/fp8kvd_test_XXXXXX";
    folder = mkdtemp(name);
    std::ofstream(folder / "config.textproto") << config;
  }
  ~Calibrated() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }
  std::string Path(const char* name) const { return folder / name; }

  const std::string config = Config(16, 4096, 20'000'000);
  std::filesystem::path folder;
};

TEST_F(Calibrated, TheDaemonMeasuresItsDeviceAndLaterStartsDecideByIt) {
  ASSERT_EQ(Calibrate(Path("config.textproto"), Path("measured.json")), 0);
  std::ifstream file(Path("measured.json"));
  const std::string json(std::istreambuf_iterator<char>(file), {});
  const auto measured = config::ParseCalibration(json);
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_GT(measured->call_us, 10);
  EXPECT_GT(measured->read_bytes_per_s, 1e8);

  DaemonProcess daemon(config, 0, {"--calibration_file=" + Path("measured.json")});
  EXPECT_THAT(daemon.Log(), HasSubstr("(measured)"));
  EXPECT_THAT(daemon.Log(), HasSubstr("step with a call of "));
  const auto client = Client::Connect({.target = daemon.target()}).value();
  const auto plan = client->PlanPrecision({.rpc_us = 1000});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->r_source, "measured");
  EXPECT_EQ(plan->rpc_us, 1000);
  EXPECT_EQ(plan->read_bytes_per_s, measured->read_bytes_per_s);
  // (kv_bytes + other_bytes) / read_bytes_per_s and a millisecond for the one layer's call.
  const double step_s = (plan->kv_bytes + plan->other_bytes) / *plan->read_bytes_per_s + 1e-3;
  const double saved_s = plan->kv_bytes * (1 - plan->r) / *plan->read_bytes_per_s;
  EXPECT_NEAR(*plan->speedup_with_calls, step_s / (step_s - saved_s), 1e-9);
}

TEST_F(Calibrated, AnotherDevicesMeasurementsAreNotUsedAndThatIsSaid) {
  config::Calibration foreign;
  foreign.version = "0.0.0";
  foreign.device_name = "another device";
  foreign.points = {{64, 3, 3, 1, 64, 10, 5}};
  std::ofstream(Path("foreign.json")) << config::FormatCalibration(foreign);
  DaemonProcess daemon(config, 0, {"--calibration_file=" + Path("foreign.json")});
  EXPECT_THAT(daemon.Log(), HasSubstr("is of fp8kvd 0.0.0 on another device, this is "));
  EXPECT_THAT(daemon.Log(), HasSubstr("(bytes)"));
}

TEST_F(Calibrated, BeforeTheFirstCalibrationTheDaemonStartsAndSaysHow) {
  DaemonProcess daemon(config, 0, {"--calibration_file=" + Path("none.json")});
  EXPECT_THAT(daemon.Log(), HasSubstr("fp8kvd --calibrate makes it"));
}

TEST_F(Calibrated, WithoutAFileToWriteNothingIsMeasured) {
  EXPECT_EQ(Calibrate(Path("config.textproto"), ""), 1);
}

}  // namespace
}  // namespace fp8kvd::client
