#include "server/engine/fleet.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"

namespace fp8kvd::engine {

Fleet::Fleet(std::vector<Engine*> engines, std::vector<config::TenantOptions> tenants)
    : engines_(std::move(engines)),
      tenants_(std::move(tenants)),
      pending_tenant_(std::max<size_t>(1, tenants_.size()), 0) {
  FP8KVD_CHECK(!engines_.empty());
  Pending none;
  for (const ModelSetup& model : engines_.front()->models()) {
    none.seqs.push_back(0);
    none.pages.emplace_back(model.geometry.groups.size(), 0);
  }
  pending_.assign(engines_.size(), none);
}

std::vector<EngineStats> Fleet::device_stats() const {
  std::vector<EngineStats> stats;
  stats.reserve(engines_.size());
  for (const Engine* const engine : engines_) stats.push_back(engine->stats());
  return stats;
}

EngineStats Fleet::stats() const {
  return engines_.size() == 1 ? engines_.front()->stats() : SumOf(device_stats());
}

void Fleet::Drain() {
  for (Engine* const engine : engines_) engine->Drain();
}

void Fleet::SetTenants(std::vector<config::TenantOptions> tenants) {
  for (Engine* const engine : engines_) engine->SetTenants(tenants);
  const std::lock_guard<std::mutex> lock(mutex_);
  tenants_ = std::move(tenants);
}

std::vector<SeqPages> Fleet::PagesOf(int32_t model, int64_t expected_tokens) const {
  const Engine& engine = *engines_.front();
  const ModelSetup& setup = engine.models()[static_cast<size_t>(model)];
  const int64_t slack = engine.cache_options().reclaim_slack_tokens;
  std::vector<SeqPages> pages;
  for (size_t g = 0; g < setup.geometry.groups.size(); ++g) {
    const int64_t typical = setup.group_pages_per_seq.empty() ? 1 : setup.group_pages_per_seq[g];
    pages.push_back(
        {.reserved = SeqPagesMax(expected_tokens, setup.geometry.groups[g].window, slack),
         .typical = std::max<int64_t>(1, typical)});
  }
  return pages;
}

void Fleet::AddPending(const Placing& placing, int64_t sign) {
  const std::vector<SeqPages> pages = PagesOf(placing.model, placing.expected_tokens);
  const auto model = static_cast<size_t>(placing.model);
  for (const int32_t device : placing.devices) {
    Pending& pending = pending_[static_cast<size_t>(device)];
    pending.seqs[model] += sign;
    for (size_t g = 0; g < pages.size(); ++g) pending.pages[model][g] += sign * pages[g].reserved;
  }
}

Fleet::Placing Fleet::Place(int32_t model, int64_t expected_tokens, int32_t count,
                            absl::Span<const int32_t> out) {
  const std::vector<SeqPages> pages = PagesOf(model, expected_tokens);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<DeviceRoom> rooms(engines_.size());
  for (size_t device = 0; device < engines_.size(); ++device) {
    const EngineStats stats = engines_[device]->stats();
    const Pending& pending = pending_[device];
    DeviceRoom& room = rooms[device];
    room.seqs = stats.models[static_cast<size_t>(model)].seqs + pending.seqs[model];
    for (const PoolStats& pool : stats.pools) {
      if (pool.model != model) continue;
      room.groups.push_back(
          {.pages_total = pool.pages_total,
           .pages_left = pool.pages_free - pool.pages_reserved - pending.pages[model][pool.group]});
    }
  }
  for (const int32_t device : out) rooms[static_cast<size_t>(device)].is_out = true;
  Placing placing{.model = model,
                  .expected_tokens = expected_tokens,
                  .devices = PlaceSeqs(std::move(rooms), pages, count)};
  AddPending(placing, 1);
  return placing;
}

void Fleet::Placed(const Placing& placing) {
  const std::lock_guard<std::mutex> lock(mutex_);
  AddPending(placing, -1);
}

// What is being made counts twice for a moment, when an engine has published it and its call has
// not come back yet: near the bound a call may be refused that could have been taken, but never the
// other way round.
absl::Status Fleet::TakeSeqs(cache::TenantId tenant, int64_t count) {
  const auto t = static_cast<size_t>(tenant);
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t all = pending_all_;
  int64_t mine = pending_tenant_[t];
  for (const Engine* const engine : engines_) {
    const EngineStats stats = engine->stats();
    all += stats.seqs;
    mine += stats.tenants[t].seqs;
  }
  const int64_t all_max = engines_.front()->cache_options().seqs_max;
  const int64_t mine_max =
      t < tenants_.size() ? std::min<int64_t>(all_max, tenants_[t].seqs_max) : all_max;
  const int64_t left = std::max<int64_t>(0, std::min(all_max - all, mine_max - mine));
  if (count > left) {
    return absl::ResourceExhaustedError(
        absl::StrCat(count, " sequences asked, ", left, " of ", mine_max,
                     " are left; free sequences, or retry when leases have ended"));
  }
  pending_all_ += count;
  pending_tenant_[t] += count;
  return absl::OkStatus();
}

void Fleet::GiveBackSeqs(cache::TenantId tenant, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_all_ -= count;
  pending_tenant_[static_cast<size_t>(tenant)] -= count;
}

}  // namespace fp8kvd::engine
