#include "tests/sim/world.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/engine/admission.h"

namespace fp8kvd::testing {
namespace {

constexpr int32_t kSteps = 800;
// Turns that a world may need to come to rest; far above what it takes.
constexpr int32_t kSettleTurnsMax = 100'000;

}  // namespace

void World::Flight::Sign(cache::TenantId tenant, engine::TimeUs arrived,
                         engine::TimeUs deadline) const {
  const engine::Sender sender{.tenant = tenant, .arrived = arrived, .deadline = deadline};
  if (decode) {
    decode->facts = sender;
    return;
  }
  engine::Request& request = append ? static_cast<engine::Request&>(append->request)
                                    : static_cast<engine::Request&>(control->request);
  request.tenant = tenant;
  request.arrived = arrived;
  request.deadline = deadline;
}

absl::Status World::Flight::Submit() const {
  if (decode) return decode->Submit();
  return append ? append->Submit() : control->Submit();
}

void World::Flight::Cancel() const {
  if (decode) {
    decode->Cancel();
  } else if (append) {
    append->request.cancelled = true;
  } else {
    control->Cancel();
  }
}

absl::Status World::Flight::status() const {
  if (decode) return decode->status();
  return append ? append->request.status : control->request.status;
}

int32_t World::Flight::retry_after_ms() const {
  if (decode) return decode->retry_after_ms();
  return append ? append->request.retry_after_ms : control->request.retry_after_ms;
}

int32_t World::Flight::times_done() const {
  if (decode) return decode->times_done();
  if (append) return append->times_done();
  return control->times_done();
}

World::World(uint64_t seed, bool is_tracing)
    : seed_(seed),
      is_tracing_(is_tracing),
      random_(seed),
      callers_take_turns_(random_.Chance(50)),
      devices_(random_.Chance(33) ? 2 : 1) {}

World::~World() {
  // A world that went wrong may leave calls unanswered, and an engine aborts on those: the
  // complaint is what the reader wants to see.
  for (auto& engine : engines_) {
    if (!is_ok()) static_cast<void>(engine.release());
  }
}

void World::Complain(const std::string& what) {
  if (complaint_.empty()) complaint_ = absl::StrCat("seed ", seed_, " at ", now(), " us: ", what);
  Trace(absl::StrCat("COMPLAINT ", what));
}

void World::Trace(const std::string& what) const {
  if (is_tracing_) std::printf("%9lld %s\n", static_cast<long long>(now()), what.c_str());
}

void World::Start() {
  config::EngineOptions options;
  options.queue_items_max = static_cast<int32_t>(random_.Of({16, 64, 256}));
  options.batch_rows_max = static_cast<int32_t>(random_.In(1, 8));
  options.batch_kv_bytes_max = random_.Of({0, 64, 2'000, 20'000});
  options.batch_wait_us_max = random_.Chance(20) ? static_cast<int32_t>(random_.In(1, 500)) : 0;
  options.append_slice_bytes_max = 16 * random_.In(1, 40);
  options.launches_inflight_max = static_cast<int32_t>(random_.In(1, 3));
  options.staging_bytes = int64_t{128} << 20;  // a third holds what one tenant sends
  config::CacheOptions cache;
  cache.seqs_max = static_cast<int32_t>(random_.In(6, 40));
  cache.seq_len_max = SeqModel::kSeqLenMax;
  cache.reclaim_slack_tokens = static_cast<int32_t>(random_.Of({0, 1, 7, 64}));
  cache.lease_ttl_ms = static_cast<int32_t>(random_.In(30, 2'000));
  cache.replay_digests_max = static_cast<int32_t>(random_.In(1, 6));
  cache.poison_freed_pages = true;

  std::vector<engine::ModelSetup> models;
  const int64_t models_count = random_.In(1, 2);
  for (int64_t m = 0; m < models_count; ++m) {
    ModelSpec spec;
    spec.name = absl::StrCat("m", m);
    spec.windows.clear();
    const int64_t layers = random_.In(1, 4);
    const int32_t window = static_cast<int32_t>(random_.Of({5, 40, 64, 100}));
    for (int64_t i = 0; i < layers; ++i) spec.windows.push_back(random_.Chance(40) ? window : 0);
    spec.kv_heads = static_cast<int32_t>(random_.In(1, 2));
    spec.group = static_cast<int32_t>(random_.In(1, 3));
    spec.precision = random_.Chance(50) ? Precision::kFp8Kv : Precision::kBf16;
    spec.pages = random_.Of({6, 12, 24, 60, 200});
    models.push_back(MakeModel(spec));
  }
  tenants_ = random_.In(1, 3);
  std::vector<config::TenantOptions> tenants;
  for (int64_t i = 0; i < tenants_; ++i) {
    tenants.push_back({.name = absl::StrCat("t", i),
                       .pages_share_max = 0.25 * static_cast<double>(random_.In(2, 4)),
                       .seqs_max = static_cast<int32_t>(random_.In(3, 40)),
                       .inflight_items_max = static_cast<int32_t>(random_.In(8, 256)),
                       .items_per_s_max = random_.Chance(20) ? 20'000 : 0});
  }
  const auto queues = std::make_shared<engine::TenantQueues>(tenants);
  std::vector<engine::Engine*> raw;
  for (int64_t i = 0; i < devices_; ++i) {
    FakeBackend& backend = backends_.emplace_back(/*returns_at_once=*/callers_take_turns_);
    absl::StatusOr<std::unique_ptr<engine::Engine>> started =
        engine::Engine::Start(options, cache, models, /*incarnation=*/seed_ + 1, &backend, &clock_,
                              tenants, {.home = static_cast<uint32_t>(i), .queues = queues});
    if (!started.ok()) {
      Complain(started.status().ToString());
      return;
    }
    raw.push_back(started->get());
    engines_.push_back(*std::move(started));
    backend.SetRecording(false);
    if (random_.Chance(60)) {
      ++tally_["rows brought before they are appended"];
      backend.SetBringBytesMin(random_.In(1, 400));
      if (random_.Chance(80)) backend.HoldBrings();
      if (random_.Chance(30)) backend.LetArriveOnceAsked();
    }
  }
  fleet_ = std::make_unique<engine::Fleet>(std::move(raw), std::move(tenants));
  if (devices_ > 1) ++tally_["two devices"];
  for (int64_t i = random_.In(1, 4); i > 0; --i) clients_.push_back(NewClient());
  if (random_.Chance(15)) fault_at_ = random_.In(0, kSteps - 1);
}

std::string World::Run() {
  Start();
  if (is_ok()) Loop();
  if (is_ok()) End();
  return complaint_;
}

void World::Loop() {
  const auto any_device = [this]() -> FakeBackend& {
    return backends_[static_cast<size_t>(devices_ == 1 ? 0 : random_.In(0, devices_ - 1))];
  };
  for (int64_t step = 0; step < kSteps && is_ok() && !has_fault_; ++step) {
    if (step == fault_at_) any_device().FailCall(random_.In(0, 5));
    const int64_t dice = random_.In(1, 100);
    if (dice <= 50) {
      auto client = clients_.begin();
      std::advance(client, random_.In(0, static_cast<int64_t>(clients_.size()) - 1));
      if (client->is_alive && random_.Chance(3)) Spy(*client);
      if (client->is_alive) ActAs(*client);
    } else if (dice <= 75) {
      Turn();
    } else if (dice <= 80) {
      any_device().ReleaseOneFence();
    } else if (dice <= 85) {
      any_device().LetOneArrive();
    } else if (dice <= 95) {
      clock_.AdvanceUs(random_.Chance(3) ? random_.In(30'000, 500'000) : random_.In(0, 4'000));
    } else if (dice <= 97) {
      CancelSomething();
    } else if (dice <= 98) {
      if (random_.Chance(50)) {
        any_device().Release();
      } else {
        any_device().Hold();
      }
    } else if (random_.Chance(15)) {
      Kill(clients_.front());
      clients_.push_back(NewClient());
      clients_.splice(clients_.end(), clients_, clients_.begin());
    }
    JudgeDone();
  }
}

void World::Turn() {
  const size_t device = static_cast<size_t>(devices_ == 1 ? 0 : random_.In(0, devices_ - 1));
  Trace(engines_[device]->Step() ? "turn" : "turn, idle");
  CheckEngines();
}

bool World::StepAll() {
  bool has_worked = false;
  for (const auto& engine : engines_) has_worked |= engine->Step();
  return has_worked;
}

void World::CheckEngines() {
  for (const auto& engine : engines_) CheckEngine(engine->stats());
  for (const FakeBackend& backend : backends_) {
    for (const std::string& complaint : backend.complaints()) Complain(complaint);
  }
}

void World::CheckEngine(const engine::EngineStats& stats) {
  for (const engine::PoolStats& pool : stats.pools) {
    if (pool.pages_used + pool.pages_free != pool.pages_total) Complain("used + free != total");
  }
  std::vector<int64_t> used(stats.pools.size(), 0);
  for (const engine::TenantStats& tenant : stats.tenants) {
    for (size_t i = 0; i < used.size(); ++i) {
      used[i] += tenant.pools[i].pages_used;
      if (tenant.pools[i].pages_used > tenant.pools[i].pages_total) Complain("beyond its part");
    }
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i] != stats.pools[i].pages_used) Complain("the tenants' pages are not the pool's");
  }
  if (stats.failed && !has_fault_) {
    has_fault_ = true;
    ++tally_["device fault"];
    if (fault_at_ < 0) Complain("the engine failed without a fault");
    fleet_->Drain();  // as the daemon does
  }
}

// Everything is answered, whatever happened; then, unless the engine is done for, everything
// expires.
void World::End() {
  is_draining_ = !has_fault_ && random_.Chance(40);
  if (is_draining_) {
    fleet_->Drain();
    ++tally_["drain"];
  }
  const auto all_answered = [this] {
    return spies_.empty() &&
           std::all_of(clients_.begin(), clients_.end(),
                       [](const Client& client) { return client.flights.empty(); });
  };
  int32_t turns = 0;
  for (; is_ok() && !all_answered() && turns < kSettleTurnsMax; ++turns) {
    Turn();
    for (size_t i = 0; i < engines_.size(); ++i) {
      if (engines_[i]->stats().failed) continue;
      backends_[i].ReleaseOneFence();
      backends_[i].LetOneArrive();
    }
    clock_.AdvanceUs(100);
    JudgeDone();
  }
  if (!is_ok()) return;
  if (!all_answered()) Complain("a call was never answered");
  SpreadControlCall after(fleet_.get(), engine::ControlRequest::Op::kList);
  if (has_fault_ || is_draining_) {
    while (StepAll()) Trace("turn to the end");
    if (!absl::IsUnavailable(after.Submit())) Complain("work is taken after the end");
    for (const auto& engine : engines_) {
      if (engine->Run().ok() == engine->stats().failed) Complain("Run does not tell how it ended");
    }
  } else {
    CheckAllBack();
  }
  if (fleet_->stats().staging_slots_used != 0) Complain("a staging slot is lost");
  if (fleet_->stats().queue_items != 0) Complain("a place in the queue is lost");
}

// No client calls any more: a lease later, all pages are back.
void World::CheckAllBack() {
  for (FakeBackend& backend : backends_) backend.Release();
  int64_t ttl_ms = 0;
  for (const Client& client : clients_) {
    for (const SeqModel& seq : client.seqs) ttl_ms = std::max(ttl_ms, seq.ttl_ms());
  }
  clock_.AdvanceUs(ttl_ms * 1000 + 1000);
  for (int32_t turns = 0; StepAll() && turns < kSettleTurnsMax; ++turns) Trace("last turns");
  CheckEngines();
  const engine::EngineStats stats = fleet_->stats();
  for (const engine::PoolStats& pool : stats.pools) {
    if (pool.pages_used != 0) Complain(absl::StrCat(pool.pages_used, " pages never came back"));
  }
  if (stats.seqs != 0) Complain(absl::StrCat(stats.seqs, " sequences never ended"));
  tally_["lease expiry"] += static_cast<int64_t>(stats.lease_expiries_total);
  tally_["page copy"] += static_cast<int64_t>(stats.page_copies_total);
  tally_["replay"] += static_cast<int64_t>(stats.replays_total);
  tally_["fork"] += static_cast<int64_t>(stats.forks_total);
}

}  // namespace fp8kvd::testing
