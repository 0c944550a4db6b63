// Staging slots: sizes, exhaustion, leaks.
#include "server/engine/staging.h"

#include <cstdint>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

#include "tests/support/fake_backend.h"

namespace fp8kvd::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(Staging, HalfIsOneSlotForTheLargestMessage) {
  FakeBackend backend;
  auto staging = *engine::Staging::Make(&backend, 256 * kMiB, 1024);
  EXPECT_EQ(staging->slot_bytes_max(), 128 * kMiB);
  const auto slot = staging->Acquire(128 * kMiB);
  ASSERT_TRUE(slot.ok()) << slot.status();
  EXPECT_TRUE(absl::IsResourceExhausted(staging->Acquire(128 * kMiB).status()));
  staging->Release(*slot);
  EXPECT_EQ(backend.allocations(), 1);
}

TEST(Staging, AMessageBeyondTheLargestSlotIsTold) {
  FakeBackend backend;
  auto staging = *engine::Staging::Make(&backend, kMiB, 16);
  EXPECT_TRUE(absl::IsInvalidArgument(staging->Acquire(kMiB).status()));
}

TEST(Staging, SlotsNeverOverlapAndComeBack) {
  FakeBackend backend;
  auto staging = *engine::Staging::Make(&backend, 16 * kMiB, 64);
  std::vector<engine::StagingSlot> held;
  std::set<std::pair<uint8_t*, uint8_t*>> ranges;
  for (int64_t bytes = 1; bytes < 8 * kMiB; bytes *= 3) {
    for (auto slot = staging->Acquire(bytes); slot.ok(); slot = staging->Acquire(bytes)) {
      EXPECT_GE(slot->size, bytes);
      held.push_back(*slot);
      ranges.emplace(slot->bytes, slot->bytes + slot->size);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(held.size()), staging->slots_used());
  EXPECT_LE(staging->slots_total(), 64);
  uint8_t* end = nullptr;
  for (const auto& [first, last] : ranges) {
    EXPECT_TRUE(end == nullptr || first >= end);
    end = last;
  }
  for (const engine::StagingSlot& slot : held) staging->Release(slot);
  EXPECT_EQ(staging->slots_used(), 0);
}

TEST(Staging, SmallMessagesNeverTakeTheLargestSlot) {
  FakeBackend backend;
  auto staging = *engine::Staging::Make(&backend, 16 * kMiB, 64);
  std::vector<engine::StagingSlot> held;
  for (auto slot = staging->Acquire(1); slot.ok(); slot = staging->Acquire(1)) {
    held.push_back(*slot);
  }
  const auto largest = staging->Acquire(8 * kMiB);
  ASSERT_TRUE(largest.ok()) << largest.status();
  held.push_back(*largest);
  for (const engine::StagingSlot& slot : held) staging->Release(slot);
}

TEST(StagingDeathTest, ASlotGivenBackTwiceIsABug) {
  FakeBackend backend;
  auto staging = *engine::Staging::Make(&backend, kMiB, 16);
  const engine::StagingSlot slot = *staging->Acquire(1);
  staging->Release(slot);
  EXPECT_DEATH(staging->Release(slot), "bug");
}

TEST(Staging, TooLittleIsRefusedAtStart) {
  FakeBackend backend;
  EXPECT_FALSE(engine::Staging::Make(&backend, 1000, 16).ok());
}

}  // namespace
}  // namespace fp8kvd::testing
