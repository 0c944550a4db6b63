#include "kernels/cuda/launch_shape.h"

#include <algorithm>

#include "kernels/cuda/uneven_pairs.h"

namespace fp8kvd::kernels::cuda {
namespace {

// One CTA to a multiprocessor, of up to so many warps, each with a ring of so many bytes: what was
// fastest on an H200 (docs/performance.md). More warps would not fit with their rings, fewer do not
// keep up with the memory unless each has a whole pair to itself.
constexpr int32_t kWarps = 8;
constexpr int32_t kRingBytes = 26 * 1024;
constexpr int32_t kStagesMax = 6;
constexpr int32_t kStagesOfFewWarps = 4;
constexpr int32_t kShortUnits = 4;        // of a warp
constexpr int32_t kLateUnitsMin = 7;      // of a warp
constexpr int32_t kSharedReserve = 1024;  // that the system takes of each CTA

// A cluster of its own for each pair: of one, two and four CTAs up to so many tokens. Beyond, their
// warps take longer over another unit than twice as many CTAs to join.
constexpr int32_t kTokensOfCtasMax[] = {256, 512, 2047};
constexpr int32_t kTokensOfQuickCtaMax = 384;  // of one CTA (HasQuickUnits)
constexpr int32_t kTokensOfPairWarpMax = 256;  // above, an even cut of all units is faster ...
constexpr int32_t kElementsOfBf16WarpMax = 160 * 128;
constexpr int32_t kLongPairClusterMax = 2;  // ... unless these read as fast as the memory gives
constexpr int32_t kElementsOfCtaMax = 6144 * 128;  // ... (KeepsUp)
constexpr int32_t kTokensOfFp8CtaMax = 8192;
constexpr int32_t kTokensOfFp8CtaForDim = 80;
constexpr int32_t kTokensOfManyPairsMax = 512;
constexpr int32_t kTokensOfFewTilesMax = 64;
constexpr int32_t kTokensOfHandfulMin = 256;
constexpr int32_t kFewColumns = 4;
constexpr int32_t kTokensOfLongPairsMin = 4096;
constexpr int32_t kWarpsOfManyPairs = 4;
constexpr int32_t kPairCtasMax = 4;  // of a multiprocessor at once: its registers hold no more
constexpr int32_t kLongPairCtas = 2;
constexpr int32_t kStagesAlone = 16;
constexpr int32_t kPairLateUnitsMax = 32;  // of a warp
constexpr int32_t kPairNearUnits = 2;      // of a warp

// batch_invariant: tokens up to which a pair's CTA takes no longer than the items of a pair, of at
// most 1024 tokens, take the warps that they are handed to.
constexpr int32_t kTokensOfPairAloneMax = 4096;

int32_t StagesOf(const DecodeKernel& kernel) {
  return std::clamp(kRingBytes / kernel.unit_bytes, 2, kStagesMax);
}

// Whether a warp is soon done with another unit.
bool HasQuickUnits(const DecodeKernel& kernel) {
  return kernel.grain.columns == 8 && kernel.precision == Precision::kBf16 &&
         kernel.head_dim <= 128;
}

int32_t CtasOfPairs(const DecodeKernel& kernel, const DeviceLimits& device, const LaunchWork& work,
                    int32_t tokens) {
  int32_t cluster = 1;
  for (const int32_t most : kTokensOfCtasMax) {
    const bool is_one = cluster == 1 && HasQuickUnits(kernel);
    const int32_t enough = is_one ? kTokensOfQuickCtaMax : most;
    if (tokens <= enough || 2 * cluster * work.pairs > device.multiprocessors / 2) break;
    cluster *= 2;
  }
  return cluster;
}

// Equal pairs of which a CTA gets a handful go best with a warp each: nothing is left to join. Not
// where a unit takes more arithmetic for its bytes, which fewer warps cannot keep up with. Returns
// how many, or 0.
int32_t HandfulOfPairs(const DecodeKernel& kernel, const LaunchWork& work, int32_t ctas) {
  const bool is_light =
      kernel.grain.columns == 8 && (kernel.precision == Precision::kBf16 || kernel.head_dim == 128);
  const auto pairs = static_cast<int32_t>((work.pairs + ctas - 1) / ctas);
  return work.IsUniform() && is_light && pairs >= kWarps / 2 && pairs <= kWarps ? pairs : 0;
}

// Whether a handful of pairs goes faster with a CTA each all the same: these are there at once,
// or have little to do.
bool IsShortHandful(const DeviceLimits& device, const LaunchWork& work, int32_t tokens) {
  if (tokens > kTokensOfHandfulMin) {
    return work.pairs <= int64_t{kPairCtasMax} * device.multiprocessors;
  }
  return tokens <= kTokensOfFewTilesMax || tokens > kTokensOfHandfulMin / 2 ||
         work.columns <= kFewColumns;
}

// Many long pairs that take whole rounds of CTAs, or nearly: whichever multiprocessor ends one gets
// the next, and some read 15 % faster than others. In fp8_kv a pair wants more warps.
bool FillsRounds(const DecodeKernel& kernel, const DeviceLimits& device, const LaunchWork& work,
                 int32_t tokens) {
  if (kernel.precision == Precision::kFp8Kv || kernel.grain.columns > 8 || kernel.head_dim > 128 ||
      tokens < kTokensOfLongPairsMin) {
    return false;
  }
  const int64_t round = int64_t{kLongPairCtas} * device.multiprocessors;
  return 10 * work.pairs >= 9 * ((work.pairs + round - 1) / round) * round;
}

// Tokens of a warp up to which a pair gets a cluster whatever KeepsUp says.
int32_t TokensOfPairWarpMax(const DecodeKernel& kernel) {
  return kernel.precision == Precision::kFp8Kv || kernel.grain.columns > 8
             ? kTokensOfPairWarpMax
             : std::min(kTokensOfPairWarpMax, kElementsOfBf16WarpMax / kernel.head_dim);
}

// Whether the CTAs of a shape that gives each pair a cluster, few as they are, read as fast as the
// memory gives. What they win is the seam: where they leave half of the multiprocessors to the next
// launch's and none has much to do, or where they take nearly all. In fp8_kv arithmetic, of which a
// token of a small head takes as much, comes close behind, and the seam is more of the whole.
bool KeepsUp(const DecodeKernel& kernel, const DeviceLimits& device, const LaunchShape& shape,
             int32_t tokens) {
  if (kernel.grain.columns > 8 || shape.cluster > kLongPairClusterMax ||
      9 * shape.ctas < 4 * device.multiprocessors) {
    return false;
  }
  const bool leave_half = 2 * shape.ctas <= device.multiprocessors;
  const bool take_all = 10 * shape.ctas >= 9 * device.multiprocessors;
  const int32_t cta_tokens = CeilDiv(tokens, shape.cluster);
  const bool is_short = int64_t{cta_tokens} * kernel.head_dim <= kElementsOfCtaMax;
  if (kernel.precision == Precision::kBf16) return take_all || (leave_half && is_short);
  const bool take_most = 10 * shape.ctas >= 7 * device.multiprocessors && is_short;
  return cta_tokens <= std::min(kTokensOfFp8CtaMax, kTokensOfFp8CtaForDim * kernel.head_dim) &&
         (leave_half || (kernel.head_dim >= 128 && (take_all || take_most)));
}

// The stages of a shape that gives each pair a cluster, whose CTAs and warps are known. ctas_max:
// of a multiprocessor at once.
void FitPairs(const DecodeKernel& kernel, const DeviceLimits& device, const LaunchWork& work,
              int32_t ctas_max, LaunchShape& shape) {
  const int32_t units_each = kernel.grain.unit_tokens / kernel.pair_unit_tokens;
  const int32_t warp_units =
      CeilDiv(CeilDiv(work.items_max * units_each, shape.cluster), shape.warps);
  // No deeper a ring than a warp has units, and where pairs are many, than lets all CTAs be there
  // at once: what is left of the memory lets the next launch's CTAs begin beside these.
  const int32_t ctas_each = std::min(CeilDiv(shape.ctas, device.multiprocessors), ctas_max);
  const int32_t shared_max = SharedOfEach(device, ctas_each);
  // Where units are smaller than those of a cut, rings are not as many times as deep: the next
  // launch's CTAs beside these are worth more. But a second unit is under way.
  const int32_t depth = std::min(std::max(CeilDiv(warp_units, units_each), 2), StagesOf(kernel));
  shape.stages = std::min(warp_units, depth);
  const auto fits = [&](int32_t bytes) { return kernel.shared_bytes(0, shape) <= bytes; };
  while (!fits(shared_max) && shape.stages > 1) --shape.stages;
  while (!fits(device.shared_per_cta) && shape.warps > 1) --shape.warps;
  // Few CTAs do better with a multiprocessor each, which a ring beyond half of its memory sees to.
  const bool leave_half = 2 * shape.ctas <= device.multiprocessors;
  if (leave_half) {
    while (fits(device.shared_per_multiprocessor / 2) && shape.stages < kStagesAlone) {
      ++shape.stages;
    }
  }
  shape.lets_next_late = work.pairs <= device.multiprocessors && warp_units > shape.stages &&
                         warp_units <= kPairLateUnitsMax;
  // What few CTAs keep under way is less than the memory needs.
  shape.near_units = leave_half && shape.lets_next_late ? kPairNearUnits : 0;
}

// Fills in a shape that gives each pair a cluster; false when the even cut is better.
bool ShapeForPairs(const DecodeKernel& kernel, const DeviceLimits& device, const LaunchWork& work,
                   LaunchShape& shape) {
  const int32_t tokens = work.items_max * kernel.grain.unit_tokens;
  const bool many = work.pairs > device.multiprocessors;
  if (many && kernel.precision == Precision::kFp8Kv && !IsShortHandful(device, work, tokens) &&
      HandfulOfPairs(kernel, work, device.multiprocessors) > 0) {
    return false;
  }
  shape.cluster = many ? 1 : CtasOfPairs(kernel, device, work, tokens);
  shape.ctas = static_cast<int32_t>(work.pairs) * shape.cluster;
  shape.warps = many ? kWarpsOfManyPairs : kWarps;
  shape.row_pairs = work.row_pairs;
  shape.few_tiles = tokens <= kTokensOfFewTilesMax;
  const int32_t warp_tokens = tokens / (shape.cluster * shape.warps);
  const bool is_long = tokens > kTokensOfManyPairsMax;
  if (many ? is_long && !FillsRounds(kernel, device, work, tokens)
           : warp_tokens > TokensOfPairWarpMax(kernel) && !KeepsUp(kernel, device, shape, tokens)) {
    return false;
  }
  FitPairs(kernel, device, work, is_long ? kLongPairCtas : kPairCtasMax, shape);
  return true;
}

// The same as ShapeForPairs for pairs that are not equally long.
bool ShapeForUnevenPairs(const DecodeKernel& kernel, const DeviceLimits& device,
                         std::span<const DecodeRow> rows, int32_t group, const LaunchWork& work,
                         LaunchShape& shape) {
  const int32_t tokens = work.items_max * kernel.grain.unit_tokens;
  const int32_t cluster = CtasOfPairs(kernel, device, work, tokens);
  const PairWay way = WayOfUnevenPairs(kernel, device, rows, group, work, cluster);
  if (way.ctas == 0) return false;
  shape.cluster = way.ctas == 1 ? cluster : 1;
  shape.ctas = static_cast<int32_t>(work.pairs) * shape.cluster;
  shape.warps = way.warps;
  shape.row_pairs = work.row_pairs;
  shape.few_tiles = tokens <= kTokensOfFewTilesMax;
  FitPairs(kernel, device, work, way.ctas, shape);
  shape.lets_next_late = false;  // short pairs make room long before the others end
  shape.near_units = 0;
  return true;
}

}  // namespace

int32_t SharedOfEach(const DeviceLimits& device, int32_t ctas) {
  return std::min(device.shared_per_cta, device.shared_per_multiprocessor / ctas - kSharedReserve);
}

LaunchWork WorkOfRows(std::span<const DecodeRow> rows, int32_t group, Grain grain,
                      bool batch_invariant) {
  LaunchWork work{};
  for (const DecodeRow& row : rows) {
    const RowWork of_row = WorkOf(row, group, grain);
    const int64_t items = batch_invariant ? InvariantItems(row, group, grain) : of_row.units;
    const bool first = work.pairs == 0;
    work.units += int64_t{of_row.units} * of_row.pairs;
    work.items += items * of_row.pairs;
    work.pairs += of_row.pairs;
    work.items_max = std::max(work.items_max, static_cast<int32_t>(items));
    work.columns = std::max(work.columns, std::min(row.q_len * group, grain.columns));
    work.row_pairs = first || work.row_pairs == of_row.pairs ? of_row.pairs : 0;
  }
  if (batch_invariant) work.row_pairs = 0;
  return work;
}

bool MayGoWhole(const DecodeKernel& kernel, const LaunchWork& work) {
  return kernel.sm == 90 && work.row_pairs > 0;
}

LaunchShape ShapeFor(const DecodeKernel& kernel, const DeviceLimits& device,
                     std::span<const DecodeRow> rows, int32_t group, const LaunchWork& work) {
  LaunchShape shape{};
  if (MayGoWhole(kernel, work)) {
    const bool goes = work.IsUniform()
                          ? ShapeForPairs(kernel, device, work, shape)
                          : ShapeForUnevenPairs(kernel, device, rows, group, work, shape);
    if (goes) return shape;
  }
  shape = LaunchShape{};
  // Short work: no more CTAs than give each warp a unit or each pair a CTA of its own; and of items
  // that are many units each CTA gets one before any gets a second.
  const auto rows_count = static_cast<int32_t>(rows.size());
  const auto items = static_cast<int32_t>(work.items);
  const auto item_units = static_cast<int32_t>((work.units + work.items - 1) / work.items);
  const bool are_units = item_units == 1;
  const int64_t useful = are_units ? std::max(work.items / kWarps, work.pairs) : work.items;
  shape.ctas = static_cast<int32_t>(std::clamp<int64_t>(useful, 1, device.multiprocessors));
  const int32_t handful = HandfulOfPairs(kernel, work, shape.ctas);
  shape.warps = handful > 0 ? handful : are_units ? kWarps : CeilDiv(items, shape.ctas);
  const bool is_alone = device.one_warpgroup && kernel.worker_warps > 1;
  shape.warps = is_alone ? 1 : std::min({shape.warps, kWarps, kernel.workers_max});

  const int32_t pair_items = work.IsUniform() ? work.items_max : 0;
  const int32_t slack = are_units ? CtaSlack(shape.warps, kernel.grain) : 0;
  const int32_t of_cta = ShareOf(items, shape.ctas, pair_items, slack);
  const int32_t of_warp = item_units * ShareOf(of_cta, shape.warps, pair_items, 0);
  // A ring that holds half of a multiprocessor's memory or less lets the next launch's CTA start
  // beside this one's, which is worth more than its depth where there is little to read.
  const bool is_short = of_warp <= kShortUnits;
  const int32_t shared_max = is_short ? SharedOfEach(device, 2) : device.shared_per_cta;
  const auto fits = [&](int32_t bytes) { return kernel.shared_bytes(rows_count, shape) <= bytes; };
  shape.stages =
      shape.warps > kWarps / 2 ? StagesOf(kernel) : std::max(StagesOf(kernel), kStagesOfFewWarps);
  shape.stages = std::min(shape.stages, of_warp);
  while (!fits(shared_max) && shape.stages > 2) --shape.stages;
  while (!fits(device.shared_per_cta) && shape.stages > 1) --shape.stages;
  while (!fits(device.shared_per_cta) && shape.warps > 1) --shape.warps;
  shape.lets_next_late = of_warp > kLateUnitsMin;
  return shape;
}

int32_t PairsAlone(const DecodeKernel& kernel, const DecodeRow& row, int32_t group) {
  const RowWork work = WorkOf(row, group, kernel.grain);
  const int64_t tokens = int64_t{work.units} * kernel.grain.unit_tokens;
  return kernel.sm == 90 && tokens <= kTokensOfPairAloneMax ? work.pairs : 0;
}

LaunchShape ShapeOfPairsAlone(const DecodeKernel& kernel, const DeviceLimits& device,
                              const LaunchWork& work) {
  LaunchShape shape{};
  shape.cluster = 1;
  shape.ctas = static_cast<int32_t>(work.pairs);
  shape.warps = kWarpsOfManyPairs;
  shape.row_pairs = work.row_pairs;
  FitPairs(kernel, device, work, kLongPairCtas, shape);
  return shape;
}

int64_t ShapePiecesMax(const DeviceLimits& device) {
  return PiecesNeeded({device.multiprocessors, kWarps, 1, false, 0, 0, 0, false});
}

int32_t ShapeCtasMax(const DeviceLimits& device) { return device.multiprocessors; }

}  // namespace fp8kvd::kernels::cuda
