// tests/support/simulated_pages.h: pages whose bytes are one number per (token, layer), so that a
// wrong copy, a write to a shared page or a page handed out twice shows as a wrong number. Plays
// the engine's part: does what plans order, poisons what becomes free.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/append_plan.h"
#include "cache/seq_store.h"
#include "cache/store_options.h"

namespace fp8kvd::cache {

class SimulatedPages {
 public:
  static constexpr uint64_t kPoison = UINT64_MAX;

  explicit SimulatedPages(const StoreOptions& options);

  // What token pos of a layer holds when the append that brought it had this digest.
  static uint64_t Value(uint64_t digest, int32_t layer, int64_t pos);

  void Poison(int32_t model, int32_t group, PageId page_id);
  // Copies and writes as an open plan orders. False if the plan would write a page that another
  // sequence owns too, or that the plan does not name.
  [[nodiscard]] bool Do(const SeqStore& store, const AppendPlan& plan, const AppendArgs& args);
  // What the pages of an image hold, under the ids of the store that is made of it.
  void Renumber(const std::vector<std::vector<std::vector<PageId>>>& pages);
  // What a query at that token would read.
  uint64_t Read(const SeqStore& store, SeqIndex seq, int32_t layer, int64_t pos) const;

 private:
  struct Pool {
    std::vector<int32_t> layers;   // model layers of the group
    std::vector<uint64_t> values;  // [page][group_layer][offset]
  };
  uint64_t* Block(int32_t model, int32_t group, PageId page_id);

  int32_t page_tokens_;
  std::vector<std::vector<Pool>> pools_;  // [model][group]
};

}  // namespace fp8kvd::cache
