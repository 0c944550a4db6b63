// The rings between two threads, tickets on a clock of the test's, and the socket as a file.
#include "server/shm/ring.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/shm/memory.h"
#include "server/shm/socket_file.h"
#include "server/shm/tickets.h"

namespace fp8kvd::shm {
namespace {

using ::testing::HasSubstr;

using Ref = std::atomic_ref<uint32_t>;

class FakeClock final : public engine::Clock {
 public:
  int64_t NowUs() const override { return now_us; }
  int64_t now_us = 1'000'000;
};

// The client's side, honest: one message in the data area for each entry.
class HonestClient {
 public:
  explicit HonestClient(Memory* memory) : layout_(memory->layout()), bytes_(memory->bytes()) {}

  Head& head() { return *reinterpret_cast<Head*>(bytes_); }
  void Push(uint64_t tag) {
    Request request;
    request.tag = tag;
    request.head_at = tag % layout_.entries * 64;
    request.head_bytes = 8;
    std::memcpy(bytes_ + layout_.data_at + request.head_at, &tag, sizeof(tag));
    reinterpret_cast<Request*>(bytes_ + layout_.requests_at)[tail_ % layout_.entries] = request;
    Ref(head().requests_tail.value).store(++tail_);
  }
  bool Take(Reply* reply) {
    if (Ref(head().replies_tail.value).load() == taken_) return false;
    *reply = reinterpret_cast<Reply*>(bytes_ + layout_.replies_at)[taken_ % layout_.entries];
    Ref(head().replies_head.value).store(++taken_);
    return true;
  }
  uint32_t outstanding() const { return tail_ - taken_; }

