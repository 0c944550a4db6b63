#include "client/cc/arena.h"

#include <algorithm>
#include <iterator>

namespace fp8kvd::client {

std::optional<uint64_t> Arena::Take(uint64_t bytes) {
  const auto gap = std::find_if(free_.begin(), free_.end(),
                                [bytes](const auto& part) { return part.second >= bytes; });
  if (gap == free_.end()) return std::nullopt;
  const uint64_t at = gap->first;
  const uint64_t left = gap->second - bytes;
  free_.erase(gap);
  if (left > 0) free_[at + bytes] = left;
  return at;
}

void Arena::GiveBack(uint64_t at, uint64_t bytes) {
  auto gap = free_.emplace(at, bytes).first;
  const auto next = std::next(gap);
  if (next != free_.end() && next->first == at + bytes) {
    gap->second += next->second;
    free_.erase(next);
  }
  if (gap == free_.begin()) return;
  const auto before = std::prev(gap);
  if (before->first + before->second != at) return;
  before->second += gap->second;
  free_.erase(gap);
}

}  // namespace fp8kvd::client
