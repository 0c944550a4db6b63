#include "server/engine/freed_pages.h"

namespace fp8kvd::engine {

FreedPages::FreedPages(const std::vector<ModelSetup>& models, bool is_poisoning)
    : is_poisoning_(is_poisoning) {
  int64_t pages_total = 0;
  for (const ModelSetup& model : models) {
    std::vector<std::vector<uint64_t>>& groups = freed_in_.emplace_back();
    for (const int64_t pages : model.group_pages) {
      groups.emplace_back(pages, 0);
      pages_total += pages;
    }
  }
  // A page may be freed, taken and freed again before its poison is queued, but not within one
  // launch.
  if (is_poisoning) to_poison_.reserve(pages_total);
}

void FreedPages::Add(int32_t model, int32_t group, cache::PageId page_id) {
  freed_in_[model][group][static_cast<uint32_t>(page_id)] = launch_;
  if (is_poisoning_) {
    to_poison_.push_back(Page{.model = model, .group = group, .page_id = page_id});
  }
}

}  // namespace fp8kvd::engine
