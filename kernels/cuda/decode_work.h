// kernels/cuda/decode_work.h: how much a row asks for, in units and items. The kernels cut by it,
// the host sizes launches and workspaces by it: one arithmetic for both.
//
// A *pair* is a row, one of its KV heads and up to `columns` of the query columns that read it
// (column = query token * group + head of the group). A *unit* is unit_tokens tokens of a pair, at
// a multiple of that position: the smallest share of work, and one copy. An *item* is what may not
// be cut: a unit, or with batch_invariant a range of units that follows from the row alone. A
// *piece* is a pair's result over some of its units.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/params.h"

namespace fp8kvd::kernels::cuda {

// What a kernel is built for.
struct Grain {
  int32_t unit_tokens;
  int32_t columns;
};

// A pair without a key still has one unit, which copies nothing: its output has to be written.
struct RowWork {
  int32_t first_unit;  // of each pair, counted from the sequence's start
  int32_t units;       // of a pair, >= 1
  int32_t pairs;
};

// For value >= 0, unit > 0.
FP8KVD_HOST_DEVICE constexpr int32_t CeilDiv(int32_t value, int32_t unit) {
  return static_cast<int32_t>((static_cast<uint32_t>(value) + static_cast<uint32_t>(unit) - 1U) /
                              static_cast<uint32_t>(unit));
}
FP8KVD_HOST_DEVICE constexpr int32_t FloorDiv(int32_t value, int32_t unit) {
  return static_cast<int32_t>(static_cast<uint32_t>(value) / static_cast<uint32_t>(unit));
}

FP8KVD_HOST_DEVICE constexpr int32_t ColumnBlocks(const DecodeRow& row, int32_t group,
                                                  int32_t columns) {
  return CeilDiv(row.q_len * group, columns);
}

FP8KVD_HOST_DEVICE constexpr RowWork WorkOf(const DecodeRow& row, int32_t group, Grain grain) {
  const int32_t end = row.pos + row.q_len > 0 ? row.pos + row.q_len : 0;
  int32_t first = row.window == 0 || row.pos < row.window ? 0 : row.pos - row.window + 1;
  if (first > end) first = end;
  const int32_t first_unit = FloorDiv(first, grain.unit_tokens);
  const int32_t units = CeilDiv(end, grain.unit_tokens) - first_unit;
  return {first_unit, units < 1 ? 1 : units,
          row.kv_heads * ColumnBlocks(row, group, grain.columns)};
}

// batch_invariant: units of an item of the row. A quarter of the row, between 512 and 1024 tokens:
// a shorter item costs more in its piece, a longer one leaves warps without work. Where these would
// be many, twice as long, since a long pair waits for its join. More than kInvariantItemsMax items
// for each KV head would take more workspace.
inline constexpr int32_t kInvariantItemsMax = 128;

FP8KVD_HOST_DEVICE constexpr int32_t InvariantItemUnits(const DecodeRow& row, int32_t group,
                                                        Grain grain) {
  const int32_t units = WorkOf(row, group, grain).units;
  const int32_t blocks = ColumnBlocks(row, group, grain.columns);
  const int32_t quarter = CeilDiv(units, 4);
  const int32_t shortest = FloorDiv(512, grain.unit_tokens);
  const int32_t longest = FloorDiv(1024, grain.unit_tokens);
  const int32_t even = CeilDiv(units, CeilDiv(kInvariantItemsMax, blocks));
  const int32_t wanted = quarter < shortest ? shortest : quarter > longest ? longest : quarter;
  const int32_t fewer = 2 * CeilDiv(units, wanted) > kInvariantItemsMax ? 2 * wanted : wanted;
  const int32_t least = even > fewer ? even : fewer;
  return least > 1 ? least : 1;
}

// Items of each of a row's pairs.
FP8KVD_HOST_DEVICE constexpr int32_t InvariantItems(const DecodeRow& row, int32_t group,
                                                    Grain grain) {
  return CeilDiv(WorkOf(row, group, grain).units, InvariantItemUnits(row, group, grain));
}

// (column * this) >> 16 is column / group, exactly for columns below 1024 and groups up to 16.
static_assert(kQLenMax * kGroupMax <= 1024);
FP8KVD_HOST_DEVICE constexpr int32_t GroupInverse(int32_t group) { return CeilDiv(65536, group); }

// How a launch's items are cut: evenly over `workers`, the share raised by up to a twelfth and
// `slack` where that cuts fewer pairs: to whole pairs, or to a whole fraction of one (pair_items:
// items of each pair, 0 when they differ). The memory, not the multiprocessors, sets the pace of
// long work, so a few idle workers cost nothing.
FP8KVD_HOST_DEVICE constexpr int32_t ShareOf(int32_t items, int32_t workers, int32_t pair_items,
                                             int32_t slack) {
  const int32_t even = items > workers ? CeilDiv(items, workers) : 1;
  if (pair_items == 0) return even;
  const int32_t allowed = even + even / 12 + slack;
  if (pair_items > even && pair_items <= allowed) return pair_items;
  const int32_t share = even >= pair_items ? CeilDiv(even, pair_items) * pair_items
                                           : CeilDiv(pair_items, FloorDiv(pair_items, even));
  return share <= allowed ? share : even;
}

// Where pairs are not equally long, a launch is cut evenly by what they cost: their units, and so
// many more for each pair, since a warp that goes on to the next one has to wait for its query.
inline constexpr int32_t kPairCost = 4;
FP8KVD_HOST_DEVICE constexpr int32_t CostOfPair(int32_t units) { return units + kPairCost; }

// Of pairs that have as many units in the mean, a warp has parts of two at most, nearly always.
// What such a pair costs is its CTA's, which joins it, so only CTAs get equal costs: warps of a CTA
// get equal units.
inline constexpr int32_t kLongPairUnits = 32;

// The slack of a CTA's share: a pair cut between CTAs waits for the slowest of them and is read
// back, which takes as long as 64 more tokens of each warp.
FP8KVD_HOST_DEVICE constexpr int32_t CtaSlack(int32_t warps, Grain grain) {
  return warps * CeilDiv(64, grain.unit_tokens);
}

// How often the warps of a launch look whether they are ahead of the others (any/decode/pace.cuh).
struct PacePlan {
  int32_t every;   // units of a warp, a power of two
  int32_t checks;  // of the first warps of all CTAs together
  int32_t of_cta;  // of the first warp of one that has a whole share
  int32_t ctas;    // that have one; the next has the rest
  int32_t fewer;   // units under way of a warp that is ahead

