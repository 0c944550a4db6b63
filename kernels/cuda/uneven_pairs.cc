#include "kernels/cuda/uneven_pairs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

namespace fp8kvd::kernels::cuda {
namespace {

// Times are in the bytes that the device reads meanwhile: 4.6 MB are a microsecond.
constexpr double kCutBytes = 28e6;      // that a cut takes beyond its units ...
constexpr double kCutPairBytes = 12e3;  // ... and beyond that for each pair
constexpr double kStartBytes = 7e6;     // the same of pairs that are not cut

// What is left of a place's time when others still read, in part.
constexpr double kIdleShare = 0.25;

// 32 query columns are more arithmetic for the same bytes: a cut takes so many times its units.
constexpr int32_t kManyColumns = 32;
constexpr double kCutOfManyColumns = 1.2;

// How pairs may go. A place, which takes a pair at a time, reads the pair's bytes and so many more
// to begin and end it, more than that with many columns. With so many places at work, for each
// multiprocessor, the memory is the limit.
struct Kind {
  PairWay way;
  double turn_bytes;
  double turn_of_many_columns;
  double busy_places;
};
constexpr Kind kKinds[] = {
    {{1, 8}, 260e3, 312e3, 0.5},
    {{2, 4}, 200e3, 340e3, 0.6},
    {{4, 4}, 135e3, 0.0, 7.0 / 6.0},  // its registers do not fit with many columns
};
constexpr double kClusterTurnBytes = 130e3;  // for each CTA of a cluster

constexpr int32_t kPlacesMax = 1024;
constexpr int32_t kRowsMax = 128;        // beyond, no row is long enough to matter much
constexpr int32_t kOrderedPairsMax = 8;  // of a multiprocessor

// Units until the last pair is done, on places that take one after the other. A row's pairs are
// alike, so as many places as it has pairs go together.
double UnitsUntilDone(std::span<const DecodeRow> rows, int32_t group, Grain grain, int32_t places,
                      int32_t row_pairs, double turn_units) {
  const auto groups = static_cast<size_t>(std::clamp(places / row_pairs, 1, kPlacesMax));
  const auto rounds = static_cast<double>(CeilDiv(row_pairs, places));
  const auto of_row = [&](const DecodeRow& row) {
    return rounds * (WorkOf(row, group, grain).units + turn_units);
  };
  double sum = 0.0;
  double max = 0.0;
  if (rows.size() <= groups || rows.size() > kRowsMax) {
    for (const DecodeRow& row : rows) {
      sum += of_row(row);
      max = std::max(max, of_row(row));
    }
    return rows.size() <= groups ? max : sum / static_cast<double>(groups) + max / 2.0;
  }
  std::array<double, kPlacesMax> ends;  // a heap; at its front the group that is free first
  const auto first = ends.begin();
  const auto end = std::transform(rows.begin(), rows.begin() + groups, first, of_row);
  max = *std::max_element(first, end);
  std::make_heap(first, end, std::greater<>());
  for (const DecodeRow& row : rows.subspan(groups)) {
    std::pop_heap(first, end, std::greater<>());
    *(end - 1) += of_row(row);
    max = std::max(max, *(end - 1));
    std::push_heap(first, end, std::greater<>());
  }
  return max;
}

// In fp8_kv more columns are more arithmetic than memory, which a cut shares out best where pairs
// do not begin all at once.
bool IsLight(const DecodeKernel& kernel) {
  return kernel.grain.columns == 8 || kernel.precision == Precision::kBf16;
}

}  // namespace

PairWay WayOfUnevenPairs(const DecodeKernel& kernel, const DeviceLimits& device,
                         std::span<const DecodeRow> rows, int32_t group, const LaunchWork& work,
                         int32_t cluster) {
  PairWay best{};
  const double unit_bytes = kernel.unit_bytes;
  const auto pairs = static_cast<double>(work.pairs);
  const double bytes = static_cast<double>(work.units) * unit_bytes;
  const bool are_many = kernel.grain.columns >= kManyColumns;
  double soonest = (are_many ? kCutOfManyColumns : 1.0) * bytes + kCutBytes + pairs * kCutPairBytes;
  const bool begin_at_once = work.pairs * cluster <= device.multiprocessors;
  for (const Kind& kind : kKinds) {
    if (!IsLight(kernel) && (kind.way.ctas > 1 || !begin_at_once)) continue;
    if (kind.way.ctas * kind.way.warps > kernel.warps_max * kernel.pair_ctas) continue;
    const int32_t ctas = kind.way.ctas == 1 ? cluster : 1;
    const double turn_bytes = ctas > 1   ? ctas * kClusterTurnBytes
                              : are_many ? kind.turn_of_many_columns
                                         : kind.turn_bytes;
    const int32_t places = kind.way.ctas * device.multiprocessors / ctas;
    const double until_done = unit_bytes * UnitsUntilDone(rows, group, kernel.grain, places,
                                                          work.row_pairs, turn_bytes / unit_bytes);
    const double idle = std::max(until_done * places - bytes - pairs * turn_bytes, 0.0);
    const double by_memory = bytes + kStartBytes + kIdleShare * idle;
    const double by_places = until_done * kind.busy_places * device.multiprocessors / ctas;
    // The larger, and somewhat more where they are about the same.
    const double both = std::pow(std::pow(by_memory, 5) + std::pow(by_places, 5), 0.2);
    if (both < soonest) {
      soonest = both;
      best = kind.way;
    }
  }
  return best;
}

bool WantsLongestFirst(const DecodeKernel& kernel, const DeviceLimits& device,
                       const LaunchWork& work) {
  return MayGoWhole(kernel, work) && IsLight(kernel) && !work.IsUniform() &&
         work.pairs > device.multiprocessors &&
         work.pairs <= int64_t{kOrderedPairsMax} * device.multiprocessors;
}

}  // namespace fp8kvd::kernels::cuda
