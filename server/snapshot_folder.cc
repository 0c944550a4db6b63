#include "server/snapshot_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace fp8kvd {
namespace {

constexpr const char* kName = "fp8kvd.snapshot";
constexpr const char* kPart = "fp8kvd.snapshot.part";
constexpr const char* kTaken = "fp8kvd.snapshot.taken";
constexpr const char* kRefused = "fp8kvd.snapshot.refused";
constexpr const char* kLock = "fp8kvd.lock";

// So much is on its way to the disk at a time: what the last fsync waits for is bounded, and so is
// the page cache that a snapshot takes from others.
constexpr int64_t kWindowBytes = int64_t{32} << 20;

std::string Why() { return std::generic_category().message(errno); }

class FileSource final : public engine::SnapshotSource {
 public:
  explicit FileSource(int file) : file_(file) {
    (void)posix_fadvise(file_, 0, 0, POSIX_FADV_SEQUENTIAL);
  }
  ~FileSource() override { close(file_); }

  absl::StatusOr<int64_t> Read(absl::Span<uint8_t> bytes) override {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t got = read(file_, bytes.data() + done, bytes.size() - done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return absl::UnavailableError(absl::StrCat("it cannot be read: ", Why()));
      if (got == 0) break;
      done += static_cast<size_t>(got);
    }
    return static_cast<int64_t>(done);
  }

 private:
  const int file_;
};

class FileSink final : public engine::SnapshotSink {
 public:
  FileSink(int file, const engine::Clock& clock, int64_t ms_max, std::atomic<int64_t>* written)
      : file_(file),
        clock_(clock),
        ms_max_(ms_max),
        end_us_(clock.NowUs() + ms_max * 1000),
        written_(*written) {
    written_ = 0;
  }

  absl::Status Write(absl::Span<const uint8_t> bytes) override {
    if (absl::Status status = CheckTime(); !status.ok()) return status;
    while (!bytes.empty()) {
      const ssize_t took = write(file_, bytes.data(), bytes.size());
      if (took < 0 && errno == EINTR) continue;
      if (took < 0) return Failed();
      bytes.remove_prefix(static_cast<size_t>(took));
      written_ += took;
    }
    if (written_ - started_ >= kWindowBytes) NextWindow();
    return absl::OkStatus();
  }

  absl::Status ReachDisk() {
    if (fsync(file_) != 0) return Failed();
    return CheckTime();
  }

 private:
  absl::Status CheckTime() const {
    if (clock_.NowUs() <= end_us_) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(
        "snapshot_ms_max (", ms_max_, ") has passed after ", written_.load(),
        " bytes; allow more, with as much more before the SIGKILL, or take a faster disk"));
  }
  absl::Status Failed() const {
    return absl::UnavailableError(absl::StrCat("after ", written_.load(), " bytes: ", Why(),
                                               "; make room, or name another snapshot_dir"));
  }
  // Waits for the window before, starts the one just written. Advice: where a file system does not
  // know it, fsync does it all.
  void NextWindow() {
    (void)sync_file_range(
        file_, waited_, started_ - waited_,
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    waited_ = started_;
    (void)sync_file_range(file_, started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
    started_ = written_;
  }

  const int file_;
  const engine::Clock& clock_;
  const int64_t ms_max_;
  const int64_t end_us_;
  std::atomic<int64_t>& written_;
  int64_t started_ = 0;  // bytes whose way to the disk has begun,
  int64_t waited_ = 0;   // and that are there
};

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotFolder>> SnapshotFolder::Open(const std::string& path) {
  const auto unusable = [&path](const std::string& why) {
    return absl::UnavailableError(absl::StrCat("cannot use snapshot_dir ", path, ": ", why));
  };
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return unusable(Why() + "; name a folder that is there and ours");
  const int lock = openat(folder, kLock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) {
    absl::Status status = unusable(Why() + "; name a folder that we may write");
    close(folder);
    return status;
  }
  std::unique_ptr<SnapshotFolder> opened(new SnapshotFolder(path, folder, lock));
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    return unusable("another daemon has it; stop that one, or give each a folder of its own");
  }
  opened->RemoveUnfinished();
  return opened;
}

SnapshotFolder::~SnapshotFolder() {
  close(lock_);
  close(folder_);
}

std::string SnapshotFolder::path() const { return absl::StrCat(folder_path_, "/", kName); }

void SnapshotFolder::RemoveUnfinished() {
  for (const char* name : {kPart, kTaken}) {
    if (unlinkat(folder_, name, 0) != 0) continue;
    absl::StrAppend(&removed_, removed_.empty() ? "" : " and ", name);
  }
}

absl::Status SnapshotFolder::Failed(const char* what, const char* name) const {
  return absl::UnavailableError(
      absl::StrCat("cannot ", what, " ", folder_path_, "/", name, ": ", Why()));
}

absl::Status SnapshotFolder::RenameTo(const char* from, const char* to) {
  if (renameat(folder_, from, folder_, to) != 0) return Failed("rename", from);
  return fsync(folder_) == 0 ? absl::OkStatus() : Failed("keep the new name of", from);
}

absl::StatusOr<std::unique_ptr<engine::SnapshotSource>> SnapshotFolder::Take() {
  if (renameat(folder_, kName, folder_, kTaken) != 0) {
    if (errno == ENOENT) return std::unique_ptr<engine::SnapshotSource>();
    return Failed("take", kName);
  }
  if (fsync(folder_) != 0) return Failed("take", kName);
  const int file = openat(folder_, kTaken, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return Failed("open", kTaken);
  auto source = std::make_unique<FileSource>(file);
  struct stat found = {};
  if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode) ||
      (found.st_uid != geteuid() && found.st_uid != 0) || (found.st_mode & S_IWOTH) != 0) {
    return absl::FailedPreconditionError("it is no file of ours that others may not write");
  }
  return source;
}

absl::Status SnapshotFolder::Drop() {
  return unlinkat(folder_, kTaken, 0) == 0 ? absl::OkStatus() : Failed("remove", kTaken);
}

absl::Status SnapshotFolder::Refuse() { return RenameTo(kTaken, kRefused); }
absl::Status SnapshotFolder::GiveBack() { return RenameTo(kTaken, kName); }

absl::Status SnapshotFolder::Save(const engine::Clock& clock, int64_t ms_max,
                                  const std::function<absl::Status(engine::SnapshotSink*)>& write) {
  const int file =
      openat(folder_, kPart, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return Failed("make", kPart);
  const absl::Cleanup close_file = [file] { close(file); };
  FileSink sink(file, clock, ms_max, &bytes_written_);
  absl::Status status = write(&sink);
  if (status.ok()) status = sink.ReachDisk();
  if (status.ok()) status = RenameTo(kPart, kName);
  if (!status.ok()) (void)unlinkat(folder_, kPart, 0);
  return status;
}

}  // namespace fp8kvd
