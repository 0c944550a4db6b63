// config/base/check.h: stops the process on a bug of ours. Never for what a client, a file, a
// device or the clock can cause: that is an absl::Status.
#pragma once

#include <cstdio>
#include <cstdlib>

#define FP8KVD_CHECK(condition)                                                               \
  do {                                                                                        \
    if (!(condition)) [[unlikely]] {                                                          \
      std::fprintf(stderr, "%s:%d: bug: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                           \
    }                                                                                         \
  } while (false)
