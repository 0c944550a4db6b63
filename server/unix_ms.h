// server/unix_ms.h: the time of day, for what people and later runs read. What is measured goes by
// engine::Clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace fp8kvd {

inline int64_t UnixMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace fp8kvd