 private:
  const Welcome layout_;
  uint8_t* const bytes_;
  uint32_t tail_ = 0;
  uint32_t taken_ = 0;
};

// Two pipes' worth of bells: nobody may sleep for ever.
TEST(Ring, CarriesEveryMessageThoughBothSidesSleep) {
  constexpr uint64_t kMessages = 20'000;
  const std::unique_ptr<Memory> memory = Memory::Make(/*entries=*/8, 4096).value();
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const auto ring_bell = [](int socket) { (void)send(socket, "", 1, MSG_DONTWAIT); };
  const auto sleep = [](int socket) {  // false: nobody rang in 10 s
    pollfd readable = {.fd = socket, .events = POLLIN, .revents = 0};
    char bell = 0;
    return poll(&readable, 1, 10'000) == 1 && recv(socket, &bell, 1, MSG_DONTWAIT) == 1;
  };
  std::atomic<bool> server_heard_all{true};
  std::thread server([&] {
    Ring ring(memory->layout(), memory->bytes());
    for (uint64_t answered = 0; answered < kMessages;) {
      Request request;
      if (!ring.Take(&request).value()) {
        ring.Sleep();
        if (!ring.HasWork()) server_heard_all = server_heard_all && sleep(sockets[0]);
        ring.Wake();
        if (!server_heard_all) return;
        continue;
      }
      uint64_t tag = 0;
      std::memcpy(&tag, ring.Data(request.head_at), sizeof(tag));
      ring.Put({.tag = tag});
      ring.Publish();
      if (ring.TakeClientSleeps()) ring_bell(sockets[0]);
      ++answered;
    }
  });
  HonestClient client(memory.get());
  uint64_t sent = 0;
  bool is_heard = true;
  for (uint64_t answered = 0; answered < kMessages && is_heard;) {
    while (sent < kMessages && client.outstanding() < 8) {
      client.Push(sent++);
      if (Ref(client.head().server_sleeps.value).exchange(0) != 0) ring_bell(sockets[1]);
    }
    Reply reply;
    if (client.Take(&reply)) {
      ASSERT_EQ(reply.tag, answered++);
      continue;
    }
    Ref sleeps(client.head().client_sleeps.value);
    sleeps.store(1);
    if (Ref(client.head().replies_tail.value).load() ==
        Ref(client.head().replies_head.value).load()) {
      is_heard = sleep(sockets[1]);
    }
    sleeps.store(0);
  }
  EXPECT_TRUE(is_heard);
  server.join();
  EXPECT_TRUE(server_heard_all);
  close(sockets[0]);
  close(sockets[1]);
}

TEST(Ring, GoesOnWhereItsIndicesWrapAround) {
  const std::unique_ptr<Memory> memory = Memory::Make(/*entries=*/8, 4096).value();
  Ring ring(memory->layout(), memory->bytes());
  HonestClient client(memory.get());
  for (uint64_t tag = 0; tag < 100; ++tag) {
    client.Push(tag);
    Request request;
    ASSERT_TRUE(ring.Take(&request).value());
    EXPECT_EQ(request.tag, tag);
    EXPECT_FALSE(ring.HasWork());
    ring.Put({.tag = tag});
    Reply reply;
    EXPECT_FALSE(client.Take(&reply)) << "not published yet";
    ring.Publish();
    ASSERT_TRUE(client.Take(&reply));
    EXPECT_EQ(reply.tag, tag);
  }
}

TEST(Tickets, AreGoodOnceAndUntilTheyExpire) {
  FakeClock clock;
  TicketBook book({.ttl_ms = 1000}, &clock);
  EXPECT_TRUE(absl::IsUnavailable(book.Issue(cache::TenantId{3}).status())) << "nobody listens";
  book.SetSocket("/run/x");
  const Ticket first = book.Issue(cache::TenantId{3}).value();
  const Ticket second = book.Issue(cache::TenantId{4}).value();
  EXPECT_EQ(first.text.size(), kTicketBytes);
  EXPECT_NE(first.text, second.text);
  EXPECT_EQ(first.unix_socket, "/run/x");
  EXPECT_EQ(book.Redeem(first.text).value(), cache::TenantId{3});
  EXPECT_TRUE(absl::IsNotFound(book.Redeem(first.text).status())) << "used";
  clock.now_us += 1000 * 1000;
  EXPECT_TRUE(absl::IsNotFound(book.Redeem(second.text).status())) << "expired";
  const Ticket third = book.Issue(cache::TenantId{4}).value();
  book.SetSocket("");
  EXPECT_TRUE(absl::IsNotFound(book.Redeem(third.text).status())) << "drained";
}

TEST(Tickets, AreBoundedInAllAndOfOneTenant) {
  FakeClock clock;
  TicketBook book({.ttl_ms = 1000, .outstanding_max = 5, .outstanding_per_tenant_max = 3}, &clock);
  book.SetSocket("/run/x");
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(book.Issue(cache::TenantId{1}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(book.Issue(cache::TenantId{1}).status()));
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(book.Issue(cache::TenantId{2}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(book.Issue(cache::TenantId{2}).status()));
  clock.now_us += 1000 * 1000;
  EXPECT_TRUE(book.Issue(cache::TenantId{1}).ok());
}

class SocketFiles : public ::testing::Test {
 protected:
  SocketFiles() {
    std::string path = (std::filesystem::temp_directory_path() / "fp8kvd_ring_XXXXXX").string();
    folder_ = mkdtemp(path.data());
    path_ = folder_ + "/socket";
  }
  ~SocketFiles() override { std::filesystem::remove_all(folder_); }

  mode_t Mode() const {
    struct stat found = {};
    return stat(path_.c_str(), &found) == 0 ? found.st_mode & 07777 : 0;
  }

  std::string folder_;
  std::string path_;
};

TEST_F(SocketFiles, HaveTheirModeAndGoWithTheirOwner) {
  for (const bool group_access : {false, true}) {
    const auto file = SocketFile::Listen(path_, group_access).value();
    EXPECT_EQ(Mode(), group_access ? 0660U : 0600U);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(SocketFiles, ASecondDaemonIsRefusedAndTheFirstStays) {
  const auto first = SocketFile::Listen(path_, false).value();
  const absl::Status second = SocketFile::Listen(path_, false).status();
  EXPECT_TRUE(absl::IsUnavailable(second));
  EXPECT_THAT(std::string(second.message()), HasSubstr("another daemon has it"));
  EXPECT_EQ(Mode(), 0600U);
}

TEST_F(SocketFiles, OneThatADeadDaemonLeftIsReplaced) {
  const pid_t pid = fork();
  if (pid == 0) {
    const auto file = SocketFile::Listen(path_, false);
    _exit(file.ok() ? 0 : 1);  // without destructors, as by SIGKILL
  }
  int status = 0;
  waitpid(pid, &status, 0);
  ASSERT_EQ(status, 0);
  EXPECT_NE(Mode(), 0U);
  EXPECT_TRUE(SocketFile::Listen(path_, false).ok());
}

TEST_F(SocketFiles, WhatIsNoSocketIsLeftAlone) {
  std::ofstream(path_) << "precious";
  const absl::Status status = SocketFile::Listen(path_, false).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("a file that is no socket"));
  EXPECT_EQ(std::filesystem::file_size(path_), 8U);
}

TEST_F(SocketFiles, APathTooLongForASocketIsRefused) {
  const absl::Status status = SocketFile::Listen(folder_ + std::string(200, 'x'), false).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 107"));
}

}  // namespace
}  // namespace fp8kvd::shm
