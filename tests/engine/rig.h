// tests/engine/rig.h: an engine on fake time and a fake device, and short ways to call it.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/engine_calls.h"
#include "tests/support/fake_backend.h"

namespace fp8kvd::testing {

struct RigOptions {
  config::EngineOptions engine = {.devices = {},
                                  .queue_items_max = 256,
                                  .batch_rows_max = 16,
                                  .append_slice_bytes_max = 16 * 16,  // 16 tokens of MakeModel
                                  .staging_bytes = int64_t{1} << 20,
                                  .staging_slots = 64};
  config::CacheOptions cache = {.seqs_max = 32,
                                .seq_len_max = 1024,
                                .reclaim_slack_tokens = 16,
                                .lease_ttl_ms = 1000,
                                .poison_freed_pages = true};
  std::vector<ModelSpec> models = {ModelSpec{}};
  std::vector<config::TenantOptions> tenants = {};
  bool returns_at_once = false;  // the device: callers take turns
};

class Rig {
 public:
  explicit Rig(const RigOptions& options = RigOptions{}) : backend(options.returns_at_once) {
    std::vector<engine::ModelSetup> models;
    for (const ModelSpec& spec : options.models) models.push_back(MakeModel(spec));
    absl::StatusOr<std::unique_ptr<engine::Engine>> started =
        engine::Engine::Start(options.engine, options.cache, std::move(models), /*incarnation=*/7,
                              &backend, &clock, options.tenants);
    if (!started.ok()) {
      ADD_FAILURE() << started.status();
      std::abort();
    }
    engine_owned_ = *std::move(started);
    engine = engine_owned_.get();
  }

  // Ends with everything answered and nothing lost.
  ~Rig() {
    backend.Release();
    Settle();
    EXPECT_EQ(engine->staging().slots_used(), 0);
    for (const std::string& complaint : backend.complaints()) ADD_FAILURE() << complaint;
    for (const engine::PoolStats& pool : engine->stats().pools) {
      EXPECT_EQ(pool.pages_used + pool.pages_free, pool.pages_total);
    }
  }

  // Turns until nothing moves any more; a held device stays held.
  void Settle() {
    for (int32_t turns = 0; engine->Step(); ++turns) ASSERT_LT(turns, 100'000);
  }

  template <typename Call>
  void Run(Call& call) {
    ASSERT_TRUE(call.Submit().ok());
    Settle();
  }

  std::vector<cache::SeqHandle> Create(int32_t count, int64_t expected_tokens = 0,
                                       int32_t model = 0) {
    ControlCall call(engine, engine::ControlRequest::Op::kCreate);
    call.request.model = model;
    call.request.count = count;
    call.request.expected_tokens = expected_tokens;
    Run(call);
    EXPECT_TRUE(call.request.status.ok()) << call.request.status;
    return call.request.handles;
  }
  cache::SeqHandle Create() { return Create(1)[0]; }

  // Tokens with ids first_id, first_id + 1, ... in every layer of the model.
  std::vector<uint64_t> Fill(const cache::SeqHandle& handle, int64_t pos, int32_t n,
                             uint64_t first_id = 1000, int32_t model = 0) {
    std::vector<uint64_t> tokens(n);
    std::iota(tokens.begin(), tokens.end(), first_id);
    AppendCall call(engine, model, 0, engine->models()[model].geometry.layers, handle, pos, tokens);
    Run(call);
    EXPECT_TRUE(call.request.status.ok()) << call.request.status;
    return tokens;
  }

  absl::Status Control(engine::ControlRequest::Op op, const cache::SeqHandle& handle,
                       int64_t seq_len = 0) {
    ControlCall call(engine, op);
    call.request.handles = {handle};
    call.request.seq_lens = {seq_len};
    Run(call);
    return call.request.status.ok() ? call.request.item_status[0] : call.request.status;
  }

  int64_t PagesUsed() const {
    int64_t used = 0;
    for (const engine::PoolStats& pool : engine->stats().pools) used += pool.pages_used;
    return used;
  }

  ManualClock clock;
  FakeBackend backend;
  engine::Engine* engine = nullptr;

 private:
  std::unique_ptr<engine::Engine> engine_owned_;
};

// One step of one sequence: a token appended at pos, and the query that follows it.
inline ItemSpec Step(const cache::SeqHandle& handle, int64_t pos, uint64_t token) {
  return ItemSpec{.handle = handle, .pos = pos, .tokens = {token}, .queries = {token + 500'000}};
}
inline ItemSpec Ask(const cache::SeqHandle& handle, int64_t pos, uint64_t query) {
  return ItemSpec{.handle = handle, .pos = pos, .tokens = {}, .queries = {query}};
}

}  // namespace fp8kvd::testing
