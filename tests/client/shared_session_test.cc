// What a client makes of a door that is not the daemon's.
#include "client/cc/shared_session.h"

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

size_t OpenFiles() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

// Sends a packet of so many bytes with so many descriptors.
void Send(int socket, std::vector<char> packet, size_t descriptors) {
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
    const std::vector<int> numbers(descriptors, socket);
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
  const size_t before = OpenFiles();
  for (const size_t bytes :
       {size_t{1}, sizeof(shm::Welcome) - 1, sizeof(shm::Welcome), sizeof(shm::Farewell)}) {
    for (size_t descriptors = 0; descriptors <= 4; ++descriptors) {
      std::thread server([&] {
        const int guest = accept(door, nullptr, nullptr);
        Send(guest, std::vector<char>(bytes), descriptors);
        close(guest);
      });
      // A welcome's memory is no memory here, so it ends as the others do.
      const auto session = SharedSession::Open(
          {.unix_socket = path, .ticket = std::string(shm::kTicketBytes, 't'), .memory_bytes = 0});
      server.join();
      EXPECT_FALSE(session.ok());
      EXPECT_EQ(OpenFiles(), before) << bytes << " bytes, " << descriptors << " descriptors";
    }
  }
  close(door);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace fp8kvd::client
