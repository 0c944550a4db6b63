// kernels/cuda/any/decode/work.cuh: which units belong to which warp. There is no planning pass:
// every CTA sums the rows' work in its prologue, where it overlaps the launch before, and cuts it
// evenly: batch_invariant by items, else by units, or by what they cost (decode_work.h).
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/registers.cuh"
#include "kernels/cuda/decode_args.h"

namespace fp8kvd::kernels::cuda {

template <class T>
__device__ __forceinline__ RowWork WorkOf(const DecodeRow& row, int32_t group) {
  return WorkOf(row, group, T::kGrain);
}

// Units stand in one order: rows, in a row its pairs, in a pair its tokens.
struct WorkMap {
  const int32_t* units;       // [rows_count + 1] in shared memory: units of the rows before
  const int32_t* parts;       // the same in costs, with batch_invariant in items
  const int32_t* pair_items;  // [rows_count]: items of each pair of a row, or units
  int32_t rows_count;
  int32_t uniform;  // items of every pair, or units, when all have the same number; else 0
};

__device__ __forceinline__ int32_t RowOf(const int32_t* before, int32_t rows_count, int32_t at) {
  int32_t low = 0;
  int32_t high = rows_count;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (before[middle] <= at ? low : high) = middle;
  }
  return low;
}

// RowOf for a place that all lanes of the warp ask for: each looks at a row, so that 32 take one
// step and 1024 two.
__device__ __forceinline__ int32_t RowOfAll(const int32_t* before, int32_t rows_count, int32_t at) {
  const int32_t lane = threadIdx.x % kWarpLanes;
  int32_t step = 1;
  while (step * kWarpLanes < rows_count) step *= kWarpLanes;
  int32_t low = 0;
  for (; step > 0; step /= kWarpLanes) {
    const int32_t row = low + lane * step;
    const bool is_before = row < rows_count && before[row] <= at;
    low += (__popc(__ballot_sync(kAllLanes, is_before)) - 1) * step;
  }
  return low;
}

// Exclusive prefix sums of two values over the threads of a CTA. The sums of all go to total.
// warp_sums: shared memory for one of each warp.
__device__ __forceinline__ int2 PrefixOfThreads(int2 mine, int2* warp_sums, int2& total) {
  const int32_t lane = threadIdx.x % kWarpLanes;
  const int32_t warp = threadIdx.x / kWarpLanes;
  int2 sum = mine;
#pragma unroll
  for (int32_t step = 1; step < kWarpLanes; step *= 2) {
    const int32_t x = __shfl_up_sync(kAllLanes, sum.x, step);
    const int32_t y = __shfl_up_sync(kAllLanes, sum.y, step);
    if (lane >= step) sum = {sum.x + x, sum.y + y};
  }
  if (lane == kWarpLanes - 1) warp_sums[warp] = sum;
  __syncthreads();
  int2 before{0, 0};
  total = {0, 0};
  for (int32_t w = 0; w < blockDim.x / kWarpLanes; ++w) {
    const int2 x = warp_sums[w];
    if (w < warp) before = {before.x + x.x, before.y + x.y};
    total = {total.x + x.x, total.y + x.y};
  }
  return {before.x + sum.x - mine.x, before.y + sum.y - mine.y};
}

// Brings a row near: SourceOf and LoadQuery are the next to read it.
__device__ __forceinline__ void PrefetchRow(const DecodeRow* row) {
  const char* bytes = reinterpret_cast<const char*>(row);
  asm volatile("prefetch.global.L1 [%0];" ::"l"(bytes));
  asm volatile("prefetch.global.L1 [%0];" ::"l"(bytes + 32));
  asm volatile("prefetch.global.L1 [%0];" ::"l"(bytes + 64));
}

// Ints of shared memory that MapWork takes.
__host__ __device__ constexpr int32_t MapInts(int32_t rows_count, int32_t warps) {
  return 2 * warps + 2 + 3 * (rows_count + 1);
}

