// tests/e2e/http_get.h: one question to a daemon's HTTP port.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace fp8kvd::testing {

// A connection to a port of this machine; closed with its owner.
class Connection {
 public:
  explicit Connection(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    is_open_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool Send(const std::string& bytes) {
    return is_open_ && write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size());
  }
  // All that comes until the other side closes.
  std::string Receive() {
    std::string all;
    char bytes[4096];
    ssize_t got = 0;
    while ((got = read(fd_, bytes, sizeof(bytes))) > 0) all.append(bytes, got);
    return all;
  }

 private:
  const int fd_;
  bool is_open_ = false;
};

// The whole answer of one daemon's HTTP port, empty if there is none.
inline std::string HttpGet(int port, const std::string& path) {
  Connection connection(port);
  if (!connection.Send("GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n")) return "";
  return connection.Receive();
}

}  // namespace fp8kvd::testing
