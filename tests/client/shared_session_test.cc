// What a client makes of a door that is not the daemon's.
#include "client/cc/shared_session.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace fp8kvd::client {
namespace {

// Tells whether anybody has a descriptor of it.
class Lent {
 public:
  Lent() { EXPECT_EQ(pipe2(ends_, O_CLOEXEC | O_NONBLOCK), 0); }
  ~Lent() { close(ends_[0]); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  int descriptor() const { return ends_[1]; }
  // Ours goes first. The other end is over once there is none.
  bool IsGoneEverywhere() {
    close(ends_[1]);
    char byte = 0;
    return read(ends_[0], &byte, 1) == 0;
  }

 private:
  int ends_[2] = {-1, -1};
};

// Sends a packet of so many bytes with so many copies of a descriptor.
void Send(int socket, std::vector<char> packet, int descriptor, size_t descriptors) {
  iovec bytes = {.iov_base = packet.data(), .iov_len = packet.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  if (descriptors > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
    const std::vector<int> numbers(descriptors, descriptor);
    std::memcpy(CMSG_DATA(header), numbers.data(), descriptors * sizeof(int));
  }
  EXPECT_EQ(sendmsg(socket, &message, MSG_NOSIGNAL), static_cast<ssize_t>(packet.size()));
}

// Known fault: a descriptor leaks for each packet that is not the expected one, until none is left.
TEST(SharedSession, KeepsNoDescriptorOfAnOddWelcome) {
  std::string folder = (std::filesystem::temp_directory_path() / "fp8kvd_door_XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = folder + "/door";
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int door = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(door, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(door, 1), 0);
  for (const size_t bytes :
       {size_t{1}, sizeof(shm::Welcome) - 1, sizeof(shm::Welcome), sizeof(shm::Farewell)}) {
    for (size_t descriptors = 0; descriptors <= 4; ++descriptors) {
      Lent lent;
      std::thread server([&] {
        const int guest = accept(door, nullptr, nullptr);
        Send(guest, std::vector<char>(bytes), lent.descriptor(), descriptors);
        close(guest);
      });
      // A welcome's memory is no memory here, so it ends as the others do.
      const auto session = SharedSession::Open(
          {.unix_socket = path, .ticket = std::string(shm::kTicketBytes, 't'), .memory_bytes = 0});
      server.join();
      EXPECT_FALSE(session.ok());
      EXPECT_TRUE(lent.IsGoneEverywhere()) << bytes << " bytes, " << descriptors << " descriptors";
    }
  }
  close(door);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace fp8kvd::client
