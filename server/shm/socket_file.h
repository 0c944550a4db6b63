// server/shm/socket_file.h: the unix socket as a file: whose it is, who may open it, when it goes.
//
// Promises: one living process has it, by a lock on <path>.lock that goes with the process: a file
//   that a dead one left is replaced, one of a living daemon is not touched. The file has its mode
//   (0600, or 0660) from the moment it is there. Both files go with the object.
// Threads: none of its own.
// Errors: UNAVAILABLE with the path and the way out.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace fp8kvd::shm {

// <folder>/fp8kvd-<port>.sock, in the first folder that is there: $RUNTIME_DIRECTORY (systemd's),
// $XDG_RUNTIME_DIR, or /tmp/fp8kvd-<uid>, which is made with mode 0700 and must be ours.
absl::StatusOr<std::string> DefaultSocketPath(int port);

class SocketFile {
 public:
  static absl::StatusOr<std::unique_ptr<SocketFile>> Listen(const std::string& path,
                                                            bool group_access);
  ~SocketFile();
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;

  int fd() const { return fd_; }  // listens, does not block
  const std::string& path() const { return path_; }

 private:
  SocketFile(std::string path, int lock_fd) : path_(std::move(path)), lock_fd_(lock_fd) {}
  absl::Status Bind(bool group_access);

  const std::string path_;
  const int lock_fd_;
  int fd_ = -1;
  bool is_bound_ = false;
};

}  // namespace fp8kvd::shm