  FP8KVD_HOST_DEVICE constexpr int32_t ChecksOf(int32_t cta) const {
    return cta < ctas ? of_cta : cta == ctas ? checks - ctas * of_cta : 0;
  }
};

// Up to so many checks a warp, of CTAs with at least so many units: more cost more than they win.
// A warp with a long way to go checks more often, and holds back more: the fast ones of 8192 tokens
// end 20 us before the slow ones else.
inline constexpr int32_t kChecksMax = 12;
inline constexpr int32_t kCheckedUnitsMax = 16;
inline constexpr int32_t kPacedUnitsMin = 192;
inline constexpr PacePlan kNoPace = {1 << 30, 1, 1, 1, 0};

// Units of the first warp of a CTA that has so many.
FP8KVD_HOST_DEVICE constexpr int32_t FirstShareOf(int32_t units, int32_t warps,
                                                  int32_t pair_units) {
  const int32_t share = ShareOf(units, warps, pair_units, 0);
  return share < units ? share : units;
}

// Of units that are cut into shares, and these over the warps. kNoPace where CTAs have little.
FP8KVD_HOST_DEVICE constexpr PacePlan PaceFor(int32_t units, int32_t share, int32_t warps,
                                              int32_t pair_units) {
  const int32_t ctas = FloorDiv(units, share);
  const int32_t rest = units - ctas * share;
  const int32_t first = FirstShareOf(share, warps, pair_units);
  if (share < kPacedUnitsMin || ctas == 0) return kNoPace;
  int32_t every = 1;
  while (every * kChecksMax < first && every < kCheckedUnitsMax) every *= 2;
  const int32_t of_cta = FloorDiv(first, every);
  const int32_t checks = ctas * of_cta + FloorDiv(FirstShareOf(rest, warps, pair_units), every);
  return {every, checks, of_cta, ctas, every * kChecksMax < first ? 2 : 1};
}

// Floats of one piece: for each column head_dim sums, the maximum, the sum of the weights, and two
// more so that neighbouring columns lie in other banks.
FP8KVD_HOST_DEVICE constexpr int64_t PieceFloats(int32_t columns, int32_t head_dim) {
  return static_cast<int64_t>(columns) * (head_dim + 4);
}

}  // namespace fp8kvd::kernels::cuda
