#include "server/ops/notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace fp8kvd::ops {
namespace {

std::string Take(const char* name) {
  // NOLINTBEGIN(concurrency-mt-unsafe): before the first thread
  const char* const value = std::getenv(name);
  std::string text = value == nullptr ? "" : value;
  unsetenv(name);
  // NOLINTEND(concurrency-mt-unsafe)
  return text;
}

}  // namespace

Notifier::Notifier() {
  const std::string path = Take("NOTIFY_SOCKET");
  int64_t watchdog_us = 0;
  if (absl::SimpleAtoi(Take("WATCHDOG_USEC"), &watchdog_us) && watchdog_us > 0) {
    watchdog_ = std::chrono::microseconds(watchdog_us);
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) return;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract name
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket_ < 0) return;
  if (connect(socket_, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    close(socket_);
    socket_ = -1;
  }
}

Notifier::~Notifier() {
  if (socket_ >= 0) close(socket_);
}

void Notifier::Tell(const std::string& state, const std::string& status) const {
  Send(absl::StrCat(state, "\nSTATUS=", status));
}

void Notifier::Alive() const {
  if (watchdog_.count() > 0) Send("WATCHDOG=1");
}

std::chrono::milliseconds Notifier::AliveEvery(std::chrono::milliseconds most) const {
  if (watchdog_.count() == 0) return most;
  const auto third = std::chrono::duration_cast<std::chrono::milliseconds>(watchdog_ / 3);
  return std::clamp(third, std::chrono::milliseconds(1), most);
}

void Notifier::Send(const std::string& text) const {
  if (socket_ < 0) return;
  // A full queue drops it: the next one comes soon.
  static_cast<void>(send(socket_, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
}

}  // namespace fp8kvd::ops