// Makes the map from the rows. All threads of the CTA call it; it ends with a barrier.
__device__ __forceinline__ WorkMap MapWork(const DecodeArgs& args, Grain grain, int32_t* shared) {
  const int32_t rows = args.rows_count;
  const int32_t warps = blockDim.x / kWarpLanes;
  int32_t* of_cta = shared + 2 * warps;
  int32_t* units = of_cta + 2;
  int32_t* parts = units + rows + 1;
  int32_t* of_pair = units + 2 * (rows + 1);
  const int32_t share = CeilDiv(rows, blockDim.x);
  const int32_t first = min(static_cast<int32_t>(threadIdx.x) * share, rows);
  const int32_t end = min(first + share, rows);
  int2 mine{0, 0};
  int32_t items_min = INT32_MAX;  // of a pair
  int32_t items_max = 0;
  for (int32_t r = first; r < end; ++r) {
    const DecodeRow& row = args.rows[r];
    PrefetchRow(&row);
    if (args.tokens != nullptr) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(args.tokens + r));
    }
    const RowWork work = WorkOf(row, args.group, grain);
    int32_t pair_items = work.units;
    if (args.batch_invariant) pair_items = InvariantItems(row, args.group, grain);
    of_pair[r] = pair_items;
    const int32_t pair_parts = args.batch_invariant ? pair_items : CostOfPair(work.units);
    const int2 of_row = {work.units * work.pairs, pair_parts * work.pairs};
    units[r] = of_row.x;
    parts[r] = of_row.y;
    mine = {mine.x + of_row.x, mine.y + of_row.y};
    items_min = min(items_min, pair_items);
    items_max = max(items_max, pair_items);
  }
  if (threadIdx.x == 0) *of_cta = items_max;
  int2 total;
  int2 before = PrefixOfThreads(mine, reinterpret_cast<int2*>(shared), total);
  for (int32_t r = first; r < end; ++r) {
    const int2 of_row = {units[r], parts[r]};
    units[r] = before.x;
    parts[r] = before.y;
    before = {before.x + of_row.x, before.y + of_row.y};
  }
  if (threadIdx.x == 0) {
    units[rows] = total.x;
    parts[rows] = total.y;
  }
  const bool same = first >= end || (items_min == items_max && items_max == *of_cta);
  const bool uniform = __syncthreads_and(same) != 0;
  return {units, parts, of_pair, rows, uniform ? *of_cta : 0};
}

// [first, end).
struct Range {
  int32_t first;
  int32_t end;
};

__device__ __forceinline__ Range ShareAt(Range all, int32_t share, int32_t index) {
  const int64_t first = all.first + static_cast<int64_t>(share) * index;
  return {static_cast<int32_t>(min(first, static_cast<int64_t>(all.end))),
          static_cast<int32_t>(min(first + share, static_cast<int64_t>(all.end)))};
}

// A pair and its items, counted in the launch. batch_invariant alone.
struct ItemsOfPair {
  int32_t row;
  int32_t pair;  // of the row's
  Range items;
};

__device__ __forceinline__ ItemsOfPair ItemsAround(const WorkMap& map, int32_t item) {
  const int32_t row = RowOf(map.parts, map.rows_count, item);
  const int32_t count = map.pair_items[row];
  const int32_t pair = FloorDiv(item - map.parts[row], count);
  const int32_t first = map.parts[row] + pair * count;
  return {row, pair, {first, first + count}};
}

// The first unit of an item, or the end of all.
template <class T>
__device__ __forceinline__ int32_t UnitOfItem(const DecodeArgs& args, const WorkMap& map,
                                              int32_t item) {
  if (item >= map.parts[map.rows_count]) return map.units[map.rows_count];
  const ItemsOfPair of = ItemsAround(map, item);
  const DecodeRow& row = args.rows[of.row];
  const int32_t units = WorkOf<T>(row, args.group).units;
  return map.units[of.row] + of.pair * units +
         (item - of.items.first) * InvariantItemUnits(row, args.group, T::kGrain);
}

