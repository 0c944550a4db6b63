#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "server/engine/engine_parts.h"

namespace fp8kvd::engine {
namespace {

// Sequences that one turn expires at most; the next turn goes on.
constexpr int32_t kExpireMax = 64;
// Of a launch that works inside the call, unless configured otherwise: config/options.h.
constexpr int64_t kBatchKvBytesPerThread = int64_t{8} << 20;
// Of a GPU's launch where tenants share it: some 0.3 ms at 4 TB/s, which one may have to wait for
// another's launch.
constexpr int64_t kBatchKvBytesOfTenants = int64_t{1} << 30;

// Loads the kernels of every shape that the models have.
absl::Status WarmUp(kernels::Backend* backend, const std::vector<ModelSetup>& models,
                    int32_t rows_max) {
  std::vector<kernels::KernelShape> shapes;
  int32_t q_heads_max = 1;
  for (const ModelSetup& model : models) {
    q_heads_max = std::max(q_heads_max, model.geometry.q_heads);
    for (const LayerGroup& group : model.geometry.groups) {
      shapes.push_back(kernels::KernelShape{.head_dim = group.head_dim,
                                            .group = model.geometry.q_heads / group.kv_heads,
                                            .precision = group.precision});
    }
  }
  return backend->WarmUp(shapes, rows_max, kQLenMax, q_heads_max);
}

int64_t BatchKvBytesMax(const config::EngineOptions& options, const kernels::DeviceInfo& device,
                        size_t tenants) {
  if (options.batch_kv_bytes_max > 0) return options.batch_kv_bytes_max;
  if (device.returns_at_once) {
    return tenants > 1 ? kBatchKvBytesOfTenants : std::numeric_limits<int64_t>::max();
  }
  return kBatchKvBytesPerThread * device.threads;
}

// Tokens that one launch can append at most.
int64_t LaunchTokensMax(const config::EngineOptions& options,
                        const std::vector<ModelSetup>& models) {
  int64_t tokens = int64_t{options.batch_rows_max} * kQLenMax;
  for (const ModelSetup& model : models) {
    for (const LayerGroup& group : model.geometry.groups) {
      tokens = std::max(
          tokens, options.append_slice_bytes_max / (int64_t{4} * group.kv_heads * group.head_dim));
    }
  }
  return tokens;
}

}  // namespace

Engine::Parts::Parts(Setup setup, PageMap pages, std::unique_ptr<Staging> staging)
    : setup_(std::move(setup)),
      callers_take_turns_(setup_.backend->Device().returns_at_once),
      pages_(std::move(pages)),
      staging_(std::move(staging)),
      admission_(setup_.options.queue_items_max,
                 setup_.seat.queues != nullptr ? setup_.seat.queues
                                               : std::make_shared<TenantQueues>(setup_.tenants)),
      freed_(setup_.models, setup_.cache_options.poison_freed_pages),
      batcher_(&setup_.models,
               {.rows_max = setup_.options.batch_rows_max,
                .kv_bytes_max = BatchKvBytesMax(setup_.options, setup_.backend->Device(),
                                                setup_.tenants.size())},
               setup_.options.queue_items_max, setup_.cache_options.seqs_max,
               static_cast<int32_t>(setup_.tenants.size())),
      launches_(setup_.options.launches_inflight_max, setup_.options.batch_rows_max),
      expired_(kExpireMax) {
  stats_.models.resize(setup_.models.size());
  stats_.tenants.resize(setup_.tenants.size());
  for (int32_t model = 0; model < static_cast<int32_t>(setup_.models.size()); ++model) {
    const size_t groups = setup_.models[model].geometry.groups.size();
    for (int32_t group = 0; group < static_cast<int32_t>(groups); ++group) {
      stats_.pools.push_back(PoolStats{.model = model, .group = group});
      for (TenantStats& tenant : stats_.tenants) {
        tenant.pools.push_back(PoolStats{.model = model, .group = group});
      }
    }
  }
}

absl::StatusOr<std::unique_ptr<Engine::Parts>> Engine::Parts::Make(Setup setup) {
  absl::StatusOr<PageMap> pages = PageMap::Make(
      setup.backend, setup.models, setup.cache_options.seqs_max, setup.cache_options.seq_len_max);
  if (!pages.ok()) return pages.status();
  absl::StatusOr<std::unique_ptr<Staging>> staging =
      Staging::Make(setup.backend, setup.options.staging_bytes, setup.options.staging_slots,
                    static_cast<int32_t>(setup.tenants.size()));
  if (!staging.ok()) return staging.status();
  std::unique_ptr<Parts> parts(new Parts(std::move(setup), *std::move(pages), *std::move(staging)));

  const Setup& ours = parts->setup_;
  absl::StatusOr<std::unique_ptr<cache::SeqStore>> store =
      cache::SeqStore::Make(parts->MakeStoreOptions());
  if (!store.ok()) return store.status();
  if (absl::Status status = WarmUp(ours.backend, ours.models, ours.options.batch_rows_max);
      !status.ok()) {
    return status;
  }
  parts->MakeSteps(*std::move(store));
  return parts;
}

cache::StoreOptions Engine::Parts::MakeStoreOptions() {
  const config::CacheOptions& options = setup_.cache_options;
  cache::StoreOptions store;
  for (const ModelSetup& model : setup_.models) {
    cache::ModelOptions& out = store.models.emplace_back();
    for (size_t g = 0; g < model.geometry.groups.size(); ++g) {
      const LayerGroup& group = model.geometry.groups[g];
      out.groups.push_back(cache::GroupOptions{
          .layers = group.layers, .window = group.window, .pages_total = model.group_pages[g]});
    }
  }
  store.tenants = LimitsOf(setup_.tenants);
  store.incarnation = setup_.incarnation;
  store.home = setup_.seat.home;
  store.seqs_max = options.seqs_max;
  store.seq_len_max = options.seq_len_max;
  store.reclaim_slack_tokens = options.reclaim_slack_tokens;
  store.replay_digests_max = options.replay_digests_max;
  store.on_page_freed = [this](int32_t model, int32_t group, cache::PageId page_id) {
    freed_.Add(model, group, page_id);
  };
  return store;
}

// Once at the start, and once more where a restored store takes the place of the empty one.
void Engine::Parts::MakeSteps(std::unique_ptr<cache::SeqStore> store) {
  store_ = std::move(store);
  const StepContext context{.options = setup_.options,
                            .cache_options = setup_.cache_options,
                            .models = setup_.models,
                            .backend = *setup_.backend,
                            .store = *store_,
                            .pages = pages_,
                            .freed = freed_,
                            .stats = stats_};
  append_rows_ = std::make_unique<AppendRows>(context, setup_.options.batch_rows_max,
                                              LaunchTokensMax(setup_.options, setup_.models));
  decode_step_ = std::make_unique<DecodeStep>(context, append_rows_.get());
  append_step_ = std::make_unique<AppendStep>(context, append_rows_.get());
  control_step_ = std::make_unique<ControlStep>(context);
  answers_ = std::make_unique<Answers>(context, &admission_);
  intake_ = std::make_unique<Intake>(context, &batcher_, answers_.get());
  answers_->Tell();  // so that stats() knows the pools
}

std::vector<cache::TenantLimits> LimitsOf(const std::vector<config::TenantOptions>& tenants) {
  std::vector<cache::TenantLimits> limits;
  limits.reserve(tenants.size());
  for (const config::TenantOptions& tenant : tenants) {
    limits.push_back({.seqs_max = tenant.seqs_max, .pages_share_max = tenant.pages_share_max});
  }
  return limits;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Start(
    const config::EngineOptions& options, const config::CacheOptions& cache_options,
    std::vector<ModelSetup> models, uint64_t incarnation, kernels::Backend* backend,
    const Clock* clock, std::vector<config::TenantOptions> tenants, Seat seat) {
  if (tenants.empty()) {
    tenants.push_back({.name = "default",
                       .pages_share_max = 1.0,
                       .seqs_max = cache_options.seqs_max,
                       .inflight_items_max = options.queue_items_max});
  }
  absl::StatusOr<std::unique_ptr<Parts>> parts =
      Parts::Make(Parts::Setup{.options = options,
                               .cache_options = cache_options,
                               .models = std::move(models),
                               .incarnation = incarnation,
                               .backend = backend,
                               .clock = clock,
                               .tenants = std::move(tenants),
                               .seat = std::move(seat)});
  if (!parts.ok()) return parts.status();
  return std::unique_ptr<Engine>(new Engine(*std::move(parts)));
}

}  // namespace fp8kvd::engine
