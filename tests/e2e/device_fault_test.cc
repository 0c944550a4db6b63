// A device that fails under the daemon: whoever waits is told, and the process says so by its exit
// code (design: every call in flight gets UNAVAILABLE, exit 3).
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/e2e/calls.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/http_get.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kExitDeviceFailed = 3;

void ExpectToldOfTheFault(const std::string& who, int code, const std::string& message) {
  EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE) << who << ": " << message;
  EXPECT_THAT(message, HasSubstr("the device failed")) << who;
  EXPECT_THAT(message, Not(HasSubstr("unspecified"))) << who;  // the device's words: for the log
}

// "cpu" works inside the call, with "cuda" pollers take the engine's turns.
class DeviceFault : public ::testing::TestWithParam<const char*> {};

TEST_P(DeviceFault, EndsEveryCallInFlightAndTheProcessWithItsExitCode) {
  Daemon daemon({.device = GetParam(), .binary = BuiltProgram("e2e_faulting_daemon")});
  const auto stub = Connect(daemon.address());
  const std::vector<v1::Handle> handles = Create(stub.get(), 8);
  // Two unary calls, three messages of a stream and an upload:
  // two launches are in flight at most, so some of these run and the others wait.
  std::vector<std::thread> unary;
  for (int i = 0; i < 2; ++i) {
    unary.emplace_back([&, i] {
      v1::DecodeResponse reply;
      const grpc::Status status = Decode(stub.get(), StepOf({handles[i]}, 0, 0, 0x4000), &reply);
      ExpectToldOfTheFault("unary", status.error_code(), status.error_message());
    });
  }
  grpc::ClientContext stream_context;
  const auto stream = stub->DecodeStream(&stream_context);
  for (int i = 2; i < 5; ++i) ASSERT_TRUE(stream->Write(StepOf({handles[i]}, 0, 0, 0x4000)));
  grpc::ClientContext append_context;
  v1::AppendResponse appended;
  const auto writer = stub->Append(&append_context, &appended);
  ASSERT_TRUE(writer->Write(ChunkOf(handles[5], 0, 0, 10, 0x4000)));
  const auto waiting = [&] { return HttpGet(daemon.http_port(), "/metrics"); };
  ASSERT_TRUE(WaitUntil([&] {
    return waiting().find("\nfp8kvd_queue_items 6\n") != std::string::npos;
  })) << waiting();

  daemon.process().Kill(SIGUSR1);
  for (std::thread& call : unary) call.join();
  v1::DecodeResponse reply;
  for (int i = 2; i < 5; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    ExpectToldOfTheFault("stream", reply.error().code(), reply.error().message());
  }
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  const grpc::Status append = writer->Finish();
  ExpectToldOfTheFault("append", append.error_code(), append.error_message());
  EXPECT_EQ(daemon.process().Wait(), kExitDeviceFailed) << daemon.log();
  EXPECT_THAT(daemon.log(), HasSubstr("the device failed: an unspecified launch failure"));
  EXPECT_THAT(daemon.log(), Not(HasSubstr("drained")));
}

TEST_P(DeviceFault, AtALaunchEndsThatCallAndTheProcessWithItsExitCode) {
  Daemon daemon({.device = GetParam(), .binary = BuiltProgram("e2e_faulting_daemon")});
  const auto stub = Connect(daemon.address());
  const std::vector<v1::Handle> handles = Create(stub.get(), 1);
  daemon.process().Kill(SIGUSR1);
  v1::DecodeResponse reply;
  const grpc::Status status = Decode(stub.get(), StepOf(handles, 0, 0, 0x4000), &reply);
  ExpectToldOfTheFault("unary", status.error_code(), status.error_message());
  EXPECT_EQ(daemon.process().Wait(), kExitDeviceFailed) << daemon.log();
}

INSTANTIATE_TEST_SUITE_P(OnDevice, DeviceFault, ::testing::Values("cpu", "cuda"),
                         [](const auto& device) { return std::string(device.param); });

}  // namespace
}  // namespace fp8kvd::testing
