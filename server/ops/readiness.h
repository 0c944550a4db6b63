// server/ops/readiness.h: whether the daemon takes work, and if not, why. One writer, any readers.
#pragma once

#include <atomic>
#include <cstdint>

namespace fp8kvd::ops {

enum class State : uint8_t { kStarting = 0, kReady = 1, kDraining = 2, kFailed = 3 };

class Readiness {
 public:
  void Set(State state) { state_.store(state, std::memory_order_relaxed); }
  State state() const { return state_.load(std::memory_order_relaxed); }
  bool is_ready() const { return state() == State::kReady; }

  const char* Why() const {
    switch (state()) {
      case State::kStarting:
        return "starting: kernels and memory are being prepared";
      case State::kReady:
        return "ready";
      case State::kDraining:
        return "draining: new work is refused";
      case State::kFailed:
        return "failed: the device gave an error, the process ends";
    }
    return "";
  }

 private:
  std::atomic<State> state_{State::kStarting};
};

}  // namespace fp8kvd::ops
