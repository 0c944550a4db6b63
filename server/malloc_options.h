// server/malloc_options.h: how the process's malloc treats messages of megabytes that come and go:
// giving their memory back to the system and asking for it again costs two to seven times the
// throughput. Before the first thread.
#pragma once

#include <malloc.h>

namespace fp8kvd {

inline void TuneMalloc() {
  // NOLINTBEGIN(concurrency-mt-unsafe): before the first thread
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
  mallopt(M_ARENA_MAX, 8);
  // NOLINTEND(concurrency-mt-unsafe)
}

}  // namespace fp8kvd
