#include "server/ops/metrics.h"

#include <algorithm>
#include <utility>

#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace fp8kvd::ops {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr double kMicro = 1e-6;
const char* const kCodeNames[MethodMetrics::kCodes] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
const char* const kKindNames[engine::EngineStats::kKinds] = {"decode", "append", "control"};

// Families under construction, in the order of their first samples.
class Families {
 public:
  void Count(const char* name, const char* help, double value, Labels labels = {}) {
    ClientMetric& metric = Add(name, help, MetricType::Counter, std::move(labels));
    metric.counter.value = value;
  }
  void Gauge(const char* name, const char* help, double value, Labels labels = {}) {
    ClientMetric& metric = Add(name, help, MetricType::Gauge, std::move(labels));
    metric.gauge.value = value;
  }
  // `unit`: of the histogram's values in the family's base unit.
  void Observe(const char* name, const char* help, const engine::Histogram& from, double unit,
               Labels labels = {}) {
    ClientMetric& metric = Add(name, help, MetricType::Histogram, std::move(labels));
    metric.histogram.sample_count = from.count;
    metric.histogram.sample_sum = static_cast<double>(from.sum) * unit;
    uint64_t cumulative = 0;
    for (int32_t i = 0; i < engine::Histogram::kBuckets - 1; ++i) {
      cumulative += from.counts[i];
      metric.histogram.bucket.push_back({cumulative, static_cast<double>(uint64_t{1} << i) * unit});
    }
  }
  void Observe(const char* name, const char* help, const LatencyCounts& from, Labels labels) {
    ClientMetric& metric = Add(name, help, MetricType::Histogram, std::move(labels));
    metric.histogram.sample_count = from.count;
    metric.histogram.sample_sum = static_cast<double>(from.sum_us) * kMicro;
    uint64_t cumulative = 0;
    for (size_t i = 0; i < kLatencyBoundsUs.size(); ++i) {
      cumulative += from.counts[i];
      const double bound = static_cast<double>(kLatencyBoundsUs[i]) / 1e6;  // prints as written
      metric.histogram.bucket.push_back({cumulative, bound});
    }
  }
  std::string Text() const { return prometheus::TextSerializer().Serialize(families_); }

 private:
  ClientMetric& Add(const char* name, const char* help, MetricType type, Labels labels) {
    const auto same = [name](const MetricFamily& family) { return family.name == name; };
    auto family = std::find_if(families_.begin(), families_.end(), same);
    if (family == families_.end()) {
      families_.push_back({.name = name, .help = help, .type = type, .metric = {}});
      family = std::prev(families_.end());
    }
    family->metric.emplace_back();
    family->metric.back().label = std::move(labels);
    return family->metric.back();
  }

  std::vector<MetricFamily> families_;
};

void AddRequests(const engine::EngineStats& stats, Families* out) {
  for (int32_t i = 0; i < engine::EngineStats::kKinds; ++i) {
    const Labels kind = {{"kind", kKindNames[i]}};
    out->Count("fp8kvd_requests_taken_total", "Requests that the engine took.",
               stats.requests_taken_total[i], kind);
    out->Count("fp8kvd_requests_answered_total", "Requests that the engine answered.",
               stats.requests_answered_total[i], kind);
    out->Count("fp8kvd_requests_failed_total", "Requests answered with an error as a whole.",
               stats.requests_failed_total[i], kind);
  }
  out->Count("fp8kvd_requests_refused_total", "Requests not taken: full, draining or failed.",
             stats.requests_refused_total);
  out->Count("fp8kvd_requests_late_total",
             "Requests whose deadline passed before their work began.", stats.requests_late_total);
  out->Count("fp8kvd_requests_cancelled_total", "Requests cancelled before their work began.",
             stats.requests_cancelled_total);
  out->Count("fp8kvd_items_failed_total", "Items of decodes that failed alone.",
             stats.items_failed_total);
}

