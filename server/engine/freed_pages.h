// server/engine/freed_pages.h: pages that became free since the launch being planned was begun.
//
// Why. All byte work runs in one order, so a page that is freed while launches still read it may be
// given out again at once: whatever writes it is queued behind them. The one exception is the
// launch that is being planned. Its appends run before its decode, so a page that one of its items
// gave back (a window moved on) and another one took would be overwritten before the first one's
// query reads it. So a launch does not take what was freed while it was planned: WasFreed says so,
// and the item waits for the next launch. Poisoning, where it is asked for, is queued after the
// launch for the same reason (to_poison). Threads: the engine's. Cost: O(1) a page, 8 bytes a page
// of each pool, no allocation once constructed.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/ids.h"
#include "server/engine/model_setup.h"

namespace fp8kvd::engine {

class FreedPages {
 public:
  struct Page {
    int32_t model = 0;
    int32_t group = 0;
    cache::PageId page_id = cache::kNoPage;
  };

  FreedPages(const std::vector<ModelSetup>& models, bool is_poisoning);

  void BeginLaunch() { ++launch_; }
  void Add(int32_t model, int32_t group, cache::PageId page_id);
  bool WasFreed(int32_t model, int32_t group, cache::PageId page_id) const {
    return freed_in_[model][group][static_cast<uint32_t>(page_id)] == launch_;
  }

  // Pages to poison; empty unless poisoning. Call ForgetPoisoned once their poison is queued.
  const std::vector<Page>& to_poison() const { return to_poison_; }
  void ForgetPoisoned() { to_poison_.clear(); }

 private:
  const bool is_poisoning_;
  uint64_t launch_ = 1;
  std::vector<std::vector<std::vector<uint64_t>>> freed_in_;  // [models][groups][pages]: a launch_
  std::vector<Page> to_poison_;
};

}  // namespace fp8kvd::engine
