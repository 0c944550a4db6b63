// tests/e2e/http_get.h: one question to a daemon's HTTP port.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace fp8kvd::testing {

// The whole answer of one daemon's HTTP port, empty if there is none.
inline std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n";
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char bytes[4096];
      ssize_t got = 0;
      while ((got = read(fd, bytes, sizeof(bytes))) > 0) answer.append(bytes, got);
    }
  }
  close(fd);
  return answer;
}

}  // namespace fp8kvd::testing
