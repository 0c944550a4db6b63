// server/signals.h: the signals that the daemon obeys, taken one by one by the main thread.
#pragma once

#include <pthread.h>

#include <chrono>
#include <csignal>
#include <ctime>

namespace fp8kvd {

// Blocks SIGTERM, SIGINT and SIGHUP, for this and all later threads; WaitFor takes them.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set_, signal);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of write
  }

  // The next signal, or 0 when none came in time.
  int WaitFor(std::chrono::milliseconds time) const {
    const timespec limit = {.tv_sec = time.count() / 1000,
                            .tv_nsec = time.count() % 1000 * 1'000'000};
    const int signal = sigtimedwait(&set_, nullptr, &limit);
    return signal > 0 ? signal : 0;
  }

 private:
  sigset_t set_;
};

}  // namespace fp8kvd
