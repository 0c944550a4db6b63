#include "client/cc/ctl/http_get.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstddef>
#include <memory>

#include "absl/strings/str_cat.h"

namespace fp8kvd::ctl {
namespace {

constexpr size_t kAnswerBytesMax = size_t{4} << 20;

absl::Status Unreachable(const std::string& address, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("http://", address, " ", why,
                                             "; is fp8kvd there, and --http its http_address?"));
}

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// Connected, with timeouts, or null.
std::unique_ptr<Socket> Connect(const addrinfo& to, int32_t timeout_ms) {
  auto made =
      std::make_unique<Socket>(socket(to.ai_family, to.ai_socktype | SOCK_CLOEXEC, to.ai_protocol));
  if (made->fd() < 0) return nullptr;
  const timeval limit = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
  for (const int option : {SO_SNDTIMEO, SO_RCVTIMEO}) {  // connect obeys the first
    setsockopt(made->fd(), SOL_SOCKET, option, &limit, sizeof(limit));
  }
  return connect(made->fd(), to.ai_addr, to.ai_addrlen) == 0 ? std::move(made) : nullptr;
}

std::unique_ptr<Socket> Reach(const std::string& address, int32_t timeout_ms) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return nullptr;
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* all = nullptr;
  if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &all) != 0) return nullptr;
  std::unique_ptr<Socket> reached;
  for (const addrinfo* one = all; one != nullptr && reached == nullptr; one = one->ai_next) {
    reached = Connect(*one, timeout_ms);
  }
  freeaddrinfo(all);
  return reached;
}

}  // namespace

absl::StatusOr<std::string> HttpGet(const std::string& address, const std::string& path,
                                    int32_t timeout_ms) {
  const std::unique_ptr<Socket> socket = Reach(address, timeout_ms);
  if (socket == nullptr) return Unreachable(address, "cannot be reached");
  const std::string request =
      absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: ", address, "\r\nConnection: close\r\n\r\n");
  if (send(socket->fd(), request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    return Unreachable(address, "broke the connection");
  }
  std::string answer;
  char bytes[16384];
  ssize_t got = 0;
  while ((got = recv(socket->fd(), bytes, sizeof(bytes), 0)) > 0) {
    answer.append(bytes, static_cast<size_t>(got));
    if (answer.size() > kAnswerBytesMax) return Unreachable(address, "answers too much");
  }
  if (got < 0) return Unreachable(address, "did not answer in time");
  const size_t end_of_head = answer.find("\r\n\r\n");
  if (answer.rfind("HTTP/", 0) != 0) return Unreachable(address, "speaks no HTTP/1.1");
  if (answer.rfind("HTTP/1.1 200 ", 0) != 0 || end_of_head == std::string::npos) {
    return Unreachable(
        address, absl::StrCat("answers \"", answer.substr(0, answer.find('\r')), "\" to ", path));
  }
  return answer.substr(end_of_head + 4);
}

}  // namespace fp8kvd::ctl
