#include "server/translate/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#define XXH_STATIC_LINKING_ONLY  // the state of a digest on the stack
#include <xxhash.h>
#ifdef FP8KVD_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>  // the same functions and values, by the widest vectors of the machine
#endif

#include "kernels/cpu/range.h"

namespace fp8kvd::translate {
namespace {

std::string Text(uint16_t value) {
  const float number = std::bit_cast<float>(uint32_t{value} << 16);
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  return absl::StrCat(number);
}

constexpr int64_t kElementBytes = sizeof(uint16_t);
constexpr int64_t kBlock = 4096;  // elements: stays in the first cache

struct Elements {
  int64_t first;
  int64_t end;
};

// At most kBlock of them; the block, where not null, has them, too.
void StreamBlock(RowsAt from, uint16_t* to, Elements elements, uint16_t* block,
                 std::optional<BadElement>* bad) {
  alignas(64) uint8_t room[kBlock * sizeof(uint16_t)];
  const int64_t at = elements.first;
  const int64_t count = elements.end - at;
  const uint8_t* const rows =
      from.field->Get(from.byte + at * kElementBytes, count * kElementBytes, room);
  const int64_t index = kernels::cpu::CopyPastCaches(rows, to + at, block, count);
  if (index >= 0 && !bad->has_value()) *bad = BadElement{at + index, Text(to[at + index])};
}

void StreamBlocks(RowsAt from, uint16_t* to, Elements elements, XXH3_state_t* state,
                  std::optional<BadElement>* bad) {
  alignas(64) uint16_t block[kBlock];
  for (int64_t at = elements.first; at < elements.end; at += kBlock) {
    const Elements part = {at, std::min(at + kBlock, elements.end)};
    StreamBlock(from, to, part, block, bad);
    XXH3_64bits_update(state, block, static_cast<size_t>(part.end - at) * sizeof(uint16_t));
  }
}

}  // namespace

std::optional<BadElement> FindBad(absl::Span<const uint16_t> values) {
  const int64_t index =
      kernels::cpu::FirstOutOfRange(values.data(), static_cast<int64_t>(values.size()));
  if (index < 0) return std::nullopt;
  return BadElement{index, Text(values[index])};
}

uint64_t RowsDigest(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v) {
  const uint64_t of_k = XXH3_64bits(k.data(), k.size() * sizeof(uint16_t));
  return XXH3_64bits_withSeed(v.data(), v.size() * sizeof(uint16_t), of_k);
}

void CopyRows(const uint8_t* from, uint16_t* to, int64_t count, std::optional<BadElement>* bad) {
  const int64_t index =
      kernels::cpu::CopyInRange(reinterpret_cast<const uint16_t*>(from), to, count);
  if (index >= 0) *bad = BadElement{index, Text(to[index])};
}

uint64_t CopyRows(const uint8_t* from, uint16_t* to, int64_t count, uint64_t seed,
                  std::optional<BadElement>* bad) {
  CopyRows(from, to, count, bad);
  return XXH3_64bits_withSeed(to, static_cast<size_t>(count) * sizeof(uint16_t), seed);
}

void StreamRows(RowsAt from, uint16_t* to, int64_t count, std::optional<BadElement>* bad) {
  for (int64_t at = 0; at < count; at += kBlock) {
    StreamBlock(from, to, {at, std::min(at + kBlock, count)}, nullptr, bad);
  }
}

uint64_t StreamRows(RowsAt from, uint16_t* to, int64_t count, uint64_t seed,
                    std::optional<BadElement>* bad) {
  if (count <= kBlock) {
    alignas(64) uint16_t block[kBlock];
    StreamBlock(from, to, {0, count}, block, bad);
    return XXH3_64bits_withSeed(block, static_cast<size_t>(count) * sizeof(uint16_t), seed);
  }
  XXH3_state_t state;
  XXH3_64bits_reset_withSeed(&state, seed);
  StreamBlocks(from, to, {0, count}, &state, bad);
  return XXH3_64bits_digest(&state);
}

struct RowStream::Digest {
  XXH3_state_t state;
};

RowStream::RowStream() : digest_(std::make_unique<Digest>()) {}
RowStream::~RowStream() = default;

void RowStream::Begin(RowsAt from, uint16_t* to, int64_t count, uint64_t seed) {
  from_ = from;
  to_ = to;
  count_ = count;
  done_ = 0;
  XXH3_64bits_reset_withSeed(&digest_->state, seed);
}

bool RowStream::Continue(std::optional<BadElement>* bad) {
  const int64_t end = std::min(count_, done_ + kPart);
  StreamBlocks(from_, to_, {done_, end}, &digest_->state, bad);
  done_ = end;
  return done_ < count_;
}

uint64_t RowStream::digest() const { return XXH3_64bits_digest(&digest_->state); }

void FinishStreaming() { kernels::cpu::FinishCopies(); }

}  // namespace fp8kvd::translate
