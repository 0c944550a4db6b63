// The end of a poller beside a thread that is still inside Post.
#include "server/rpc/poller.h"

#include <atomic>
#include <thread>

#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

namespace fp8kvd::rpc {

class PollerPeer {
 public:
  static void Push(Poller& poller, Posted* posted) { poller.Push(posted); }
  static void Wake(Poller& poller) { poller.Wake(); }
};

namespace {

class CloseErrand final : public Posted {
 public:
  explicit CloseErrand(Poller* poller) : poller_(poller) {}
  void OnPosted() override {
    poller_->Close();
    is_closed = true;
  }
  std::atomic<bool> is_closed{false};

 private:
  Poller* const poller_;
};

// Known fault: a poster whose object was taken before it looked for a sleeper woke a queue that was
// shut down meanwhile, which gRPC ends the process for.
TEST(Poller, ClosesBesideAPosterThatHasNotReturned) {
  for (int round = 0; round < 200; ++round) {
    grpc::ServerBuilder builder;
    Poller poller(builder.AddCompletionQueue());
    CloseErrand last(&poller);
    std::atomic<bool> has_ended{false};
    std::thread run([&] {
      poller.Run();
      has_ended = true;
    });
    PollerPeer::Push(poller, &last);
    while (!has_ended) PollerPeer::Wake(poller);
    run.join();
    EXPECT_TRUE(last.is_closed);
  }
}

}  // namespace
}  // namespace fp8kvd::rpc
