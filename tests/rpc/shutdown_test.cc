// The end of a server that still has something to do.
#include <chrono>
#include <thread>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "gtest/gtest.h"

#include "tests/rpc/rig.h"

namespace fp8kvd::testing {
namespace {

using grpc::StatusCode;

// Known fault: a cancelled unary call is never finished and shutdown hangs, or its answer comes to
// a poller that is gone. The rig's end looks for slots and calls.
TEST(Shutdown, WaitsForTheLaunchOfACallThatItCut) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  rig.backend.Close();
  std::thread caller([&] {
    v1::DecodeResponse response;
    EXPECT_FALSE(rig.Decode(rig.Step({handle}, 0, {1}), &response).ok());
  });
  ASSERT_TRUE(Eventually([&] { return rig.engine->stats().launches_inflight == 1; }));
  std::thread stopper([&] { rig.Stop(std::chrono::milliseconds(50)); });
  caller.join();  // it is cut, the launch goes on
  EXPECT_EQ(rig.engine->staging().slots_used(), 1);
  rig.backend.Open();
  stopper.join();
  EXPECT_EQ(rig.engine->staging().slots_used(), 0);
  EXPECT_EQ(rig.server->calls_open(), 0);
}

TEST(Shutdown, EndsStreamsThatOpenDuringTheDrain) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  rig.backend.Close();  // so that the drain goes on
  std::thread caller([&] {
    v1::DecodeResponse response;
    EXPECT_TRUE(rig.Decode(rig.Step({handle}, 0, {1}), &response).ok());
  });
  ASSERT_TRUE(Eventually([&] { return rig.engine->stats().launches_inflight == 1; }));
  std::thread stopper([&] { rig.Stop(); });
  ASSERT_TRUE(Eventually([&] {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    return rig.stub->GetServerInfo(&context, {}, &info).ok() && info.draining();
  }));
  const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(10);
  grpc::ClientContext contexts[3];
  for (grpc::ClientContext& context : contexts) context.set_deadline(deadline);
  v1::AppendResponse appended;
  EXPECT_EQ(rig.stub->Append(&contexts[0], &appended)->Finish().error_code(),
            StatusCode::UNAVAILABLE);
  EXPECT_EQ(rig.stub->DecodeStream(&contexts[1])->Finish().error_code(), StatusCode::UNAVAILABLE);
  const auto reflection = grpc::reflection::v1alpha::ServerReflection::NewStub(rig.Channel());
  EXPECT_EQ(reflection->ServerReflectionInfo(&contexts[2])->Finish().error_code(),
            StatusCode::UNAVAILABLE);
  rig.backend.Open();
  caller.join();
  stopper.join();
}

}  // namespace
}  // namespace fp8kvd::testing
