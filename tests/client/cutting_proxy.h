// tests/client/cutting_proxy.h: a TCP proxy on loopback that cuts a connection on order, in the
// middle of whatever it carries.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fp8kvd::client {

class CuttingProxy {
 public:
  explicit CuttingProxy(int upstream_port) : upstream_port_(upstream_port) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof(address);
    bind(listener_, reinterpret_cast<sockaddr*>(&address), size);
    listen(listener_, 16);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { Accept(); });
  }

  ~CuttingProxy() {
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    {
      const std::lock_guard<std::mutex> lock(mu_);
      for (const int fd : fds_) shutdown(fd, SHUT_RDWR);
    }
    for (std::thread& pump : pumps_) pump.join();
    for (const int fd : fds_) close(fd);
    close(listener_);
  }

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }
  // Once so many more bytes went up to the daemon (down to the client), their connection is cut.
  void CutAfterBytesUp(int64_t bytes) { up_left_ = bytes; }
  void CutAfterBytesDown(int64_t bytes) { down_left_ = bytes; }
  int cuts() const { return cuts_; }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }

  void Accept() {
    for (;;) {
      const int down = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (down < 0) return;
      const int up = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const sockaddr_in address = Loopback(upstream_port_);
      const bool connected =
          connect(up, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
      const int on = 1;
      for (const int fd : {down, up}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      const std::lock_guard<std::mutex> lock(mu_);
      fds_.insert(fds_.end(), {down, up});
      if (!connected) {
        shutdown(down, SHUT_RDWR);
        continue;
      }
      pumps_.emplace_back([this, down, up] { Pump(down, up, up_left_); });
      pumps_.emplace_back([this, down, up] { Pump(up, down, down_left_); });
    }
  }

  // Carries bytes until one end closes or the budget is spent; then nothing goes either way.
  void Pump(int from, int to, std::atomic<int64_t>& left) {
    std::vector<char> bytes(16'384);
    for (;;) {
      const ssize_t n = read(from, bytes.data(), bytes.size());
      if (n <= 0) break;
      const int64_t before = left.fetch_sub(n);
      const bool cut = before > 0 && before <= n;
      const ssize_t carried = cut ? static_cast<ssize_t>(before) : n;
      for (ssize_t sent = 0; sent < carried;) {
        const ssize_t m = send(to, bytes.data() + sent, carried - sent, MSG_NOSIGNAL);
        if (m <= 0) break;
        sent += m;
      }
      if (cut) {
        left = std::numeric_limits<int64_t>::max();
        ++cuts_;
        Reset(from);
        Reset(to);
        return;
      }
    }
    shutdown(from, SHUT_RDWR);
    shutdown(to, SHUT_RDWR);
  }

  // As when the other end is gone: the peer's next packet is answered with a reset. (Bytes unread
  // here would keep a socket that was only shut down half open.)
  static void Reset(int fd) {
    sockaddr nowhere = {};
    nowhere.sa_family = AF_UNSPEC;
    connect(fd, &nowhere, sizeof(nowhere));
  }

  const int upstream_port_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<int64_t> up_left_{std::numeric_limits<int64_t>::max()};
  std::atomic<int64_t> down_left_{std::numeric_limits<int64_t>::max()};
  std::atomic<int> cuts_{0};
  std::mutex mu_;
  std::vector<int> fds_;
  std::vector<std::thread> pumps_;
  std::thread acceptor_;
};

}  // namespace fp8kvd::client
