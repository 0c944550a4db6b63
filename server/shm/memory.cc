#include "server/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"

namespace fp8kvd::shm {
namespace {

constexpr uint64_t kPage = 4096;

absl::Status NoMemory(uint64_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the system gives no ", bytes, " bytes of shared memory (",
      std::generic_category().message(errno), "); ask for less, close a session, or use gRPC"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Memory>> Memory::Make(uint32_t entries, uint64_t data_bytes) {
  FP8KVD_CHECK(entries >= kEntriesMin && entries <= kEntriesMax && std::has_single_bit(entries));
  Welcome layout;
  layout.entries = entries;
  layout.requests_at = kRequestsAt;
  layout.replies_at = layout.requests_at + entries * sizeof(Request);
  layout.data_at = AlignUp(layout.replies_at + entries * sizeof(Reply), kPage);
  layout.data_bytes = AlignUp(data_bytes, kPage);
  layout.memory_bytes = layout.data_at + layout.data_bytes;
  const int fd = memfd_create("fp8kvd", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return NoMemory(layout.memory_bytes);
  const bool is_sealed = ftruncate(fd, static_cast<off_t>(layout.memory_bytes)) == 0 &&
                         fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  void* const bytes =
      is_sealed ? mmap(nullptr, layout.memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                : MAP_FAILED;
  if (bytes == MAP_FAILED) {
    const absl::Status status = NoMemory(layout.memory_bytes);
    close(fd);
    return status;
  }
  return std::unique_ptr<Memory>(new Memory(layout, fd, static_cast<uint8_t*>(bytes)));
}

void Memory::CloseFd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Memory::~Memory() {
  CloseFd();
  munmap(bytes_, layout_.memory_bytes);
}

}  // namespace fp8kvd::shm
