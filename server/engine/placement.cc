#include "server/engine/placement.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "config/base/limits.h"

namespace fp8kvd::engine {
namespace {

// Parts of a sequence that room is told in.
constexpr int64_t kParts = 1024;
static_assert(kPagesMax * kParts < int64_t{1} << 62);
static_assert(kSeqsMax * kPagesMax < int64_t{1} << 62);

bool Fits(const DeviceRoom& device, absl::Span<const SeqPages> pages) {
  for (size_t g = 0; g < pages.size(); ++g) {
    if (device.groups[g].pages_left < pages[g].reserved) return false;
  }
  return true;
}

int64_t RoomOf(const DeviceRoom& device, absl::Span<const SeqPages> pages) {
  int64_t room = std::numeric_limits<int64_t>::max();
  for (size_t g = 0; g < pages.size(); ++g) {
    const DeviceRoom::Group& group = device.groups[g];
    const int64_t left =
        std::min(group.pages_left, group.pages_total - device.seqs * pages[g].typical);
    room = std::min(room, left * kParts / pages[g].typical);
  }
  return room;
}

}  // namespace

std::vector<int32_t> PlaceSeqs(std::vector<DeviceRoom> devices, absl::Span<const SeqPages> pages,
                               int32_t count) {
  std::vector<int32_t> placed;
  const auto rank = [&](const DeviceRoom& device) {
    return std::tuple(!device.is_out, Fits(device, pages), RoomOf(device, pages));
  };
  const auto is_worse = [&](const DeviceRoom& a, const DeviceRoom& b) { return rank(a) < rank(b); };
  for (int32_t i = 0; i < count; ++i) {
    const auto best = std::max_element(devices.begin(), devices.end(), is_worse);
    if (best == devices.end() || best->is_out) break;
    ++best->seqs;
    for (size_t g = 0; g < pages.size(); ++g) best->groups[g].pages_left -= pages[g].reserved;
    placed.push_back(static_cast<int32_t>(best - devices.begin()));
  }
  return placed;
}

}  // namespace fp8kvd::engine
