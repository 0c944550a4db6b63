// server/engine/clock.h: the time that the engine sees. Handed in, so that tests/sim runs on its
// own.
#pragma once

#include <chrono>
#include <cstdint>

namespace fp8kvd::engine {

class Clock {
 public:
  virtual ~Clock() = default;
  // Microseconds since some fixed moment; never goes back.
  virtual int64_t NowUs() const = 0;
};

class SteadyClock : public Clock {
 public:
  int64_t NowUs() const override {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace fp8kvd::engine
