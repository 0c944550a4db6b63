// kernels/cpu/float_mode.h: how this thread's processor treats subnormal numbers, for a scope.
//
// Attention flushes them to zero: one operation on a subnormal can cost a hundred cycles, so a
// client could slow everyone down with a few rows. Append keeps them: its codes and scales are
// exact.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fp8kvd::kernels::cpu {

enum class Subnormals : uint8_t { kKeep, kFlush };

// Sets the mode of the calling thread and restores what was there.
class FloatMode {
 public:
  explicit FloatMode(Subnormals subnormals) : before_(Read()) {
    Write(subnormals == Subnormals::kFlush ? before_ | kFlushBits : before_ & ~kFlushBits);
  }
  ~FloatMode() { Write(before_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlushBits = 0x8040;  // MXCSR: flush to zero, denormals are zero
  static uint64_t Read() { return _mm_getcsr(); }
  static void Write(uint64_t bits) { _mm_setcsr(static_cast<uint32_t>(bits)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushBits = uint64_t{1} << 24;  // FPCR.FZ
  static uint64_t Read() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void Write(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
#else
  static constexpr uint64_t kFlushBits = 0;  // elsewhere subnormals stay, at their price
  static uint64_t Read() { return 0; }
  static void Write(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace fp8kvd::kernels::cpu
