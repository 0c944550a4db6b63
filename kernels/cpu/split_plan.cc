#include "kernels/cpu/split_plan.h"

#include <algorithm>

#include "config/base/check.h"

namespace fp8kvd::kernels::cpu {
namespace {

// Cost is counted in (page, query head) products of head_dim 128, about 0.2 us each. Below this
// much per thread, waking another costs more than it brings.
constexpr int64_t kCostPerThreadMin = 64;

int32_t CeilDiv(int32_t a, int32_t b) { return (a + b - 1) / b; }

RowSplits SplitsOf(const DecodeRow& row, int32_t group) {
  RowSplits splits;
  const int32_t end = std::max(0, row.pos + row.q_len);
  const int32_t first = row.window == 0 ? 0 : std::max(0, row.pos - row.window + 1);
  splits.end_page = CeilDiv(end, kPageTokens);
  splits.first_page = std::min(first / kPageTokens, splits.end_page);
  const int32_t pages = std::max(1, splits.end_page - splits.first_page);
  const int32_t columns = row.q_len * group;
  splits.split_pages = std::max(kSplitPagesMin, CeilDiv(pages, kSplitsMax));
  splits.splits = CeilDiv(pages, splits.split_pages);
  splits.split_cost = int64_t{splits.split_pages} * columns;
  splits.unit_cost = int64_t{pages} * columns;
  return splits;
}

}  // namespace

void SplitPlan::Make(const DecodeParams& params, int32_t threads) {
  FP8KVD_CHECK(threads >= 1 && params.rows_count <= rows_max());
  rows_.clear();
  cost_ = 0;
  for (int32_t i = 0; i < params.rows_count; ++i) {
    RowSplits splits = SplitsOf(params.rows[i], params.group);
    splits.cost_begin = cost_;
    cost_ += splits.unit_cost * params.rows[i].kv_heads;
    rows_.push_back(splits);
  }
  const int64_t worth = cost_ * params.head_dim / 128 / kCostPerThreadMin;
  threads_ = static_cast<int32_t>(std::clamp<int64_t>(worth, 1, threads));
}

int32_t SplitPlan::OwnerOf(int64_t cost) const {
  int32_t owner = static_cast<int32_t>(cost * threads_ / std::max<int64_t>(cost_, 1));
  while (owner + 1 < threads_ && ShareBegin(owner + 1) <= cost) ++owner;
  while (owner > 0 && ShareBegin(owner) > cost) --owner;
  return owner;
}

// The last row that begins at or before cost.
int32_t SplitPlan::RowAt(int64_t cost) const {
  const auto after = std::upper_bound(
      rows_.begin(), rows_.end(), cost,
      [](int64_t wanted, const RowSplits& row) { return wanted < row.cost_begin; });
  return std::max(0, static_cast<int32_t>(after - rows_.begin()) - 1);
}

UnitPart SplitPlan::PartOf(int32_t row, int32_t kv_head, int64_t begin, int64_t end) const {
  const RowSplits& splits = rows_[row];
  const int64_t unit_begin = splits.cost_begin + kv_head * splits.unit_cost;
  // A split belongs to the share in which it begins.
  const auto first_split_from = [&](int64_t cost) {
    const int64_t after = std::max<int64_t>(0, cost - unit_begin);
    const int64_t index = (after + splits.split_cost - 1) / splits.split_cost;
    return static_cast<int32_t>(std::min<int64_t>(index, splits.splits));
  };
  UnitPart part{};
  part.row = row;
  part.kv_head = kv_head;
  part.begin = first_split_from(begin);
  part.end = first_split_from(end);
  part.owner = OwnerOf(unit_begin);
  part.whole = part.begin == 0 && part.end == splits.splits;
  return part;
}

}  // namespace fp8kvd::kernels::cpu
