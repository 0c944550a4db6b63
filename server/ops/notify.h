// server/ops/notify.h: tells systemd how we are (sd_notify's protocol: one datagram for each
// change). Without NOTIFY_SOCKET every call does nothing.
//
// Errors: none. A service manager that does not listen is no reason to serve less.
#pragma once

#include <chrono>
#include <string>

namespace fp8kvd::ops {

class Notifier {
 public:
  // Reads NOTIFY_SOCKET and WATCHDOG_USEC, and takes them out of the environment.
  Notifier();
  ~Notifier();
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;

  // "READY=1" and the like, lines apart; status is one line for people.
  void Tell(const std::string& state, const std::string& status) const;
  // Where the unit has WatchdogSec: says that we are alive. Call it so far apart.
  void Alive() const;
  // A third of WatchdogSec, `most` at most, and a millisecond at least: nobody spins where a unit
  // says WatchdogSec=1ms.
  std::chrono::milliseconds AliveEvery(std::chrono::milliseconds most) const;

 private:
  void Send(const std::string& text) const;

  int socket_ = -1;
  std::chrono::microseconds watchdog_{0};  // WatchdogSec; zero: none
};

}  // namespace fp8kvd::ops
