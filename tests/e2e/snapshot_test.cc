// Sequences outlive a planned restart and nothing else: the built daemon, stopped, started, killed,
// with a folder for its snapshot.
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/e2e/calls.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/http_get.h"

namespace fp8kvd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;
using Stub = v1::DecodeAttention::Stub;

constexpr uint16_t kTwo = 0x4000;
constexpr uint16_t kThree = 0x4040;
constexpr uint16_t kFour = 0x4080;

// A folder for snapshots, and daemons that use it.
class SnapshotFolderTest : public ::testing::Test {
 protected:
  SnapshotFolderTest() { std::filesystem::create_directory(path()); }

  std::filesystem::path path() const { return folder_ / "snapshots"; }
  std::filesystem::path snapshot() const { return path() / "fp8kvd.snapshot"; }
  std::string flag() const { return "--snapshot_dir=" + path().string(); }
  DaemonSetup SetupWith(std::vector<std::string> flags = {}) const {
    flags.push_back(flag());
    return {.flags = std::move(flags)};
  }
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path())) {
      names.insert(entry.path().filename());
    }
    return names;
  }
  // A run that leaves a snapshot of one sequence.
  v1::Handle Leave() {
    Daemon daemon(SetupWith());
    const auto stub = Connect(daemon.address());
    const v1::Handle handle = Create(stub.get(), 1)[0];
    v1::DecodeResponse reply;
    EXPECT_TRUE(Decode(stub.get(), StepOf({handle}, 0, 0, kTwo), &reply).ok());
    EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
    EXPECT_TRUE(std::filesystem::exists(snapshot())) << daemon.log();
    return handle;
  }

  TempFolder folder_;
};

