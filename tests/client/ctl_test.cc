// fp8kvctl without a process: the command line, its help, its exit codes and what it prints.
#include <sstream>

#include "gmock/gmock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/handles.h"
#include "client/cc/ctl/output.h"
#include "tests/client/fake_server.h"

namespace fp8kvd::ctl {
namespace {

using client::FakeServer;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

struct Ran {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Ran Ctl(const std::vector<std::string>& words) {
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunCommandLine(words, out, err);
  return {exit_code, out.str(), err.str()};
}

// The one JSON object of an output; a test failure when it is none.
google::protobuf::Struct Parsed(const std::string& out) {
  google::protobuf::Struct object;
  const auto status = google::protobuf::util::JsonStringToMessage(out, &object);
  EXPECT_TRUE(status.ok()) << status.ToString() << " in " << out;
  return object;
}

TEST(Help, NamesEveryCommandAndTheExitCodes) {
  const Ran ran = Ctl({"--help"});
  EXPECT_EQ(ran.exit_code, kExitOk);
  for (const Command* command : Commands()) EXPECT_THAT(ran.out, HasSubstr(command->name));
  EXPECT_THAT(ran.out, HasSubstr("exit codes"));
}

TEST(Help, OfEveryCommandShowsItsFlagsAndAnExampleOfItself) {
  for (const Command* command : Commands()) {
    SCOPED_TRACE(command->name);
    const Ran ran = Ctl({command->name, "--help"});
    EXPECT_EQ(ran.exit_code, kExitOk);
    EXPECT_THAT(ran.err, IsEmpty());
    EXPECT_THAT(ran.out, HasSubstr(std::string("example:\n  fp8kvctl ") + command->name));
    for (const FlagSpec& flag : command->flags) {
      EXPECT_THAT(ran.out, HasSubstr(std::string("--") + flag.name));
    }
    EXPECT_EQ(Ctl({"help", command->name}).out, ran.out);
  }
}

TEST(Help, OfACommandWithoutADaemonHasNoFlagsForOne) {
  const Ran ran = Ctl({"top", "--help"});
  EXPECT_THAT(ran.out, Not(HasSubstr("--target")));
  EXPECT_THAT(ran.out, HasSubstr("--json"));
}

// An example that its own command's parser refuses would be no example.
TEST(Help, EveryExampleParses) {
  for (const Command* command : Commands()) {
    SCOPED_TRACE(command->name);
    std::istringstream example(command->example);
    std::vector<std::string> words{std::istream_iterator<std::string>(example), {}};
    ASSERT_GT(words.size(), 2U);
    words.erase(words.begin(), words.begin() + 2);
    std::ostringstream sink;
    EXPECT_TRUE(Invocation::Parse(*command, words, sink, sink).ok());
  }
}

struct Misuse {
  const char* name;
  std::vector<std::string> words;
  const char* says;
};

class Misuses : public testing::TestWithParam<Misuse> {};

TEST_P(Misuses, ExitsWithTwoAndSaysWhy) {
  const Ran ran = Ctl(GetParam().words);
  EXPECT_EQ(ran.exit_code, kExitUsage);
  EXPECT_THAT(ran.out, IsEmpty());
  EXPECT_THAT(ran.err, HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    Usage, Misuses,
    testing::Values(
        Misuse{"nothing", {}, "usage: fp8kvctl"},
        Misuse{"unknown_command", {"inof"}, "unknown command inof"},
        Misuse{"unknown_flag",
               {"info", "--targte=x"},
               "unknown flag --targte; did you mean --target?"},
        Misuse{"single_dash", {"info", "-json"}, "unknown flag"},
        Misuse{"unknown_flag_before",
               {"--targte=x", "info"},
               "unknown flag --targte; did you mean --target?"},
        Misuse{"own_flag_before", {"--all", "free"}, "own flags stand behind it"},
        Misuse{"single_dash_before", {"-json", "info"}, "unknown flag"},
        Misuse{"flags_without_command", {"--json"}, "usage: fp8kvctl"},
        Misuse{"flag_before_without_value", {"--target"}, "usage: fp8kvctl"},
        Misuse{"flag_before_and_behind", {"--json", "info", "--json"}, "given twice"},
        Misuse{"daemon_flag_for_top", {"--target=x", "top"}, "unknown flag --target"},
        Misuse{"daemon_of_a_local_measurement", {"accuracy", "x", "--target=y"}, "add --remote"},
        Misuse{"switch_with_value", {"info", "--json=yes"}, "takes no value"},
        Misuse{"flag_without_value", {"info", "--target"}, "wants a value"},
        Misuse{"flag_twice", {"info", "--target=a", "--target=b"}, "given twice"},
        Misuse{"argument_not_wanted", {"info", "x"}, "unexpected argument x"},
        Misuse{"not_a_number", {"info", "--timeout_ms=soon"}, "soon, wanted a whole number"},
        Misuse{"number_out_of_range", {"info", "--timeout_ms=0"}, "from 1 to"},
        Misuse{"empty_target", {"info", "--target="}, "--target is empty"},
        Misuse{"bad_handle", {"stat", "1.2.3"}, "not a handle"},
        Misuse{"free_of_nothing", {"free"}, "name handles, or give --all"},
        Misuse{"free_of_all_and_one", {"free", "--all", "1.1.1.0"}, "name handles, or give --all"},
        Misuse{"replay_of_nothing", {"replay"}, "at least one capture"},
        Misuse{"replay_precision", {"replay", "--precision=fp4", "x"}, "wanted bf16, fp8_kv"}),
    [](const auto& misuse) { return std::string(misuse.param.name); });

TEST(Unreachable, ExitsWithThreeAndNamesTheTarget) {
  FakeServer server;
  const std::string target = server.target();
  server.Stop();
  for (const char* command : {"info", "stat", "bench"}) {
    SCOPED_TRACE(command);
    const Ran ran = Ctl({command, "--timeout_ms=2000", "--target", target});
    EXPECT_EQ(ran.exit_code, kExitUnreachable);
    EXPECT_THAT(ran.out, IsEmpty());
    EXPECT_THAT(ran.err, HasSubstr("cannot reach " + target));
  }
}

TEST(Info, PrintsATableForPeopleAndJsonForMachines) {
  FakeServer server;
  const Ran people = Ctl({"info", "--target", server.target()});
  EXPECT_EQ(people.exit_code, kExitOk);
  EXPECT_THAT(people.out, HasSubstr("fp8_kv"));
  EXPECT_THAT(people.out, HasSubstr("host a-boot-id, shared memory by /run/fake.sock"));
  const Ran machines = Ctl({"info", "--json", "--target", server.target()});
  const auto object = Parsed(machines.out);
  EXPECT_EQ(object.fields().at("version").string_value(), "fake");
  EXPECT_EQ(object.fields().at("shm_socket").string_value(), "/run/fake.sock");
  EXPECT_EQ(object.fields().at("host_id").string_value(), "a-boot-id");
  EXPECT_EQ(object.fields().at("limits").struct_value().fields().at("items_max").number_value(), 7);
}

// Known fault: a loop whose step a server gives, which may be 0 or beyond what was made for it.
TEST(Bench, EndsWhateverAPageHasOfTokens) {
  for (const uint32_t page_tokens : {0U, 1U << 30}) {
    FakeServer server;
    server.group.add_layers(0);
    server.group.set_window(32);
    server.group.set_page_tokens(page_tokens);
    const Ran ran = Ctl({"bench", "--batch=1", "--seq_len=2000", "--seconds=0.1",
                         "--timeout_ms=2000", "--target", server.target()});
    EXPECT_EQ(ran.exit_code != kExitOk, ran.out.empty()) << ran.err;
  }
}

TEST(SharedFlags, MayStandBeforeTheCommandToo) {
  FakeServer server;
  const std::string behind = Ctl({"info", "--json", "--target", server.target()}).out;
  EXPECT_EQ(Parsed(behind).fields().at("version").string_value(), "fake");
  EXPECT_EQ(Ctl({"--json", "--target", server.target(), "info"}).out, behind);
  EXPECT_EQ(Ctl({"--target=" + server.target(), "info", "--json"}).out, behind);
  EXPECT_EQ(Ctl({"--json", "info", "--help"}).out, Ctl({"info", "--help"}).out);
}

TEST(Stat, ListsHandlesThatTheOtherCommandsTake) {
  FakeServer server;
  const Ran ran = Ctl({"stat", "--json", "--limit=4", "--target", server.target()});
  EXPECT_EQ(ran.exit_code, kExitOk);
  const auto object = Parsed(ran.out);
  const auto& sequences = object.fields().at("sequences").list_value();
  ASSERT_EQ(sequences.values_size(), 4);
  const std::string handle =
      sequences.values(3).struct_value().fields().at("handle").string_value();
  EXPECT_EQ(handle, "3.0.0.0");
  EXPECT_EQ(Ctl({"free", "--target", server.target(), handle}).exit_code, kExitOk);
  EXPECT_THAT(server.freed(), testing::ElementsAre(3));
}

TEST(Free, OfAllGoesThroughEveryPageOfTheList) {
  FakeServer server;
  const Ran ran = Ctl({"free", "--all", "--json", "--target", server.target()});
  EXPECT_EQ(Parsed(ran.out).fields().at("freed").number_value(), 9);
  EXPECT_EQ(server.freed().size(), 9U);
}

TEST(Handles, ComeBackFromTheirText) {
  const client::Handle handle = {
      .seq_id = ~uint64_t{0}, .generation = 0xFFFFFFFF, .incarnation = 7, .home = 1};
  EXPECT_EQ(ParseHandle(HandleText(handle)).value(), handle);
  for (const char* bad : {"", "1", "1.2.3.", "1.2.3.4.5", "1.2.3.g", "1..3.4", "-1.2.3.4",
                          "1.100000000.3.4", "10000000000000000.1.1.1"}) {
    EXPECT_FALSE(ParseHandle(bad).ok()) << bad;
  }
}

TEST(Output, JsonEscapesWhatMustBeEscaped) {
  Json json;
  json.BeginObject().Key("a\"\\\n\x01").Text("\t").Key("b").BeginArray();
  json.Number(0.1).Number(1.0 / 0.0).Count(~uint64_t{0}).Bool(true).EndArray().EndObject();
  EXPECT_EQ(json.str(),
            "{\"a\\\"\\\\\\u000a\\u0001\":\"\\u0009\",\"b\":[0.1,null,18446744073709551615,true]}");
}

TEST(Output, ATableAlignsNumbersRightAndWordsLeft) {
  Table table({"name", "n"});
  table.Add({"a", "1"});
  table.Add({"longer", "100"});
  std::ostringstream out;
  table.Print(out);
  EXPECT_EQ(out.str(), "name      n\na         1\nlonger  100\n");
}

TEST(Output, NothingWritesToTheTerminalOnItsOwn) {
  EXPECT_EQ(Printable("a\x1b[2Jb\nc\x7f"), "a?[2Jb\nc?");
}

TEST(Output, AQuantileIsTheNearestRank) {
  std::vector<double> values = {4, 1, 3, 2};
  EXPECT_EQ(Quantile(values, 0.5), 2);
  EXPECT_EQ(Quantile(values, 0.99), 4);
  std::vector<double> none;
  EXPECT_EQ(Quantile(none, 0.5), 0);
}

}  // namespace
}  // namespace fp8kvd::ctl
