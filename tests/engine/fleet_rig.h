// tests/engine/fleet_rig.h: engines on several fake devices as one, on fake time. Turns are the
// test's.
#pragma once

#include <deque>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "config/base/check.h"
#include "server/engine/admission.h"
#include "server/engine/fleet.h"
#include "tests/support/engine_calls.h"
#include "tests/support/fake_backend.h"
#include "tests/support/spread_calls.h"

namespace fp8kvd::testing {

class FleetRig {
 public:
  static constexpr int64_t kPages = 64;  // of each group on each device

  explicit FleetRig(int32_t devices, int32_t seqs_max = 32,
                    const std::vector<config::TenantOptions>& tenants = {},
                    const std::vector<ModelSpec>& specs = {ModelSpec{.pages = kPages}},
                    uint64_t incarnation = 7) {
    const config::EngineOptions options = {.devices = {},
                                           .queue_items_max = 160,
                                           .batch_rows_max = 16,
                                           .append_slice_bytes_max = 16 * 16,
                                           .staging_bytes = int64_t{16} << 20,
                                           .staging_slots = 64};
    const config::CacheOptions cache = {.seqs_max = seqs_max,
                                        .seq_len_max = 8192,
                                        .reclaim_slack_tokens = 16,
                                        .lease_ttl_ms = 1000,
                                        .poison_freed_pages = true};
    const auto queues = tenants.empty() ? nullptr : std::make_shared<engine::TenantQueues>(tenants);
    std::vector<engine::ModelSetup> models;
    for (const ModelSpec& spec : specs) models.push_back(MakeModel(spec));
    std::vector<engine::Engine*> raw;
    for (int32_t i = 0; i < devices; ++i) {
      auto started = engine::Engine::Start(options, cache, models, incarnation,
                                           &backends.emplace_back(), &clock, tenants,
                                           {.home = static_cast<uint32_t>(i), .queues = queues});
      FP8KVD_CHECK(started.ok());
      raw.push_back(started->get());
      engines_.push_back(*std::move(started));
    }
    fleet = std::make_unique<engine::Fleet>(std::move(raw), tenants);
  }

  // Ends with everything answered and nothing lost.
  ~FleetRig() {
    for (FakeBackend& backend : backends) backend.Release();
    Settle();
    EXPECT_EQ(fleet->stats().staging_slots_used, 0);
    for (const FakeBackend& backend : backends) {
      for (const std::string& complaint : backend.complaints()) ADD_FAILURE() << complaint;
    }
  }

  // Turns until nothing moves any more; held devices stay held.
  void Settle() {
    bool has_worked = true;
    for (int32_t turns = 0; has_worked; ++turns) {
      ASSERT_LT(turns, 100'000);
      has_worked = false;
      for (const auto& engine : engines_) has_worked |= engine->Step();
    }
  }
  // The same until the condition holds, which may submit more.
  template <typename Condition>
  void SettleUntil(Condition condition) {
    for (int32_t rounds = 0; !condition(); ++rounds) {
      ASSERT_LT(rounds, 100);
      Settle();
    }
  }

  std::vector<cache::SeqHandle> Create(int32_t count, int64_t expected_tokens = 0,
                                       int32_t model = 0) {
    SpreadControlCall call(fleet.get(), engine::ControlRequest::Op::kCreate);
    call.request.model = model;
    call.request.count = count;
    call.request.expected_tokens = expected_tokens;
    EXPECT_TRUE(call.Submit().ok());
    SettleUntil([&] { return call.done(); });
    EXPECT_TRUE(call.request.status.ok()) << call.request.status;
    return call.request.handles;
  }

  // Tokens with ids from first_id on, in every layer.
  std::vector<uint64_t> Fill(const cache::SeqHandle& handle, int64_t pos, int32_t n,
                             uint64_t first_id = 1000, int32_t model = 0) {
    std::vector<uint64_t> tokens(static_cast<size_t>(n));
    std::iota(tokens.begin(), tokens.end(), first_id);
    engine::Engine& engine = fleet->Of(fleet->DeviceOf(handle));
    const int32_t layers = engine.models()[static_cast<size_t>(model)].geometry.layers;
    AppendCall call(&engine, model, 0, layers, handle, pos, tokens);
    EXPECT_TRUE(call.Submit().ok());
    SettleUntil([&] { return call.done(); });
    EXPECT_TRUE(call.request.status.ok()) << call.request.status;
    return tokens;
  }

  ManualClock clock;
  std::deque<FakeBackend> backends;
  std::unique_ptr<engine::Fleet> fleet;

 private:
  std::vector<std::unique_ptr<engine::Engine>> engines_;
};

}  // namespace fp8kvd::testing
