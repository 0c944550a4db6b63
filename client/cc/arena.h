// client/cc/arena.h: divides a range of bytes up: first fit, neighbours join when they are free.
// Threads: none of its own. Cost: O(parts in use).
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace fp8kvd::client {

class Arena {
 public:
  explicit Arena(uint64_t bytes) { free_[0] = bytes; }

  // Where `bytes` (at least 1) lie from now on; nothing when no gap is as large.
  std::optional<uint64_t> Take(uint64_t bytes);
  void GiveBack(uint64_t at, uint64_t bytes);  // as it was taken

 private:
  std::map<uint64_t, uint64_t> free_;  // gaps: bytes by where they begin
};

}  // namespace fp8kvd::client
