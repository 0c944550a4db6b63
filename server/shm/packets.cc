#include "server/shm/packets.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace fp8kvd::shm {

void SendFarewell(int socket, const absl::Status& reason) {
  Farewell farewell;
  farewell.code = static_cast<uint32_t>(reason.code());
  const size_t size = std::min(reason.message().size(), kReasonBytes - 1);
  std::memcpy(farewell.reason, reason.message().data(), size);
  (void)send(socket, &farewell, sizeof(farewell), MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool SendWelcome(int socket, const Welcome& welcome, int memory_fd) {
  Welcome packet = welcome;
  iovec bytes = {.iov_base = &packet, .iov_len = sizeof(packet)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(memory_fd))] = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(memory_fd));
  std::memcpy(CMSG_DATA(header), &memory_fd, sizeof(memory_fd));
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof(packet));
}

}  // namespace fp8kvd::shm
