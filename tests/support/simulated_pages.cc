#include "tests/support/simulated_pages.h"

#include <algorithm>
#include <utility>

namespace fp8kvd::cache {

SimulatedPages::SimulatedPages(const StoreOptions& options) : page_tokens_(options.page_tokens) {
  for (const ModelOptions& model : options.models) {
    std::vector<Pool>& pools = pools_.emplace_back();
    for (const GroupOptions& group : model.groups) {
      const size_t values = static_cast<size_t>(group.pages_total) * group.layers.size() *
                            static_cast<size_t>(page_tokens_);
      pools.push_back({.layers = group.layers, .values = std::vector<uint64_t>(values, kPoison)});
    }
  }
}

uint64_t SimulatedPages::Value(uint64_t digest, int32_t layer, int64_t pos) {
  return (digest << 32) ^ (static_cast<uint64_t>(layer) << 24) ^ static_cast<uint64_t>(pos);
}

uint64_t* SimulatedPages::Block(int32_t model, int32_t group, PageId page_id) {
  Pool& pool = pools_[static_cast<size_t>(model)][static_cast<size_t>(group)];
  const size_t page_values = pool.layers.size() * static_cast<size_t>(page_tokens_);
  return pool.values.data() + static_cast<size_t>(page_id) * page_values;
}

void SimulatedPages::Poison(int32_t model, int32_t group, PageId page_id) {
  const Pool& pool = pools_[static_cast<size_t>(model)][static_cast<size_t>(group)];
  std::fill_n(Block(model, group, page_id), pool.layers.size() * static_cast<size_t>(page_tokens_),
              kPoison);
}

bool SimulatedPages::Do(const SeqStore& store, const AppendPlan& plan, const AppendArgs& args) {
  const Pool& pool = pools_[static_cast<size_t>(plan.model)][static_cast<size_t>(plan.group)];
  for (const PlannedCopy& copy : plan.copies) {
    std::copy_n(Block(plan.model, plan.group, copy.from),
                pool.layers.size() * static_cast<size_t>(page_tokens_),
                Block(plan.model, plan.group, copy.to));
  }
  for (int64_t pos = plan.pos; pos < plan.pos + plan.n; ++pos) {
    PageId page_id = store.Table(plan.seq, plan.group).page(pos / page_tokens_);
    for (const PlannedEdit& edit : plan.edits) {
      if (edit.page_no == pos / page_tokens_) page_id = edit.page_id;
    }
    if (page_id == kNoPage || store.PagesOf(plan.model, plan.group).owners(page_id) != 1) {
      return false;
    }
    Block(plan.model, plan.group, page_id)[plan.group_layer * page_tokens_ + pos % page_tokens_] =
        Value(args.digest, args.layer, pos);
  }
  return true;
}

void SimulatedPages::Renumber(const std::vector<std::vector<std::vector<PageId>>>& pages) {
  for (size_t m = 0; m < pools_.size(); ++m) {
    for (size_t g = 0; g < pools_[m].size(); ++g) {
      Pool& pool = pools_[m][g];
      const size_t page_values = pool.layers.size() * static_cast<size_t>(page_tokens_);
      std::vector<uint64_t> values(pool.values.size(), kPoison);
      for (size_t number = 0; number < pages[m][g].size(); ++number) {
        std::copy_n(Block(static_cast<int32_t>(m), static_cast<int32_t>(g), pages[m][g][number]),
                    page_values, values.begin() + static_cast<ptrdiff_t>(number * page_values));
      }
      pool.values = std::move(values);
    }
  }
}

uint64_t SimulatedPages::Read(const SeqStore& store, SeqIndex seq, int32_t layer,
                              int64_t pos) const {
  const auto& pools = pools_[static_cast<size_t>(store.Model(seq))];
  for (size_t g = 0; g < pools.size(); ++g) {
    const auto& layers = pools[g].layers;
    const auto at = std::find(layers.begin(), layers.end(), layer);
    if (at == layers.end()) continue;
    const Slot slot = store.Table(seq, static_cast<int32_t>(g)).SlotOf(pos);
    if (slot.page_id == kNoPage) return kPoison;
    const size_t block = static_cast<size_t>(slot.page_id) * layers.size() +
                         static_cast<size_t>(at - layers.begin());
    return pools[g]
        .values[block * static_cast<size_t>(page_tokens_) + static_cast<size_t>(slot.offset)];
  }
  return kPoison;
}

}  // namespace fp8kvd::cache
