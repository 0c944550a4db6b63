// Who comes in: tickets, quotas, strangers, and the socket's file.
#include "server/shm/door.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/shm/quota.h"
#include "tests/shm/rig.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

grpc::Status OpenFrom(ShmRig& rig, const std::string& host_id) {
  grpc::ClientContext context;
  v1::OpenSharedMemoryRequest request;
  request.set_host_id(host_id);
  v1::OpenSharedMemoryResponse response;
  return rig->stub->OpenSharedMemory(&context, request, &response);
}

TEST(Door, TakesATicketOnce) {
  ShmRig rig;
  const v1::OpenSharedMemoryResponse open = OpenTicket(*rig);
  EXPECT_EQ(open.unix_socket(), rig.socket_path());
  const RawClient client(open);
  const RawSocket again(open.unix_socket());
  again.Send(HelloWith(open.ticket()));
  EXPECT_THAT(again.HearFarewell(), StartsWith("NOT_FOUND: the ticket is unknown, used or older"));
}

TEST(Door, SendsStrangersAway) {
  ShmRig rig;
  const RawSocket guesser(rig.socket_path());
  guesser.Send(HelloWith(std::string(shm::kTicketBytes, 'a')));
  EXPECT_THAT(guesser.HearFarewell(), StartsWith("NOT_FOUND"));
  const RawSocket babbler(rig.socket_path());
  babbler.Send(uint64_t{42});
  EXPECT_THAT(babbler.HearFarewell(), StartsWith("INVALID_ARGUMENT: the first packet has 8 bytes"));
  const RawSocket newer(rig.socket_path());
  shm::Hello hello = HelloWith(OpenTicket(*rig).ticket());
  hello.version = 2;
  newer.Send(hello);
  EXPECT_THAT(newer.HearFarewell(), StartsWith("FAILED_PRECONDITION: the client speaks version 2"));
  EXPECT_EQ(rig->shm->stats().opened_total, 0U);
}

TEST(Door, IsNotBlockedBySilentGuests) {
  ShmRig rig;
  std::vector<std::unique_ptr<RawSocket>> silent;
  for (size_t i = 0; i < shm::Door::kGuestsMax - 1; ++i) {
    silent.push_back(std::make_unique<RawSocket>(rig.socket_path()));
  }
  const RawClient client(*rig);
  silent[0]->Close();
  const RawClient another(*rig);
}

class CountingClock final : public engine::Clock {
 public:
  int64_t NowUs() const override {
    ++looks_;
    return clock_.NowUs();
  }
  int64_t looks() const { return looks_; }

 private:
  const engine::SteadyClock clock_{};
  mutable std::atomic<int64_t> looks_{0};
};

// Every descriptor that this process may have is taken, while it lives.
class NoDescriptors {
 public:
  explicit NoDescriptors(int last) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(last) + 1;
    setrlimit(RLIMIT_NOFILE, &limit);
    for (int fd = dup(0); fd >= 0; fd = dup(0)) taken_.push_back(fd);
  }
  ~NoDescriptors() {
    for (const int fd : taken_) close(fd);
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
  std::vector<int> taken_;
};

TEST(Door, SleepsWhileThereIsNoDescriptorForAGuest) {
  const SocketFolder folder;
  const CountingClock clock;
  shm::TicketBook tickets({}, &clock);
  shm::Quota quota({});
  std::vector<std::unique_ptr<shm::Loop>> loops;
  shm::Door door({.session_bytes_max = 1 << 20}, &tickets, &quota, &loops, &clock);
  door.Open(shm::SocketFile::Listen(folder / "socket", /*group_access=*/false).value());
  RawSocket guest(folder / "none");
  // The sanitizer takes a descriptor to look at an object of a type that it has not seen yet.
  ASSERT_TRUE(Eventually([&] { return clock.looks() > 0; }));
  {
    const NoDescriptors none(guest.fd());
    const auto begin = std::chrono::steady_clock::now();
    guest.Connect(folder / "socket");
    while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(30)) {
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    EXPECT_LE(clock.looks(), 20 + took / std::chrono::milliseconds(10));  // a spin: thousands
  }
  guest.Send(HelloWith(std::string(shm::kTicketBytes, 'a')));
  EXPECT_THAT(guest.HearFarewell(), StartsWith("NOT_FOUND"));
  door.Close();
}

TEST(Door, KnowsAnotherHost) {
  ShmRig rig;
  EXPECT_EQ(OpenFrom(rig, "another host").error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(OpenFrom(rig, "").ok());
}

TEST(Door, CountsSessionsAndBytes) {
  ServerRigOptions options = ShmRig::Options();
  options.shared_memory.shm_sessions_per_tenant_max = 2;
  ShmRig rig(options);
  const RawClient first(*rig);
  {
    const RawClient second(*rig);
    const v1::OpenSharedMemoryResponse open = OpenTicket(*rig);
    const RawSocket third(open.unix_socket());
    third.Send(HelloWith(open.ticket()));
    EXPECT_THAT(third.HearFarewell(), StartsWith("RESOURCE_EXHAUSTED: a session of "));
    EXPECT_EQ(rig->shm->stats().bytes, static_cast<int64_t>(2 * first.layout().memory_bytes));
  }
  EXPECT_TRUE(Eventually([&] { return rig->shm->stats().sessions == 1; }));
  const RawClient third(*rig);
}

TEST(Door, GivesNoMoreBytesThanASessionMayHave) {
  ShmRig rig;
  const v1::OpenSharedMemoryResponse open = OpenTicket(*rig);
  const RawSocket greedy(open.unix_socket());
  greedy.Send(HelloWith(open.ticket(), ~uint64_t{0}));
  const std::string packet = greedy.Hear();
  ASSERT_EQ(packet.size(), sizeof(shm::Welcome));
  shm::Welcome welcome;
  std::memcpy(&welcome, packet.data(), sizeof(welcome));
  EXPECT_EQ(welcome.data_bytes, 2U << 20);
}

TEST(Door, ServerInfoSaysWhereItIs) {
  ShmRig rig;
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(rig->stub->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.shm_socket(), rig.socket_path());
  EXPECT_EQ(info.host_id(), "this host");
}

}  // namespace
}  // namespace fp8kvd::testing