void AddWork(const engine::EngineStats& stats, Families* out) {
  out->Count("fp8kvd_launches_total", "Launches on the device.", stats.decode_launches_total,
             {{"kind", "decode"}});
  out->Count("fp8kvd_launches_total", "", stats.append_launches_total, {{"kind", "append"}});
  out->Count("fp8kvd_rows_total", "Decode rows launched.", stats.rows_total);
  out->Count("fp8kvd_query_tokens_total", "Query tokens of the rows.", stats.query_tokens_total);
  out->Count("fp8kvd_append_tokens_total", "(token, layer) pairs committed.",
             stats.append_tokens_total);
  out->Count("fp8kvd_append_bytes_total", "Bytes of K and V committed, as they came.",
             stats.append_bytes_total);
  out->Count("fp8kvd_append_slices_total", "Slices of bulk appends.", stats.append_slices_total);
  out->Count("fp8kvd_replays_total", "Appends that were committed before.", stats.replays_total);
  out->Count("fp8kvd_page_copies_total", "Pages copied because several sequences owned them.",
             stats.page_copies_total);
  out->Count("fp8kvd_forks_total", "Sequences made by fork.", stats.forks_total);
  out->Count("fp8kvd_lease_expiries_total", "Sequences freed because no call named them.",
             stats.lease_expiries_total);
  out->Count("fp8kvd_device_allocations_total",
             "Times that device or pinned memory was taken; stands still once ready.",
             stats.device_allocations_total);
  out->Observe("fp8kvd_batch_rows", "Rows of a decode launch.", stats.batch_rows, 1);
  out->Observe("fp8kvd_stage_seconds", "From a decode's arrival until it was staged.",
               stats.stage_us, kMicro);
  out->Observe("fp8kvd_queue_seconds", "From then to its launch.", stats.queue_us, kMicro);
  out->Observe("fp8kvd_reply_seconds", "From a decode's fence until its reply was made.",
               stats.reply_us, kMicro);
  out->Observe("fp8kvd_kernel_seconds", "From a launch until its fence was seen.", stats.kernel_us,
               kMicro);
  out->Observe("fp8kvd_append_queue_seconds", "From a bulk append's arrival to its first slice.",
               stats.append_queue_us, kMicro);
}

void AddIdentity(const MetricLabels& labels, Families* out) {
  out->Gauge("fp8kvd_build_info", "What was built. Always 1.", 1,
             {{"version", labels.version},
              {"compiler", labels.compiler},
              {"cuda", labels.has_cuda ? "yes" : "no"}});
  out->Gauge("fp8kvd_info", "What runs. Always 1.", 1,
             {{"version", labels.version},
              {"incarnation", labels.incarnation},
              {"device", labels.device},
              {"device_name", labels.device_name}});
  for (const MetricLabels::Model& model : labels.models) {
    for (size_t group = 0; group < model.group_precisions.size(); ++group) {
      out->Gauge("fp8kvd_layer_group_info", "How a layer group stores K and V. Always 1.", 1,
                 {{"model", model.name},
                  {"group", std::to_string(group)},
                  {"precision", model.group_precisions[group]}});
    }
  }
}

void AddState(const engine::EngineStats& stats, const MetricLabels& labels, Families* out) {
  out->Gauge("fp8kvd_queue_items", "Items taken and not yet answered.",
             static_cast<double>(stats.queue_items));
  out->Gauge("fp8kvd_launches_inflight", "Launches that the device has not finished.",
             static_cast<double>(stats.launches_inflight));
  out->Gauge("fp8kvd_seqs", "Live sequences.", static_cast<double>(stats.seqs));
  for (const auto& [state, slots] :
       {std::pair("used", stats.staging_slots_used),
        std::pair("free", stats.staging_slots_total - stats.staging_slots_used)}) {
    out->Gauge("fp8kvd_staging_slots", "Staging slots.", static_cast<double>(slots),
               {{"state", state}});
  }
  for (const engine::PoolStats& pool : stats.pools) {
    const Labels group = {{"model", labels.models[pool.model].name},
                          {"group", std::to_string(pool.group)}};
    for (const auto& [state, pages] :
         {std::pair("used", pool.pages_used), std::pair("free", pool.pages_free)}) {
      Labels with_state = group;
      with_state.push_back({"state", state});
      out->Gauge("fp8kvd_pages", "Pages of a layer group's pool.", static_cast<double>(pages),
                 std::move(with_state));
    }
    out->Gauge("fp8kvd_pages_reserved", "Of the free pages, those promised to sequences.",
               static_cast<double>(pool.pages_reserved), group);
    out->Count("fp8kvd_page_evictions_total",
               "Pages that sequences gave up because a sliding window had passed them.",
               pool.page_evictions_total, group);
  }
  out->Gauge("fp8kvd_draining", "1 once SIGTERM was seen.", stats.draining ? 1 : 0);
}