// The first unit at or after a place among costs, or their end. What a pair costs beyond its units
// stands before them.
__device__ __forceinline__ int32_t UnitOfCost(const WorkMap& map, int32_t cost) {
  const int32_t row = RowOf(map.parts, map.rows_count, cost);
  const int32_t units = map.pair_items[row];
  const int32_t in_row = cost - map.parts[row];
  const int32_t pair = FloorDiv(in_row, CostOfPair(units));
  const int32_t in_pair = max(in_row - pair * CostOfPair(units) - kPairCost, 0);
  return map.units[row] + pair * units + in_pair;
}

// What the CTAs of a launch share evenly.
enum class CutBy : uint8_t { kUnits, kCosts, kItems };

__device__ __forceinline__ CutBy CutOf(const DecodeArgs& args, const WorkMap& map) {
  return args.batch_invariant ? CutBy::kItems : map.uniform > 0 ? CutBy::kUnits : CutBy::kCosts;
}

// Of a launch that is cut by costs: whether pairs have kLongPairUnits or more in the mean.
__device__ __forceinline__ bool PairsAreLong(const WorkMap& map) {
  const int32_t units = map.units[map.rows_count];
  const int32_t pairs = FloorDiv(map.parts[map.rows_count] - units, kPairCost);
  return units >= int64_t{pairs} * kLongPairUnits;
}

// How many there are.
__device__ __forceinline__ int32_t PartsOf(const WorkMap& map, CutBy by) {
  return by == CutBy::kUnits ? map.units[map.rows_count] : map.parts[map.rows_count];
}

// at(place) for both ends of a range, found by lanes side by side. All of the warp call it.
template <class At>
__device__ __forceinline__ Range BothEnds(Range places, const At& at) {
  const int32_t mine = at(threadIdx.x % 2 == 0 ? places.first : places.end);
  return {__shfl_sync(kAllLanes, mine, 0), __shfl_sync(kAllLanes, mine, 1)};
}

// The units of one of a CTA's workers. cta_parts: the CTA's share.
template <class T>
__device__ __forceinline__ Range UnitsOfWorker(const DecodeArgs& args, const WorkMap& map, CutBy by,
                                               Range cta_parts, int32_t workers, int32_t worker) {
  const bool by_units = by == CutBy::kCosts && PairsAreLong(map);
  const int32_t each = ShareOf(cta_parts.end - cta_parts.first, workers, map.uniform, 0);
  Range units = by_units ? cta_parts : ShareAt(cta_parts, each, worker);
  if (by == CutBy::kCosts) {
    units = BothEnds(units, [&](int32_t cost) { return UnitOfCost(map, cost); });
  } else if (by == CutBy::kItems) {
    units = BothEnds(units, [&](int32_t item) { return UnitOfItem<T>(args, map, item); });
  }
  return by_units ? ShareAt(units, CeilDiv(units.end - units.first, workers), worker) : units;
}

// Where a unit comes from; bytes 0 when nothing of it is needed.
struct UnitSource {
  const uint8_t* from;
  int32_t bytes;
  bool below_query;  // all of its keys are before the row's pos
};

// Unit `at` of a KV head of a row, counted from the sequence's start.
template <class T>
__device__ __forceinline__ UnitSource SourceInPair(const DecodeRow& row, int64_t kv_head,
                                                   int32_t at) {
  const int32_t tokens = row.pos + row.q_len - at * T::kUnitTokens;
  if (tokens <= 0) return {nullptr, 0, false};
  const int64_t page = row.block_table[FloorDiv(at, T::kUnitsPerPage)];
  const uint8_t* from = row.base + page * row.page_stride +
                        kv_head * BlockBytesOf(T::kPrecision, T::kHeadDim) +
                        static_cast<int64_t>(at % T::kUnitsPerPage) * T::kUnitBytes;
  const int32_t tiles = min(CeilDiv(tokens, kTileTokens), T::kUnitTiles);
  return {from, tiles * T::kTileBytes, (at + 1) * T::kUnitTokens <= row.pos};
}

