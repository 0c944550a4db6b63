// server/engine/snapshot_format.h: a snapshot as a row of bytes, and its checks. What is in it and
// whether it fits this daemon is snapshot.h's and snapshot_part.h's; files are the daemon's
// (server/snapshot_folder.h).
//
// Numbers are little-endian.
//     preamble  8 bytes "FP8KVSNP", u32 format, u32 0
//     frames    u32 kind, u32 bytes, u64 check, then so many bytes, kFrameBytesMax at most
// in this order, store and pages once for each device:
//     1 head    who wrote it, and of what: SnapshotHead. Format 1 is of one device and does not
//               tell their number; older versions read it, too
//     2 store   cache::StoreImage
//     3 pages   each pool's pages, pool after pool, in the order of their numbers, in the layout of
//               the device that had them. A frame is full unless it is its pool's last.
//     4 end     empty, and the file with it
// Head and store are streams: u64 bytes of what follows, cut into frames. In them a text or a list
// is u32 count and its elements; the order of fields is that of the structs.
// A frame's check is the XXH3-64 of its kind, its size and the XXH3-64 of its bytes, the latter
// seeded with the check of the frame before it (the first: the XXH3-64 of the preamble). So a frame
// is good in its place and in its file alone: one that is changed, lost, moved or from elsewhere is
// found, and a file that ends early has no end.
//
// Errors: of a reader, DATA_LOSS names the byte and the part where the file is damaged or ends;
//   FAILED_PRECONDITION: it is no snapshot, or of a format that we do not read.
// Threads: none of its own. Cost: 512 KiB at most beside what is returned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "cache/store_image.h"

namespace fp8kvd::engine {

inline constexpr uint32_t kSnapshotFormatOfOne = 1;
inline constexpr uint32_t kSnapshotFormatOfSeveral = 2;
inline constexpr int64_t kFrameBytesMax = int64_t{512} << 10;

// Where a snapshot's bytes go, in order. An error ends the snapshot and is its error.
class SnapshotSink {
 public:
  virtual ~SnapshotSink() = default;
  virtual absl::Status Write(absl::Span<const uint8_t> bytes) = 0;
};

// Where they come from.
class SnapshotSource {
 public:
  virtual ~SnapshotSource() = default;
  // The next bytes; fewer than asked for where it ends.
  virtual absl::StatusOr<int64_t> Read(absl::Span<uint8_t> bytes) = 0;
};

// One thing that must be the same where a snapshot is restored.
struct SnapshotFact {
  std::string name;
  std::string value;
};

struct SnapshotHead {
  std::string version;  // of the fp8kvd that wrote it
  int64_t unix_ms = 0;  // when
  int64_t seqs = 0;     // what is in it
  int64_t pages = 0;
  int64_t bytes = 0;  // of pages
  std::vector<SnapshotFact> facts;
  std::vector<std::string> models;  // names of the numbers in the images
  std::vector<std::string> tenants;
  uint32_t devices = 1;
};

enum class FrameKind : uint32_t { kHead = 1, kStore = 2, kPages = 3, kEnd = 4 };

class SnapshotWriter {
 public:
  explicit SnapshotWriter(SnapshotSink* sink) : sink_(sink) {}

  absl::Status Begin(const SnapshotHead& head);
  absl::Status Store(const cache::StoreImage& image);
  absl::Status Pages(absl::Span<const uint8_t> bytes);  // kFrameBytesMax at most
  absl::Status End();

 private:
  absl::Status Frame(FrameKind kind, absl::Span<const uint8_t> bytes);
  absl::Status Stream(FrameKind kind, const std::string& text);

  SnapshotSink* const sink_;
  uint64_t check_ = 0;
};

class SnapshotReader {
 public:
  explicit SnapshotReader(SnapshotSource* source) : source_(source) {}

  absl::StatusOr<SnapshotHead> Begin();
  // The image, of whose pages only their number is known: page_counts, [models][groups].
  absl::StatusOr<cache::StoreImage> Store(std::vector<std::vector<uint64_t>>* page_counts);
  // The next frame of pages, which fills `bytes`, kFrameBytesMax at most.
  absl::Status Pages(absl::Span<uint8_t> bytes);
  absl::Status End();

 private:
  absl::Status Exactly(absl::Span<uint8_t> bytes);
  // The head of a frame that must be of this kind; its bytes and their check are still to come.
  absl::Status FrameHead(FrameKind kind, uint32_t* bytes, uint64_t* check);
  absl::Status FrameBytes(FrameKind kind, uint64_t check, absl::Span<uint8_t> bytes);
  absl::StatusOr<std::string> Stream(FrameKind kind);
  absl::Status Damaged(const char* how) const;

  SnapshotSource* const source_;
  int64_t at_ = 0;  // bytes read
  const char* part_ = "beginning";
  uint64_t check_ = 0;
};

}  // namespace fp8kvd::engine
