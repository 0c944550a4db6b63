#include "server/shm/socket_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace fp8kvd::shm {
namespace {

constexpr int kBacklog = 32;
constexpr int kLockTries = 10;

template <typename... Parts>
absl::Status Unusable(const std::string& path, const Parts&... parts) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", path, ": ", parts...));
}

std::string Why() { return std::generic_category().message(errno); }

std::string LockPath(const std::string& path) { return path + ".lock"; }

// The lock's descriptor. A file that its last owner removed while we waited for it is no lock.
absl::StatusOr<int> Lock(const std::string& path) {
  const std::string lock_path = LockPath(path);
  for (int i = 0; i < kLockTries; ++i) {
    const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
      return Unusable(path, "no lock beside it (", Why(),
                      "); set shm_socket to a file in a folder that is there and ours");
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      close(fd);
      return Unusable(path, "another daemon has it; stop that one or set another shm_socket");
    }
    struct stat ours = {};
    struct stat named = {};
    if (fstat(fd, &ours) == 0 && stat(lock_path.c_str(), &named) == 0 &&
        ours.st_ino == named.st_ino && ours.st_dev == named.st_dev) {
      return fd;
    }
    close(fd);
  }
  return Unusable(path, "its lock comes and goes; start one daemon at a time");
}

}  // namespace

absl::StatusOr<std::string> DefaultSocketPath(int port) {
  const std::string name = absl::StrCat("/fp8kvd-", port, ".sock");
  for (const char* variable : {"RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"}) {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing changes the environment once threads run
    const char* const folder = std::getenv(variable);
    if (folder != nullptr && access(folder, W_OK) == 0) return folder + name;
  }
  const std::string folder = absl::StrCat("/tmp/fp8kvd-", geteuid());
  struct stat found = {};
  if ((mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) || lstat(folder.c_str(), &found) != 0 ||
      !S_ISDIR(found.st_mode) || found.st_uid != geteuid() || (found.st_mode & 0022) != 0) {
    return Unusable(folder + name, "the folder is not ours alone; set shm_socket");
  }
  return folder + name;
}

absl::StatusOr<std::unique_ptr<SocketFile>> SocketFile::Listen(const std::string& path,
                                                               bool group_access) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return Unusable(path, "it has ", path.size(), " characters, a socket's path has at most ",
                    sizeof(sockaddr_un::sun_path) - 1, "; set a shorter shm_socket");
  }
  const absl::StatusOr<int> lock_fd = Lock(path);
  if (!lock_fd.ok()) return lock_fd.status();
  std::unique_ptr<SocketFile> file(new SocketFile(path, *lock_fd));
  absl::Status status = file->Bind(group_access);
  if (!status.ok()) return status;
  return file;
}

absl::Status SocketFile::Bind(bool group_access) {
  struct stat found = {};
  if (lstat(path_.c_str(), &found) == 0) {
    if (!S_ISSOCK(found.st_mode)) {
      return Unusable(path_, "a file that is no socket is there; set another shm_socket");
    }
    (void)unlink(path_.c_str());  // of a daemon that died: its lock was free
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_.c_str(), path_.size());
  fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  // The mode that bind gives the file is the socket's own: no moment with another one.
  if (fd_ < 0 || fchmod(fd_, group_access ? 0660 : 0600) != 0 ||
      bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Unusable(path_, Why(), "; set shm_socket to a file in a folder that is there and ours");
  }
  is_bound_ = true;
  // Against a umask that took the group's bits.
  if (chmod(path_.c_str(), group_access ? 0660 : 0600) != 0 || listen(fd_, kBacklog) != 0) {
    return Unusable(path_, Why());
  }
  return absl::OkStatus();
}

SocketFile::~SocketFile() {
  if (is_bound_) (void)unlink(path_.c_str());
  if (fd_ >= 0) close(fd_);
  (void)unlink(LockPath(path_).c_str());
  close(lock_fd_);
}

}  // namespace fp8kvd::shm
