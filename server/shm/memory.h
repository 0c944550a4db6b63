// server/shm/memory.h: the memory of one session: made, sealed and owned here, mapped by both
// sides.
//
// Promises: its size never changes (F_SEAL_SHRINK, F_SEAL_GROW, and F_SEAL_SEAL so that no seal is
//   added): a page that is there now cannot be taken away from under a reader. Nobody can name it;
//   a client has it only by the descriptor that it is sent.
// Does not manage: what lies in it (ring.h), who may have one (quota.h).
// Threads: none of its own. Errors: RESOURCE_EXHAUSTED where the system gives no more.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "proto/fp8kvd/v1/shared_memory.h"

namespace fp8kvd::shm {

class Memory {
 public:
  // data_bytes is rounded up to pages.
  static absl::StatusOr<std::unique_ptr<Memory>> Make(uint32_t entries, uint64_t data_bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const Welcome& layout() const { return layout_; }
  uint8_t* bytes() const { return bytes_; }
  int fd() const { return fd_; }
  void CloseFd();  // it was sent; the mapping stays

 private:
  Memory(const Welcome& layout, int fd, uint8_t* bytes) : layout_(layout), fd_(fd), bytes_(bytes) {}

  const Welcome layout_;
  int fd_;
  uint8_t* const bytes_;
};

}  // namespace fp8kvd::shm