void AddModels(const engine::EngineStats& stats, const MetricLabels& labels, Families* out) {
  for (size_t i = 0; i < stats.models.size(); ++i) {
    const engine::ModelStats& model = stats.models[i];
    const Labels name = {{"model", labels.models[i].name}};
    out->Count("fp8kvd_decode_requests_total", "Decodes of one layer.", model.decode_requests_total,
               name);
    out->Count("fp8kvd_decode_rows_total", "Their rows.", model.decode_rows_total, name);
    out->Count("fp8kvd_kv_read_bytes_total", "Bytes of K and V read, as stored.",
               model.kv_bytes_read_total, name);
    out->Count("fp8kvd_kv_bf16_read_bytes_total", "What bf16 would have read for the same rows.",
               model.kv_bf16_bytes_read_total, name);
    out->Observe("fp8kvd_context_tokens", "Keys that a row's last query sees.",
                 model.context_tokens, 1, name);
  }
}

// As many series as are configured, whatever tokens clients bring.
void AddTenants(const engine::EngineStats& stats, const MetricLabels& labels, Families* out) {
  for (size_t i = 0; i < stats.tenants.size(); ++i) {
    const engine::TenantStats& tenant = stats.tenants[i];
    const Labels name = {{"tenant", i < labels.tenants.size() ? labels.tenants[i] : "default"}};
    out->Gauge("fp8kvd_tenant_seqs", "Live sequences of a tenant.",
               static_cast<double>(tenant.seqs), name);
    out->Gauge("fp8kvd_tenant_queue_items", "Its items taken and not yet answered.",
               static_cast<double>(tenant.queue_items), name);
    out->Count("fp8kvd_tenant_rows_total", "Its decode rows.", tenant.decode_rows_total, name);
    out->Count("fp8kvd_tenant_kv_read_bytes_total", "Bytes of K and V read for it, as stored.",
               tenant.kv_bytes_read_total, name);
    out->Count("fp8kvd_tenant_requests_refused_total", "Its requests not taken: it was at a bound.",
               tenant.requests_refused_total, name);
    for (const engine::PoolStats& pool : tenant.pools) {
      for (const auto& [state, pages] :
           {std::pair("used", pool.pages_used), std::pair("free", pool.pages_free)}) {
        out->Gauge("fp8kvd_tenant_pages", "Pages that a tenant holds, and may still hold.",
                   static_cast<double>(pages),
                   {{"tenant", name[0].value},
                    {"model", labels.models[pool.model].name},
                    {"group", std::to_string(pool.group)},
                    {"state", state}});
      }
    }
  }
}

void AddSharedMemory(const SharedMemoryStats& stats, Families* out) {
  out->Gauge("fp8kvd_shm_sessions", "Sessions of the same-host transport.",
             static_cast<double>(stats.sessions));
  out->Gauge("fp8kvd_shm_bytes", "Bytes of their shared memory.", static_cast<double>(stats.bytes));
  out->Count("fp8kvd_shm_sessions_opened_total", "Sessions opened.", stats.opened_total);
  out->Count("fp8kvd_shm_sessions_refused_total", "Sessions that a quota had no room for.",
             stats.refused_total);
  out->Count("fp8kvd_shm_sessions_broken_total", "Sessions ended because their client lied.",
             stats.ended_for_lies_total);
}

