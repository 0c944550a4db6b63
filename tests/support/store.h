// tests/support/store.h: a SeqStore in words that tests read as sentences. Every call that changes
// the store is followed by an audit, and every append really writes its tokens (simulated_pages.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "cache/audit.h"
#include "cache/seq_store.h"
#include "tests/support/simulated_pages.h"

namespace fp8kvd::cache {

// One model with one layer group of one layer, unless more is said: PageTokens(4).Pages(8).
class StoreShape {
 public:
  explicit StoreShape(int32_t page_tokens) {
    options_.models = {{.groups = {{.layers = {0}, .window = 0, .pages_total = 64}}}};
    options_.incarnation = 7;
    options_.seqs_max = 16;
    options_.seq_len_max = 4096;
    options_.reclaim_slack_tokens = 0;
    options_.page_tokens = page_tokens;
  }
  StoreShape& Pages(int64_t pages) { return Group().pages_total = pages, *this; }
  StoreShape& Seqs(int32_t seqs_max) { return options_.seqs_max = seqs_max, *this; }
  StoreShape& Slack(int32_t tokens) { return options_.reclaim_slack_tokens = tokens, *this; }
  StoreShape& Window(int32_t window) { return Group().window = window, *this; }
  StoreShape& Digests(int32_t kept) { return options_.replay_digests_max = kept, *this; }
  StoreShape& Tenants(std::vector<TenantLimits> tenants) {
    return options_.tenants = std::move(tenants), *this;
  }
  StoreShape& SeqLenMax(int64_t tokens) { return options_.seq_len_max = tokens, *this; }
  // The latest group has the next so many layers.
  StoreShape& Layers(int32_t layers) {
    for (int32_t i = 1; i < layers; ++i) Group().layers.push_back(NextLayer());
    return *this;
  }
  // Another group of the latest model, of one layer.
  StoreShape& AndGroup() {
    const int32_t layer = NextLayer();
    options_.models.back().groups.push_back({.layers = {layer}, .window = 0, .pages_total = 64});
    return *this;
  }
  StoreShape& AndModel() {
    options_.models.push_back({.groups = {{.layers = {0}, .window = 0, .pages_total = 64}}});
    return *this;
  }
  const StoreOptions& options() const { return options_; }

 private:
  GroupOptions& Group() { return options_.models.back().groups.back(); }
  int32_t NextLayer() const {
    size_t layers = 0;
    for (const GroupOptions& group : options_.models.back().groups) layers += group.layers.size();
    return static_cast<int32_t>(layers);
  }

  StoreOptions options_;
};

inline StoreShape PageTokens(int32_t page_tokens) { return StoreShape(page_tokens); }

class Store {
 public:
  explicit Store(const StoreShape& shape) : Store(shape.options()) {}
  explicit Store(StoreOptions options) : pages_(options) {
    options.on_page_freed = [this](int32_t model, int32_t group, PageId page_id) {
      pages_.Poison(model, group, page_id);
    };
    store_ = *SeqStore::Make(std::move(options));
  }

  SeqStore* operator->() { return store_.get(); }
  SeqStore& operator*() { return *store_; }
  SeqIndex At(const SeqHandle& seq) const { return *store_->Find(seq, TenantId{0}); }
  bool Has(const SeqHandle& seq) const { return store_->Find(seq, TenantId{0}).ok(); }

  absl::StatusOr<SeqHandle> TryCreate(const CreateArgs& args) {
    SeqHandle handle;
    const absl::Status status = store_->Create(args, now_ms, absl::MakeSpan(&handle, 1));
    Check();
    if (!status.ok()) return status;
    return handle;
  }
  SeqHandle Create(int64_t expected_tokens = 0) {
    return TryCreate({.model = 0, .expected_tokens = expected_tokens}).value();
  }
  // A new sequence with so many tokens in layer 0.
  SeqHandle Filled(int64_t tokens, int64_t expected_tokens = 0) {
    const SeqHandle seq = Create(expected_tokens);
    EXPECT_TRUE(Append(seq, tokens).ok());
    return seq;
  }
  absl::StatusOr<SeqHandle> TryFork(const SeqHandle& parent, int64_t expected_tokens = 0) {
    SeqHandle child;
    const absl::Status status = store_->Fork(At(parent), {.expected_tokens = expected_tokens},
                                             now_ms, absl::MakeSpan(&child, 1));
    Check();
    if (!status.ok()) return status;
    return child;
  }
  SeqHandle Fork(const SeqHandle& parent, int64_t expected_tokens = 0) {
    return TryFork(parent, expected_tokens).value();
  }

  // Plans, does the work, commits.
  absl::StatusOr<AppendVerdict> AppendAt(const SeqHandle& seq, const AppendArgs& args) {
    const absl::StatusOr<AppendPlan> plan = store_->PlanAppend(At(seq), args);
    Check();
    if (!plan.ok()) return plan.status();
    if (plan->verdict == AppendVerdict::kCommit) {
      EXPECT_TRUE(pages_.Do(*store_, *plan, args)) << "a plan writes a page that others read";
      store_->Commit(*plan);
      Check();
    }
    return plan->verdict;
  }
  // So many tokens at the end of a layer.
  absl::Status Append(const SeqHandle& seq, int64_t tokens, int32_t layer = 0,
                      uint64_t digest = 1) {
    return AppendAt(seq, {.layer = layer,
                          .pos = store_->SeqLen(At(seq), layer),
                          .n = static_cast<int32_t>(tokens),
                          .digest = digest})
        .status();
  }
  absl::Status Truncate(const SeqHandle& seq, int64_t pos) {
    const absl::Status status = store_->Truncate(At(seq), pos);
    Check();
    return status;
  }
  void Free(const SeqHandle& seq) {
    store_->Free(At(seq));
    Check();
  }
  std::vector<SeqHandle> Expire(int64_t at_ms, size_t most = 16) {
    std::vector<SeqHandle> handles(most);
    handles.resize(static_cast<size_t>(store_->Expire(at_ms, absl::MakeSpan(handles))));
    Check();
    return handles;
  }

  int64_t Len(const SeqHandle& seq, int32_t layer = 0) const {
    return store_->SeqLen(At(seq), layer);
  }
  PageId PageOf(const SeqHandle& seq, int64_t pos, int32_t group = 0) const {
    return store_->Table(At(seq), group).SlotOf(pos).page_id;
  }
  PageId TailPage(const SeqHandle& seq) const { return PageOf(seq, Len(seq) - 1); }
  // Whether tokens [pos, end) of a layer are those that an append of this digest brought.
  bool Holds(const SeqHandle& seq, int64_t pos, int64_t end, uint64_t digest,
             int32_t layer = 0) const {
    for (int64_t i = pos; i < end; ++i) {
      if (pages_.Read(*store_, At(seq), layer, i) != SimulatedPages::Value(digest, layer, i)) {
        return false;
      }
    }
    return true;
  }
  PoolStat Pool(int32_t group = 0, int32_t model = 0) const { return store_->Pool(model, group); }

  int64_t now_ms = 1000;  // given to the calls that want a time

 private:
  void Check() const {
    const absl::Status status = Audit(*store_);
    EXPECT_TRUE(status.ok()) << status;
  }

  SimulatedPages pages_;
  std::unique_ptr<SeqStore> store_;
};

}  // namespace fp8kvd::cache
