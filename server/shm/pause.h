// server/shm/pause.h: what a thread does between two looks at memory that another one will write.
#pragma once

namespace fp8kvd::shm {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace fp8kvd::shm
