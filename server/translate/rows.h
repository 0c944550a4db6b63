// server/translate/rows.h: what a poller does with rows of bf16 on their way to a slot, or on their
// copy there: are all values within range, and what is their digest.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/types/span.h"

#include "server/translate/wire.h"

namespace fp8kvd::translate {

struct BadElement {
  int64_t index = 0;
  std::string text;  // "NaN", "-inf", "5.4e+08"
};

// The first value that is not finite or >= 2^28 in size.
std::optional<BadElement> FindBad(absl::Span<const uint16_t> values);

// XXH3-64 of both, as the replay check compares them.
uint64_t RowsDigest(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v);

// Copies rows, each byte of `from` read once; the first bad value of the copy, if any, goes to
// *bad. `from` begins at an even byte.
void CopyRows(const uint8_t* from, uint16_t* to, int64_t count, std::optional<BadElement>* bad);
// The same, and XXH3-64 of the copy with this seed: of K with 0, then of V with that of K, it is
// their RowsDigest.
uint64_t CopyRows(const uint8_t* from, uint16_t* to, int64_t count, uint64_t seed,
                  std::optional<BadElement>* bad);

// Rows that begin at a byte of a field, which may lie in pieces, and they at odd addresses.
struct RowsAt {
  RangeReader* field;
  int64_t byte;
};

// As CopyRows, to a slot that a device reads, past this processor's caches. Then FinishStreaming,
// before the device may look. `to` begins at a multiple of 32; count is a multiple of 16.
void StreamRows(RowsAt from, uint16_t* to, int64_t count, std::optional<BadElement>* bad);
uint64_t StreamRows(RowsAt from, uint16_t* to, int64_t count, uint64_t seed,
                    std::optional<BadElement>* bad);
// The same a part at a time, for who has others to serve in between.
class RowStream {
 public:
  static constexpr int64_t kPart = 8192;  // elements: some 3 us

  RowStream();
  ~RowStream();
  void Begin(RowsAt from, uint16_t* to, int64_t count, uint64_t seed);
  // Copies the next part; true: more is left. After a bad value nothing else may be asked.
  bool Continue(std::optional<BadElement>* bad);
  uint64_t digest() const;  // when nothing is left

 private:
  struct Digest;
  RowsAt from_{};
  uint16_t* to_ = nullptr;
  int64_t count_ = 0;
  int64_t done_ = 0;
  std::unique_ptr<Digest> digest_;
};
void FinishStreaming();

}  // namespace fp8kvd::translate