// row: a row at or before the unit's, moved on to it.
template <class T>
__device__ __forceinline__ UnitSource SourceOf(const DecodeArgs& args, const WorkMap& map,
                                               int32_t unit, int32_t& row) {
  while (unit >= map.units[row + 1]) ++row;
  const DecodeRow& r = args.rows[row];
  const RowWork work = WorkOf<T>(r, args.group);
  const int32_t in_row = unit - map.units[row];
  const int32_t pair = FloorDiv(in_row, work.units);
  const int32_t at = work.first_unit + in_row - pair * work.units;
  const int32_t blocks = ColumnBlocks(r, args.group, T::kColumns);
  return SourceInPair<T>(r, blocks == 1 ? pair : FloorDiv(pair, blocks), at);
}

// The units of a launch in their order, asked for in ascending order.
template <class T>
struct CutSource {
  const DecodeArgs& args;
  const WorkMap& map;
  int32_t row;  // of the unit asked for last, or one before

  __device__ __forceinline__ UnitSource At(int32_t unit) {
    return SourceOf<T>(args, map, unit, row);
  }
};

struct Pair {
  int32_t row;
  int32_t kv_head;
  int32_t column_first;  // q_len * group columns are cut into blocks of kColumns
  int32_t columns;       // of this block
  Range units;           // in the launch's order
  int32_t first_unit;    // from the sequence's start
};

// Where a pair's first unit stands among costs.
__device__ __forceinline__ int32_t FirstCost(const WorkMap& map, const Pair& pair) {
  const int32_t units = map.pair_items[pair.row];
  const int32_t index = FloorDiv(pair.units.first - map.units[pair.row], units);
  return map.parts[pair.row] + index * CostOfPair(units) + kPairCost;
}

// Pair `index` of a row, its units counted from its first.
__device__ __forceinline__ Pair PairInRow(const DecodeArgs& args, Grain grain, const DecodeRow& row,
                                          int32_t index) {
  const RowWork work = WorkOf(row, args.group, grain);
  const int32_t blocks = ColumnBlocks(row, args.group, grain.columns);
  Pair result;
  result.row = 0;
  result.kv_head = FloorDiv(index, blocks);
  result.column_first = (index - result.kv_head * blocks) * grain.columns;
  result.columns = min(row.q_len * args.group - result.column_first, grain.columns);
  result.units = {0, work.units};
  result.first_unit = work.first_unit;
  return result;
}

// The pair of a unit. r: args.rows[row] or a copy of it.
__device__ __forceinline__ Pair PairAt(const DecodeArgs& args, Grain grain, const WorkMap& map,
                                       const DecodeRow& r, int32_t row, int32_t unit) {
  const int32_t units = WorkOf(r, args.group, grain).units;
  const int32_t index = FloorDiv(unit - map.units[row], units);
  Pair result = PairInRow(args, grain, r, index);
  result.row = row;
  result.units.first = map.units[row] + index * units;
  result.units.end = result.units.first + units;
  return result;
}

// A row, copied by the lanes of a warp together.
__device__ __forceinline__ void CopyRow(const DecodeRow& from, DecodeRow& to, int32_t lane) {
  constexpr int32_t kWords = sizeof(DecodeRow) / 4;
  static_assert(kWords <= kWarpLanes);
  if (lane < kWords) {
    reinterpret_cast<uint32_t*>(&to)[lane] = reinterpret_cast<const uint32_t*>(&from)[lane];
  }
}

}  // namespace fp8kvd::kernels::cuda