void AddSnapshots(const SnapshotStats& stats, Families* out) {
  out->Gauge("fp8kvd_snapshot_restored_seqs", "Sequences that the start restored.",
             static_cast<double>(stats.restored.seqs));
  out->Gauge("fp8kvd_snapshot_restored_bytes", "Bytes of their pages.",
             static_cast<double>(stats.restored.bytes));
  out->Gauge("fp8kvd_snapshot_restore_seconds", "How long that took.",
             static_cast<double>(stats.restored.took_us) * kMicro);
  out->Gauge("fp8kvd_snapshot_refused",
             "1 if the start found a snapshot that it could not restore.",
             stats.is_refused ? 1 : 0);
  out->Gauge("fp8kvd_snapshot_written_bytes",
             "Bytes saved so far, while the drain saves sequences.",
             static_cast<double>(stats.written_bytes));
}

void AddGpuReading(const std::string& device, const GpuReading& gpu, Families* out) {
  out->Gauge("fp8kvd_gpu_memory_bytes", "Memory of the GPU, whoever uses it.",
             static_cast<double>(gpu.memory_bytes_used), {{"device", device}, {"state", "used"}});
  out->Gauge("fp8kvd_gpu_memory_bytes", "", static_cast<double>(gpu.memory_bytes_free),
             {{"device", device}, {"state", "free"}});
  out->Gauge("fp8kvd_gpu_utilization_ratio",
             "Part of the driver's last sample period in which a kernel ran.", gpu.busy_ratio,
             {{"device", device}});
}

// As many series as there are devices, models and groups.
void AddDevice(const engine::EngineStats& stats, const MetricLabels::Device& device,
               const MetricLabels& labels, Families* out) {
  const Labels name = {{"device", device.name}};
  out->Gauge("fp8kvd_device_info", "A device and what it is. Always 1.", 1,
             {{"device", device.name}, {"device_name", device.model}});
  out->Gauge("fp8kvd_device_seqs", "Live sequences on a device.", static_cast<double>(stats.seqs),
             name);
  out->Gauge("fp8kvd_device_queue_items", "Its items taken and not yet answered.",
             static_cast<double>(stats.queue_items), name);
  out->Gauge("fp8kvd_device_launches_inflight", "Its launches that are not finished.",
             static_cast<double>(stats.launches_inflight), name);
  for (const auto& [kind, launches] : {std::pair("decode", stats.decode_launches_total),
                                       std::pair("append", stats.append_launches_total)}) {
    out->Count("fp8kvd_device_launches_total", "Launches on a device.",
               static_cast<double>(launches), {{"device", device.name}, {"kind", kind}});
  }
  out->Count("fp8kvd_device_rows_total", "Decode rows launched on a device.",
             static_cast<double>(stats.rows_total), name);
  out->Observe("fp8kvd_device_kernel_seconds",
               "From a launch on a device until its fence was seen.", stats.kernel_us, kMicro,
               name);
  for (const engine::PoolStats& pool : stats.pools) {
    for (const auto& [state, pages] :
         {std::pair("used", pool.pages_used), std::pair("free", pool.pages_free)}) {
      out->Gauge("fp8kvd_device_pages", "Pages of a layer group's pool on a device.",
                 static_cast<double>(pages),
                 {{"device", device.name},
                  {"model", labels.models[static_cast<size_t>(pool.model)].name},
                  {"group", std::to_string(pool.group)},
                  {"state", state}});
    }
  }
}

void AddLoad(const MetricLabels& labels, const std::function<LoadSample(int32_t)>& load,
             Families* out) {
  for (size_t i = 0; i < labels.models.size(); ++i) {
    const LoadSample sample = load(static_cast<int32_t>(i));
    const Labels name = {{"model", labels.models[i].name}};
    out->Gauge("fp8kvd_cache_share_ratio",
               "Of a bf16 step's bytes, those of K and V; by the latest window's load.",
               sample.cache_share, name);
    out->Gauge("fp8kvd_step_seqs", "Sequences in a step of the latest window, on average.",
               sample.batch, name);
    out->Gauge("fp8kvd_step_seq_tokens", "Tokens of those sequences, on average.", sample.tokens,
               name);
  }
}

}  // namespace

