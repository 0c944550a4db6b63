// tests/sim/random.h: numbers from a seed, the same on every machine.
#pragma once

#include <cstdint>
#include <vector>

namespace fp8kvd::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) { state_ = Next(); }

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t value = state_;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
  }
  int64_t In(int64_t low, int64_t high) {  // both included
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  bool Chance(int32_t percent) { return In(1, 100) <= percent; }
  template <typename T>
  T& Of(std::vector<T>& choices) {
    return choices[In(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  template <typename T>
  T Of(std::initializer_list<T> choices) {
    return choices.begin()[In(0, static_cast<int64_t>(choices.size()) - 1)];
  }

 private:
  uint64_t state_;
};

}  // namespace fp8kvd::testing