// So many tokens of that value in both layers.
void Append(Stub* stub, const v1::Handle& handle, uint64_t pos, int n, uint16_t value,
            const std::string& model) {
  grpc::ClientContext context;
  v1::AppendResponse appended;
  const auto writer = stub->Append(&context, &appended);
  for (int layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(writer->Write(ChunkOf(handle, layer, pos, n, value, model)));
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
}

// Empty, or the error of the one item.
std::string Step(Stub* stub, const v1::Handle& handle, uint64_t pos, uint16_t value,
                 const std::string& model, std::string* out) {
  v1::DecodeResponse reply;
  const grpc::Status status = Decode(stub, StepOf({handle}, 1, pos, value, model), &reply);
  if (!status.ok()) return status.error_message();
  if (reply.item_errors_size() > 0) return reply.item_errors(0).error().message();
  *out = reply.out();
  return "";
}

TEST_F(SnapshotFolderTest, ClientsGoOnAfterAPlannedRestartAndNotAfterAKill) {
  const std::vector<std::string> models = {"m", "m8"};
  std::vector<v1::Handle> parents;
  std::vector<v1::Handle> children;
  {
    Daemon daemon(SetupWith());
    EXPECT_THAT(daemon.log(), HasSubstr("no snapshot in "));
    const auto stub = Connect(daemon.address());
    for (const std::string& model : models) {
      parents.push_back(Create(stub.get(), 1, model)[0]);
      Append(stub.get(), parents.back(), 0, 100, kTwo, model);
      grpc::ClientContext context;
      v1::ForkSequencesRequest request;
      v1::ForkSequencesResponse response;
      *request.mutable_parent() = parents.back();
      request.set_count(1);
      ASSERT_TRUE(stub->ForkSequences(&context, request, &response).ok());
      children.push_back(response.handles(0));
      Append(stub.get(), parents.back(), 100, 99, kFour, model);
    }
    EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
    EXPECT_THAT(daemon.log(), HasSubstr("saved 4 sequences, "));
  }
  struct stat found = {};
  ASSERT_EQ(stat(snapshot().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600U);

  Daemon second(SetupWith());
  EXPECT_THAT(second.log(), HasSubstr("restored 4 sequences, "));
  EXPECT_THAT(Names(), ElementsAre("fp8kvd.lock")) << "loaded once";
  EXPECT_THAT(HttpGet(second.http_port(), "/metrics"),
              HasSubstr("\nfp8kvd_snapshot_restored_seqs 4\n"));
  const auto stub = Connect(second.address());
  for (size_t i = 0; i < models.size(); ++i) {
    // As after an answer that was lost, then the next token: 100 of 2.0 and 100 of 4.0 make 3.0.
    Append(stub.get(), parents[i], 100, 99, kFour, models[i]);
    std::string out;
    EXPECT_EQ(Step(stub.get(), parents[i], 199, kFour, models[i], &out), "");
    EXPECT_EQ(out, Repeat(kThree, kQRowBytes)) << models[i];
    EXPECT_EQ(Step(stub.get(), children[i], 100, kTwo, models[i], &out), "");
    EXPECT_EQ(out, Repeat(kTwo, kQRowBytes)) << models[i];
  }
  second.process().Kill(SIGKILL);
  EXPECT_EQ(second.process().Wait(), 128 + SIGKILL);
  EXPECT_THAT(Names(), ElementsAre("fp8kvd.lock"));

  Daemon third(SetupWith());
  EXPECT_THAT(third.log(), HasSubstr("no snapshot in "));
  const auto again = Connect(third.address());
  std::string out;
  EXPECT_THAT(Step(again.get(), parents[0], 200, kTwo, "m", &out),
              HasSubstr("no sequence has this handle"));
  EXPECT_EQ(third.Stop(), 0) << third.log();
  EXPECT_THAT(third.log(), HasSubstr("no sequences to save"));
}

// Rows of about 1, different everywhere.
std::string RandomRows(int64_t bytes, uint32_t seed) {
  std::string rows;
  uint32_t state = seed * 2'654'435'761U + 1;
  for (int64_t i = 0; i < bytes / 2; ++i) {
    state = state * 1'664'525U + 1'013'904'223U;
    const uint32_t bits = 0x3F00U + ((state >> 16) & 0x80FFU);
    rows += static_cast<char>(bits & 0xFF);
    rows += static_cast<char>(bits >> 8);
  }
  return rows;
}

// The device's pages come back as they were: the same query has the same bits of an answer, full
// pages and half-filled ones, shared and not.
TEST_F(SnapshotFolderTest, AttentionIsTheSameBitForBitAfterAPlannedRestart) {
  std::map<std::string, std::vector<v1::Handle>> handles;
  std::map<std::string, std::string> before;
  const auto attend = [&](Stub* stub, const std::string& model) {
    v1::DecodeRequest request;
    request.set_model(model);
    request.set_layer(1);
    request.set_out_type(v1::OUT_TYPE_FP32);
    for (const v1::Handle& handle : handles[model]) {
      *request.add_handles() = handle;
      request.add_positions(499);
    }
    request.set_q(RandomRows(static_cast<int64_t>(handles[model].size()) * kQRowBytes, 3));
    v1::DecodeResponse reply;
    const grpc::Status status = Decode(stub, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.item_errors_size(), 0);
    return reply.out();
  };
  {
    Daemon daemon(SetupWith());
    const auto stub = Connect(daemon.address());
    for (const std::string model : {"m", "m8"}) {
      handles[model] = Create(stub.get(), 2, model);
      const auto append = [&](const v1::Handle& handle, uint64_t pos, int n, uint32_t seed) {
        grpc::ClientContext context;
        v1::AppendResponse appended;
        const auto writer = stub->Append(&context, &appended);
        v1::AppendRequest chunk = ChunkOf(handle, 1, pos, n, 0, model);
        chunk.set_k(RandomRows(int64_t{n} * kKvRowBytes, seed));
        chunk.set_v(RandomRows(int64_t{n} * kKvRowBytes, seed + 1));
        ASSERT_TRUE(writer->Write(chunk));
        writer->WritesDone();
        ASSERT_TRUE(writer->Finish().ok());
      };
      append(handles[model][0], 0, 400, 10);
      append(handles[model][1], 0, 500, 20);
      grpc::ClientContext context;
      v1::ForkSequencesRequest fork;
      v1::ForkSequencesResponse forked;
      *fork.mutable_parent() = handles[model][0];
      ASSERT_TRUE(stub->ForkSequences(&context, fork, &forked).ok());
      handles[model].push_back(forked.handles(0));
      append(handles[model][0], 400, 100, 30);
      append(handles[model][2], 400, 100, 40);
      before[model] = attend(stub.get(), model);
      EXPECT_EQ(before[model].size(), 3U * 2 * kQRowBytes);
    }
    EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
  }
  Daemon daemon(SetupWith());
  const auto stub = Connect(daemon.address());
  for (const auto& [model, out] : before) EXPECT_TRUE(attend(stub.get(), model) == out) << model;
}

TEST_F(SnapshotFolderTest, ADamagedOneIsRefusedByNameAndTheDaemonServes) {
  const v1::Handle handle = Leave();
  std::fstream file(snapshot(), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(snapshot()) - 1000));
  file.put('\x55');
  file.close();
  Daemon daemon(SetupWith());
  EXPECT_THAT(daemon.log(), HasSubstr("the snapshot " + snapshot().string() +
                                      " is refused and none of its sequences is restored: it is "
                                      "damaged in its pages, before byte "));
  EXPECT_THAT(Names(), UnorderedElementsAre("fp8kvd.lock", "fp8kvd.snapshot.refused"));
  EXPECT_THAT(HttpGet(daemon.http_port(), "/metrics"), HasSubstr("\nfp8kvd_snapshot_refused 1\n"));
  const auto stub = Connect(daemon.address());
  std::string out;
  EXPECT_THAT(Step(stub.get(), handle, 1, kTwo, "m", &out), HasSubstr("no sequence has"));
  EXPECT_EQ(Step(stub.get(), Create(stub.get(), 1)[0], 0, kTwo, "m", &out), "");
  EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
}

// The drain goes on whatever becomes of the snapshot; exit code and log say that it is lost.
struct Obstacle {
  const char* name;
  std::function<void(const Daemon& daemon, const std::filesystem::path& folder)> raise;
  std::vector<std::string> flags;
  const char* said;
};

class NotSaved : public SnapshotFolderTest, public ::testing::WithParamInterface<Obstacle> {};

TEST_P(NotSaved, IsSaidAndLeavesNothing) {
  Daemon daemon(SetupWith(GetParam().flags));
  const auto stub = Connect(daemon.address());
  for (const v1::Handle& handle : Create(stub.get(), 12)) {
    Append(stub.get(), handle, 0, 1000, kTwo, "m");  // 12 MiB in all
  }
  GetParam().raise(daemon, path());
  EXPECT_EQ(daemon.Stop(), 4) << daemon.log();
  EXPECT_THAT(daemon.log(), HasSubstr("drained"));
  EXPECT_THAT(daemon.log(),
              HasSubstr("the sequences are not saved, their handles will be NOT_FOUND: "));
  EXPECT_THAT(daemon.log(), HasSubstr(GetParam().said));
  if (std::filesystem::exists(path())) {
    EXPECT_THAT(Names(), ElementsAre("fp8kvd.lock"));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Because, NotSaved,
    ::testing::Values(Obstacle{"disk_full",  // as near as a test comes: the file may not grow
                               [](const Daemon& daemon, const auto&) {
                                 const rlimit limit = {1 << 20, 1 << 20};
                                 ASSERT_EQ(prlimit(const_cast<Daemon&>(daemon).process().pid(),
                                                   RLIMIT_FSIZE, &limit, nullptr),
                                           0);
                               },
                               {},
                               "File too large; make room, or name another snapshot_dir"},
                      Obstacle{"folder_gone",
                               [](const Daemon&, const std::filesystem::path& folder) {
                                 std::filesystem::remove_all(folder);
                               },
                               {},
                               "fp8kvd.snapshot.part: No such file or directory"},
                      Obstacle{"too_slow",  // 12 MiB in a millisecond
                               [](const Daemon&, const auto&) {},
                               {"--snapshot_ms_max=1"},
                               "snapshot_ms_max (1) has passed after "}),
    [](const auto& obstacle) { return std::string(obstacle.param.name); });

TEST_F(SnapshotFolderTest, AStartThatFailsLeavesTheSnapshotForTheNext) {
  Leave();
  const TempFolder other;
  std::ofstream(other / "c.textproto") << DaemonSetup().models;
  const auto start = [&](const std::string& address, const std::string& snapshots) {
    return Process(BuiltProgram("fp8kvd"),
                   {"--config=" + (other / "c.textproto").string(), "--device=" + DeviceUnderTest(),
                    "--allow_fp8_kv=true", "--listen_address=" + address,
                    "--http_address=", "--snapshot_dir=" + snapshots},
                   other / "log")
        .Wait();
  };
  const Daemon elsewhere;
  EXPECT_EQ(start(elsewhere.address(), path()), 1);
  EXPECT_THAT(ReadFile(other / "log"), HasSubstr("restored 1 sequences"));
  EXPECT_THAT(ReadFile(other / "log"), HasSubstr("cannot listen on"));
  EXPECT_THAT(Names(), UnorderedElementsAre("fp8kvd.lock", "fp8kvd.snapshot"));

  Daemon daemon(SetupWith());
  EXPECT_THAT(daemon.log(), HasSubstr("restored 1 sequences"));
  EXPECT_EQ(start("127.0.0.1:0", path()), 1);
  EXPECT_THAT(ReadFile(other / "log"), HasSubstr("another daemon has it; stop that one, or give"));
  EXPECT_EQ(start("127.0.0.1:0", other / "none"), 1);
  EXPECT_THAT(ReadFile(other / "log"),
              HasSubstr("No such file or directory; name a folder that is there and ours"));
}

TEST_F(SnapshotFolderTest, NoneIsMadeAfterADeviceFault) {
  DaemonSetup setup = SetupWith();
  setup.binary = BuiltProgram("e2e_faulting_daemon");
  Daemon daemon(setup);
  const auto stub = Connect(daemon.address());
  const v1::Handle handle = Create(stub.get(), 1)[0];
  daemon.process().Kill(SIGUSR1);
  std::string out;
  EXPECT_THAT(Step(stub.get(), handle, 0, kTwo, "m", &out), HasSubstr("the device failed"));
  EXPECT_EQ(daemon.process().Wait(), 3) << daemon.log();
  EXPECT_THAT(daemon.log(), Not(HasSubstr("saved")));
  EXPECT_THAT(Names(), ElementsAre("fp8kvd.lock"));
}

// Known fault: a device that fails at the start costs the sequences of a snapshot that is good.
TEST_F(SnapshotFolderTest, ADeviceThatFailsAtTheStartLeavesTheSnapshotForTheNext) {
  DaemonSetup good = SetupWith({"--devices=1"});  // of faulting_device.cc
  good.binary = BuiltProgram("e2e_faulting_daemon");
  v1::Handle handle;
  {
    Daemon daemon(good);
    const auto stub = Connect(daemon.address());
    handle = Create(stub.get(), 1)[0];
    Append(stub.get(), handle, 0, 100, kTwo, "m");
    EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
  }
  const TempFolder other;
  std::ofstream(other / "c.textproto") << good.models;
  for (const char* fault : {"--devices=2", "--devices=3"}) {
    Process daemon(BuiltProgram("e2e_faulting_daemon"),
                   {"--config=" + (other / "c.textproto").string(), "--allow_fp8_kv=true",
                    "--listen_address=127.0.0.1:0", "--http_address=", flag(), fault},
                   other / "log");
    EXPECT_EQ(daemon.Wait(), 1);
    EXPECT_THAT(ReadFile(other / "log"), HasSubstr("cannot start: an unspecified launch failure"));
    EXPECT_THAT(Names(), UnorderedElementsAre("fp8kvd.lock", "fp8kvd.snapshot")) << fault;
  }
  Daemon daemon(good);
  EXPECT_THAT(daemon.log(), HasSubstr("restored 1 sequences, "));
  std::string out;
  EXPECT_EQ(Step(Connect(daemon.address()).get(), handle, 100, kTwo, "m", &out), "");
}

// The way of docs/operations.md: a start with a device fewer is refused by name and costs nothing.
TEST_F(SnapshotFolderTest, SeveralDevicesKeepTheirSequencesAndFewerDevicesRefuseThem) {
  DaemonSetup two = SetupWith();
  two.models += "engine { devices: \"0,1\" cpu_threads: 2 }\n";
  std::vector<v1::Handle> handles;
  {
    Daemon daemon(two);
    const auto stub = Connect(daemon.address());
    handles = Create(stub.get(), 4);
    std::set<uint32_t> homes;
    for (const v1::Handle& handle : handles) {
      homes.insert(handle.home());
      Append(stub.get(), handle, 0, 100, handle.home() == 0 ? kTwo : kFour, "m");
    }
    EXPECT_THAT(homes, ElementsAre(0, 1));
    EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
    EXPECT_THAT(daemon.log(), HasSubstr("saved 4 sequences, "));
  }
  {
    Daemon daemon(SetupWith({"--devices=0"}));
    EXPECT_THAT(daemon.log(), HasSubstr("is refused and none of its sequences is restored: it is "
                                        "of 2 devices, here are 1; start with as many"));
    EXPECT_EQ(daemon.Stop(), 0) << daemon.log();
  }
  std::filesystem::rename(snapshot().string() + ".refused", snapshot());
  Daemon daemon(two);
  EXPECT_THAT(daemon.log(), HasSubstr("restored 4 sequences, "));
  const auto stub = Connect(daemon.address());
  v1::DecodeResponse reply;
  ASSERT_TRUE(Decode(stub.get(), StepOf(handles, 1, 100, kTwo), &reply).ok());
  ASSERT_EQ(reply.item_errors_size(), 0) << reply.item_errors(0).error().message();
  for (size_t i = 0; i < handles.size(); ++i) {
    const std::string out = reply.out().substr(i * kQRowBytes, kQRowBytes);
    EXPECT_EQ(out == Repeat(kTwo, kQRowBytes), handles[i].home() == 0) << i;
  }
}

}  // namespace
}  // namespace fp8kvd::testing
