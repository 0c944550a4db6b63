#include "server/engine/staging.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"

namespace fp8kvd::engine {

Staging::SizeClass::SizeClass(int64_t slot_size, uint8_t* first, int32_t slots, int32_t tenants)
    : size(slot_size),
      bytes(first),
      count(slots),
      tenant_max(std::max(1, slots / tenants)),
      is_held(slots, false),
      held(tenants, 0) {
  free.reserve(slots);
  for (int32_t i = slots - 1; i >= 0; --i) free.push_back(i);
}

absl::StatusOr<std::unique_ptr<Staging>> Staging::Make(kernels::Backend* backend, int64_t bytes,
                                                       int32_t slots_max, int32_t tenants) {
  if (bytes < 4 * kSlotBytesMin || slots_max < 2) {
    return absl::InvalidArgumentError(absl::StrCat("staging_bytes ", bytes, " and staging_slots ",
                                                   slots_max, " are too small; give at least ",
                                                   4 * kSlotBytesMin, " bytes and 2 slots"));
  }
  absl::StatusOr<uint8_t*> memory = backend->AllocStaging(bytes);
  if (!memory.ok()) return memory.status();

  const int64_t largest = bytes / 2 / kSlotBytesMin * kSlotBytesMin;
  std::vector<int64_t> sizes;
  for (int64_t size = kSlotBytesMin; size < largest; size *= 4) sizes.push_back(size);
  while (sizes.size() > 1 && largest / static_cast<int64_t>(sizes.size()) < sizes.back()) {
    sizes.pop_back();
  }

  std::unique_ptr<Staging> staging(new Staging());
  uint8_t* next = *memory;
  const auto add = [&](int64_t size, int64_t count) {
    staging->classes_.push_back(
        std::make_unique<SizeClass>(size, next, static_cast<int32_t>(count), tenants));
    staging->slots_total_ += count;
    next += size * count;
  };
  const int64_t share = sizes.empty() ? 0 : largest / static_cast<int64_t>(sizes.size());
  int64_t slots_left = slots_max - 1;
  for (size_t i = sizes.size(); i-- > 0;) {  // the larger ones first: they are few
    const int64_t count = std::min(share / sizes[i], slots_left);
    slots_left -= count;
    if (count > 0) add(sizes[i], count);
  }
  std::reverse(staging->classes_.begin(), staging->classes_.end());
  add(largest, 1);
  return staging;
}

bool Staging::Take(SizeClass& size_class, int32_t index_of_class, StagingSlot* slot) {
  const std::lock_guard<std::mutex> lock(size_class.mutex);
  int32_t& held = size_class.held[static_cast<uint32_t>(slot->tenant)];
  if (size_class.free.empty() || held == size_class.tenant_max) return false;
  ++held;
  const int32_t index = size_class.free.back();
  size_class.free.pop_back();
  size_class.is_held[index] = true;
  *slot = StagingSlot{.bytes = size_class.bytes + size_class.size * index,
                      .size = size_class.size,
                      .size_class = index_of_class,
                      .index = index,
                      .tenant = slot->tenant};
  return true;
}

absl::StatusOr<StagingSlot> Staging::Acquire(int64_t bytes, cache::TenantId tenant) {
  if (bytes > slot_bytes_max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message and its reply need ", bytes, " bytes, ", slot_bytes_max(),
                     " are the most; send fewer items or tokens at a time"));
  }
  StagingSlot slot{.tenant = tenant};
  int32_t tried = 0;
  for (size_t i = 0; i < classes_.size() && tried < 2; ++i) {
    if (classes_[i]->size < bytes) continue;
    if (Take(*classes_[i], static_cast<int32_t>(i), &slot)) return slot;
    ++tried;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("all staging slots that you may have for messages of ", bytes,
                   " bytes are in use; wait for replies, then try again"));
}

void Staging::Release(const StagingSlot& slot) {
  SizeClass& size_class = *classes_[slot.size_class];
  const std::lock_guard<std::mutex> lock(size_class.mutex);
  FP8KVD_CHECK(size_class.is_held[slot.index]);
  size_class.is_held[slot.index] = false;
  --size_class.held[static_cast<uint32_t>(slot.tenant)];
  size_class.free.push_back(slot.index);
}

int64_t Staging::slot_bytes_max() const { return classes_.back()->size; }

int64_t Staging::slots_used() const {
  int64_t used = 0;
  for (const std::unique_ptr<SizeClass>& size_class : classes_) {
    const std::lock_guard<std::mutex> lock(size_class->mutex);
    used += size_class->count - static_cast<int64_t>(size_class->free.size());
  }
  return used;
}

}  // namespace fp8kvd::engine
