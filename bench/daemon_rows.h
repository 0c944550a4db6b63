// bench/daemon_rows.h: rows that the clients of a running daemon send it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fp8kvd::bench {

// bf16 of both signs, magnitudes 2^-7 to 2; the same seed gives the same rows.
inline std::vector<uint16_t> Rows(size_t elements, uint32_t seed) {
  std::vector<uint16_t> rows(elements);
  uint32_t state = seed * 2654435761U + 1;
  for (uint16_t& value : rows) {
    state = state * 1664525U + 1013904223U;
    const uint32_t exponent = 120 + (state >> 24) % 8;
    value = static_cast<uint16_t>((state >> 31) << 15 | exponent << 7 | (state >> 8 & 0x7FU));
  }
  return rows;
}

}  // namespace fp8kvd::bench