MethodMetrics* Metrics::Method(const std::string& name) {
  for (const std::unique_ptr<MethodMetrics>& method : methods_) {
    if (method->name_ == name) return method.get();
  }
  methods_.push_back(std::make_unique<MethodMetrics>());
  methods_.back()->name_ = name;
  return methods_.back().get();
}

void Metrics::SetEngines(MetricLabels labels,
                         std::function<std::vector<engine::EngineStats>()> stats,
                         std::function<LoadSample(int32_t model)> load) {
  labels_ = std::move(labels);
  stats_ = std::move(stats);
  load_ = std::move(load);
}

void Metrics::SetSharedMemory(std::function<SharedMemoryStats()> stats) {
  shared_memory_ = std::move(stats);
}

void Metrics::SetSnapshots(std::function<SnapshotStats()> stats) { snapshots_ = std::move(stats); }

CallTotals Metrics::Calls() const {
  CallTotals totals;
  for (const std::unique_ptr<MethodMetrics>& method : methods_) {
    totals.received_bytes += method->received_bytes_.load(std::memory_order_relaxed);
    totals.sent_bytes += method->sent_bytes_.load(std::memory_order_relaxed);
    LatencyCounts all;
    for (const LatencyHistogram& of_code : method->by_code_) of_code.AddTo(&all);
    LatencyCounts answered;
    method->by_code_[0].AddTo(&answered);
    totals.calls += all.count;
    totals.calls_failed += all.count - std::min(all.count, answered.count);
    if (method->name_ == "Decode") totals.decode = answered;
  }
  return totals;
}

std::string Metrics::Scrape() const {
  Families families;
  for (const std::unique_ptr<MethodMetrics>& method : methods_) {
    const Labels name = {{"method", method->name_}};
    for (size_t code = 0; code < MethodMetrics::kCodes; ++code) {
      LatencyCounts counts;
      method->by_code_[code].AddTo(&counts);
      if (counts.count == 0) continue;
      const Labels labels = {{"method", method->name_}, {"code", kCodeNames[code]}};
      families.Count("fp8kvd_calls_total", "Calls and streams that ended.", counts.count, labels);
      families.Observe("fp8kvd_call_seconds", "From a call's arrival to its status.", counts,
                       labels);
    }
    const uint64_t received = method->received_bytes_.load(std::memory_order_relaxed);
    const uint64_t sent = method->sent_bytes_.load(std::memory_order_relaxed);
    if (received == 0 && sent == 0) continue;
    families.Count("fp8kvd_call_received_bytes_total", "Bytes of messages received.", received,
                   name);
    families.Count("fp8kvd_call_sent_bytes_total", "Bytes of messages sent.", sent, name);
  }
  if (stats_ != nullptr) {
    const std::vector<engine::EngineStats> devices = stats_();
    const engine::EngineStats stats = engine::SumOf(devices);
    AddIdentity(labels_, &families);
    AddState(stats, labels_, &families);
    AddTenants(stats, labels_, &families);
    AddRequests(stats, &families);
    AddWork(stats, &families);
    AddModels(stats, labels_, &families);
    AddLoad(labels_, load_, &families);
    for (size_t i = 0; i < devices.size() && i < labels_.devices.size(); ++i) {
      AddDevice(devices[i], labels_.devices[i], labels_, &families);
    }
  }
  for (const auto& [device, nvml] : gpus_) {
    const absl::StatusOr<GpuReading> gpu = nvml->Read();
    if (gpu.ok()) AddGpuReading(device, *gpu, &families);
  }
  if (shared_memory_ != nullptr) AddSharedMemory(shared_memory_(), &families);
  if (snapshots_ != nullptr) AddSnapshots(snapshots_(), &families);
  return families.Text();
}

}  // namespace fp8kvd::ops
