// tests/kernels/cases.h: the one table of decode cases that every backend's tests walk, and the
// data of a case. Free of GoogleTest and absl, so that the static GPU test program walks it too.
//
// A case is one launch. Its data follow from its seed alone. run_case.h runs one on a device and
// judge.h says whether the answer holds.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/params.h"

namespace fp8kvd::kernels::cases {

// What q, K and V are made of.
enum class Data : uint8_t {
  kNormal,           // N(0, 1)
  kOneHugeManyTiny,  // each K and V row: one element 1, the others so small that codes are
                     // subnormal
  kZeroRows,         // every third K row and every fourth V row is zero
  kMixedScales,      // each K and V row has a magnitude of its own, 2^-6 ... 2^6
  kClimbing,         // each tile's V is 8 times the last one's, from 2^-24 to 2^21, its K a quarter
                     // more, from 1 to 4.75; then again
  kNeedle,           // one late key holds nearly all of the weight and a V that no other has
  kSubnormalRows,    // K and V are subnormal bf16; scores are all about 0
  kRangeEdge,        // V at the largest magnitude allowed, K and q so that scores stay ordinary
  kKeysAtEdge,       // K at the largest magnitude allowed, beside ordinary q
  kQueriesTiny,      // q at 2^-60
  kQueriesLarge,     // q at 2^10
  kQueriesWide,      // q's elements from 2^-24 to 2^2
  kQueriesAtEdge,    // q at the largest magnitudes allowed
  kAllAtEdge,        // q, K and V at the largest magnitudes allowed
};

// One row of the launch: a sequence and its query tokens. Keys beyond the last query are committed
// too when seq_len says so; they must not be seen.
struct Row {
  int32_t seq_len = 0;  // committed tokens; 0 only together with pos -1, a query that sees no key
  int32_t pos = 0;
  int32_t q_len = 1;
  int32_t kv_heads = 1;
  int32_t window = 0;
  float softcap = 0.0F;
  bool sinks = false;
  float sm_scale = 0.0F;  // 0: 1 / sqrt(head_dim)
};

struct Case {
  std::string name;
  std::vector<Row> rows;
  int32_t head_dim = 128;
  int32_t group = 4;
  Precision precision = Precision::kFp8Kv;
  OutType out_type = OutType::kFp32;
  bool lse = true;
  bool batch_invariant = false;
  Data data = Data::kNormal;
  int32_t layers = 2;          // of the pool's layer group; the case uses the last one
  bool few_pairs = false;      // fewer than kPairsMin: the few rows are the point
  int64_t pool_bytes_min = 0;  // a pool so large that offsets pass 2^31 and 2^32
  uint64_t seed = 0;
};

// Which cases to walk. kShort: each kind once on small shapes, for sanitizers and slow devices.
enum class Set : uint8_t { kShort, kFull };
std::vector<Case> Cases(Set set);

// Instrumented code walks the short set.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr Set kSetOfThisBuild = Set::kShort;
#elif defined(__has_feature)
inline constexpr Set kSetOfThisBuild =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ? Set::kShort : Set::kFull;
#else
inline constexpr Set kSetOfThisBuild = Set::kFull;
#endif

// (row, query token, KV head) triples of a case: the accuracy contract is over at least 64.
int64_t Pairs(const Case& c);
inline constexpr int64_t kPairsMin = 64;

// The keys that a row's queries see together: [first, end). Equal when there is none.
struct Visible {
  int32_t first;
  int32_t end;
};
Visible VisibleKeys(const Row& row);

// Row-major inputs of one row, all bf16: q [q_len, q_heads, head_dim], k and v
// [seq_len, kv_heads, head_dim], sink_logits [q_heads] or empty.
struct RowData {
  std::vector<uint16_t> q;
  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
  std::vector<float> sink_logits;
};
RowData MakeRowData(const Case& c, int32_t row);
std::vector<RowData> MakeData(const Case& c);  // of all rows

// Seeded numbers for data that a test makes itself (SplitMix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>((Next() >> 32) * bound >> 32); }
  float Uniform();  // [0, 1)
  float Normal();   // mean 0, deviation 1, |x| < 3.5: a sum of four uniform numbers
  template <class T>
  void Shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[Below(static_cast<uint32_t>(i))]);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace fp8kvd::kernels::cases
