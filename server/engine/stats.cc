#include "server/engine/stats.h"

#include <algorithm>

namespace fp8kvd::engine {
namespace {

template <typename T, size_t kCount>
void Add(const std::array<T, kCount>& from, std::array<T, kCount>* to) {
  for (size_t i = 0; i < kCount; ++i) (*to)[i] += from[i];
}

void Add(const Histogram& from, Histogram* to) {
  Add(from.counts, &to->counts);
  to->count += from.count;
  to->sum += from.sum;
}

void Add(const ModelStats& from, ModelStats* to) {
  to->seqs += from.seqs;
  to->decode_requests_total += from.decode_requests_total;
  to->decode_rows_total += from.decode_rows_total;
  to->seq_tokens_total += from.seq_tokens_total;
  to->kv_bytes_read_total += from.kv_bytes_read_total;
  to->kv_bf16_bytes_read_total += from.kv_bf16_bytes_read_total;
  Add(from.context_tokens, &to->context_tokens);
}

void Add(const PoolStats& from, PoolStats* to) {
  to->pages_total += from.pages_total;
  to->pages_used += from.pages_used;
  to->pages_free += from.pages_free;
  to->pages_reserved += from.pages_reserved;
  to->page_evictions_total += from.page_evictions_total;
}

void Add(const TenantStats& from, TenantStats* to) {
  // Every device tells these of all.
  to->requests_refused_total = std::max(to->requests_refused_total, from.requests_refused_total);
  to->queue_items = std::max(to->queue_items, from.queue_items);
  to->decode_rows_total += from.decode_rows_total;
  to->kv_bytes_read_total += from.kv_bytes_read_total;
  to->seqs += from.seqs;
  for (size_t i = 0; i < from.pools.size(); ++i) Add(from.pools[i], &to->pools[i]);
}

template <typename T>
void AddEach(const std::vector<T>& from, std::vector<T>* to) {
  for (size_t i = 0; i < from.size(); ++i) Add(from[i], &(*to)[i]);
}

void AddCounts(const EngineStats& from, EngineStats* to) {
  Add(from.requests_taken_total, &to->requests_taken_total);
  Add(from.requests_answered_total, &to->requests_answered_total);
  Add(from.requests_failed_total, &to->requests_failed_total);
  to->requests_refused_total += from.requests_refused_total;
  to->requests_late_total += from.requests_late_total;
  to->requests_cancelled_total += from.requests_cancelled_total;
  to->items_failed_total += from.items_failed_total;
  to->decode_launches_total += from.decode_launches_total;
  to->append_launches_total += from.append_launches_total;
  to->rows_total += from.rows_total;
  to->query_tokens_total += from.query_tokens_total;
  to->append_tokens_total += from.append_tokens_total;
  to->append_bytes_total += from.append_bytes_total;
  to->append_slices_total += from.append_slices_total;
  to->replays_total += from.replays_total;
  to->page_copies_total += from.page_copies_total;
  to->forks_total += from.forks_total;
  to->lease_expiries_total += from.lease_expiries_total;
  to->device_allocations_total += from.device_allocations_total;
}

void AddNow(const EngineStats& from, EngineStats* to) {
  to->queue_items += from.queue_items;
  to->launches_inflight += from.launches_inflight;
  to->seqs += from.seqs;
  to->staging_slots_used += from.staging_slots_used;
  to->staging_slots_total += from.staging_slots_total;
  to->draining |= from.draining;
  to->failed |= from.failed;
}

}  // namespace

EngineStats SumOf(absl::Span<const EngineStats> devices) {
  EngineStats sum = devices.front();
  for (const EngineStats& device : devices.subspan(1)) {
    AddCounts(device, &sum);
    Add(device.batch_rows, &sum.batch_rows);
    Add(device.stage_us, &sum.stage_us);
    Add(device.queue_us, &sum.queue_us);
    Add(device.kernel_us, &sum.kernel_us);
    Add(device.reply_us, &sum.reply_us);
    Add(device.append_queue_us, &sum.append_queue_us);
    AddNow(device, &sum);
    AddEach(device.models, &sum.models);
    AddEach(device.pools, &sum.pools);
    AddEach(device.tenants, &sum.tenants);
  }
  sum.draining &= !sum.failed;
  return sum;
}

}  // namespace fp8kvd::engine
