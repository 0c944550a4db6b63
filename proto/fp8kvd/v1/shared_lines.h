// proto/fp8kvd/v1/shared_lines.h: what either side of the same-host transport asks of its processor
// while it waits for the other. No byte changes by it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fp8kvd::shm {

// Between two looks at memory that somebody else will write.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline constexpr uint64_t kCacheLine = 64;

// Beyond this the first lines would be gone from the near caches before they are written, and the
// asking would take longer than who waits may be away.
inline constexpr uint64_t kOwnBytesMax = uint64_t{64} << 10;

// Brings memory that this side writes next into its cache as its own, of which the other side has
// copies: writing 16 KiB is 1.5 us faster then (H200 node, Emerald Rapids). Does nothing for more
// than kOwnBytesMax.
inline void OwnLines(const uint8_t* bytes, uint64_t size) {
  if (size > kOwnBytesMax) return;
  for (uint64_t at = 0; at < size; at += kCacheLine) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(bytes[at]));  // __builtin_prefetch asks for a copy to read
#else
    __builtin_prefetch(bytes + at, /*write=*/1);
#endif
  }
}

// Moves memory that this side has just written, and the other side reads next, towards the cache
// that both share. A processor gives out lines that it alone has at 8 ns each, whoever asks for
// them; those it has given away before cost the reader 2. Takes 6 ns a line, so it is for who has
// published them and waits. Does nothing for more than kOwnBytesMax, nor on older processors.
inline void PassLines(const uint8_t* bytes, uint64_t size) {
  if (size > kOwnBytesMax) return;
#if defined(__x86_64__)
  for (uint64_t at = 0; at < size; at += kCacheLine) {
    asm volatile("cldemote %0" : : "m"(bytes[at]));  // to a processor without it: no operation
  }
#else
  (void)bytes;
#endif
}

}  // namespace fp8kvd::shm
