// tests/engine/snapshot_rig.h: snapshots in memory, and engines that are saved and restored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "server/engine/snapshot.h"
#include "tests/engine/fleet_rig.h"
#include "tests/engine/rig.h"

namespace fp8kvd::testing {

// Instrumented code is slower by hundreds: there tests that try everything try one in so many.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // GCC
#define FP8KVD_IS_INSTRUMENTED 1
#elif defined(__has_feature)  // Clang
#define FP8KVD_IS_INSTRUMENTED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define FP8KVD_IS_INSTRUMENTED 0
#endif
#if FP8KVD_IS_INSTRUMENTED
inline constexpr int32_t kOneIn = 67;
#else
inline constexpr int32_t kOneIn = 1;
#endif

// A sink with so much room.
class StringSink final : public engine::SnapshotSink {
 public:
  explicit StringSink(size_t room = SIZE_MAX) : room_(room) {}
  absl::Status Write(absl::Span<const uint8_t> bytes) override {
    if (bytes.size() > room_ - text.size()) return absl::ResourceExhaustedError("no room is left");
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return absl::OkStatus();
  }
  std::string text;

 private:
  const size_t room_;
};

class StringSource final : public engine::SnapshotSource {
 public:
  explicit StringSource(const std::string& text) : text_(text) {}
  absl::StatusOr<int64_t> Read(absl::Span<uint8_t> bytes) override {
    const size_t count = std::min(bytes.size(), text_.size() - at_);
    std::copy_n(text_.begin() + static_cast<ptrdiff_t>(at_), count, bytes.begin());
    at_ += count;
    return static_cast<int64_t>(count);
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

// As at SIGTERM; the engines take no calls afterwards.
inline std::string DrainAndSaveAll(engine::Fleet* fleet, engine::SnapshotInfo* info = nullptr) {
  fleet->Drain();
  for (int32_t i = 0; i < fleet->devices(); ++i) EXPECT_TRUE(fleet->Of(i).Run().ok());
  StringSink sink;
  engine::SnapshotInfo ours{.version = "0.1.0", .unix_ms = 1234};
  const absl::Status status = engine::SaveSnapshot(fleet, &sink, &ours);
  EXPECT_TRUE(status.ok()) << status;
  if (info != nullptr) *info = ours;
  return std::move(sink.text);
}

inline absl::Status RestoreAll(engine::Fleet* fleet, const std::string& snapshot) {
  StringSource source(snapshot);
  engine::SnapshotInfo info;
  return engine::RestoreSnapshot(fleet, &source, &info);
}

// An engine that may save, and that another one's snapshot may be restored into.
class SnapshotRig : public Rig {
 public:
  explicit SnapshotRig(const RigOptions& options = RigOptions{})
      : Rig(options), fleet({engine}, options.tenants) {
    EXPECT_TRUE(engine::PrepareSnapshots(&fleet).ok());
  }
  std::string DrainAndSave(engine::SnapshotInfo* info = nullptr) {
    return DrainAndSaveAll(&fleet, info);
  }
  absl::Status Restore(const std::string& snapshot) { return RestoreAll(&fleet, snapshot); }

  engine::Fleet fleet;  // of the one
};

// The same on several devices.
class SnapshotFleetRig : public FleetRig {
 public:
  explicit SnapshotFleetRig(int32_t devices, const std::vector<ModelSpec>& specs = {ModelSpec{}},
                            int32_t seqs_max = 32, uint64_t incarnation = 7)
      : FleetRig(devices, seqs_max, {}, specs, incarnation) {
    EXPECT_TRUE(engine::PrepareSnapshots(fleet.get()).ok());
  }
  std::string DrainAndSave(engine::SnapshotInfo* info = nullptr) {
    return DrainAndSaveAll(fleet.get(), info);
  }
  absl::Status Restore(const std::string& snapshot) { return RestoreAll(fleet.get(), snapshot); }
};

}  // namespace fp8kvd::testing
