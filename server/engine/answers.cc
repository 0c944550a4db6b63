#include "server/engine/answers.h"

#include "config/base/check.h"

namespace fp8kvd::engine {
namespace {

void Fill(const cache::PoolStat& now, PoolStats* pool) {
  pool->pages_total = now.pages_total;
  pool->pages_used = now.pages_used;
  pool->pages_free = now.pages_free;
  pool->pages_reserved = now.pages_reserved;
  pool->page_evictions_total = static_cast<uint64_t>(now.evictions_total);
}

}  // namespace

Answers::Answers(const StepContext& context, Admission* admission)
    : context_(context), admission_(admission), published_(context.stats) {}

void Answers::CloseItem(DecodeRequest* request, DecodeItem* item) {
  item->stage = DecodeItem::Stage::kAnswered;
  context_.store.Unhold(item->seq);
  if (!item->status.ok()) ++context_.stats.items_failed_total;
  if (request->book.waiting == 0 && request->book.running == 0) End(request);
}

void Answers::EndWaiting(Request* request, const absl::Status& status) {
  const bool was_running = request->book.running > 0;
  switch (request->kind) {
    case Request::Kind::kDecode: {
      DecodeRequest* const decode = static_cast<DecodeRequest*>(request);
      if (decode->batch_items == 0) decode->status = status;  // no item of it ever ran
      for (DecodeItem& item : decode->items) {
        if (item.stage != DecodeItem::Stage::kWaiting) continue;
        item.stage = DecodeItem::Stage::kAnswered;
        item.status = status;
        context_.store.Unhold(item.seq);
        ++context_.stats.items_failed_total;
      }
      decode->book.waiting = 0;
      if (!was_running) End(decode);
      break;
    }
    case Request::Kind::kAppend:
      request->status = status;
      request->book.waiting = 0;
      NoteLengths(static_cast<AppendRequest*>(request));
      if (!was_running) EndAppend(static_cast<AppendRequest*>(request));
      break;
    case Request::Kind::kControl:
      request->status = status;
      EndControl(static_cast<ControlRequest*>(request));
      break;
  }
}

void Answers::NoteLengths(AppendRequest* request) const {
  for (size_t i = 0; request->is_held && i < request->seq_lens.size(); ++i) {
    request->seq_lens[i] =
        context_.store.SeqLen(request->seq, request->layer + static_cast<int32_t>(i));
  }
}

void Answers::EndAppend(AppendRequest* request) {
  if (request->is_held) context_.store.Unhold(request->seq);
  request->is_held = false;
  End(request);
}

void Answers::EndControl(ControlRequest* request) {
  for (const cache::SeqIndex seq : request->held) context_.store.Unhold(seq);
  request->held.clear();
  End(request);
}

void Answers::EndAfterFault(Request* request, const absl::Status& status) {
  request->status = status;
  End(request);
}

void Answers::End(Request* request) {
  const size_t kind = static_cast<size_t>(request->kind);
  ++context_.stats.requests_answered_total[kind];
  if (!request->status.ok()) ++context_.stats.requests_failed_total[kind];
  admission_->GiveBack(*request);
  request->book.next = nullptr;
  *ended_tail_ = request;
  ended_tail_ = &request->book.next;
}

void Answers::Tell() {
  Publish();
  Request* request = ended_;
  ended_ = nullptr;
  ended_tail_ = &ended_;
  while (request != nullptr) {
    Request* const next = request->book.next;  // the call may be gone once it was told
    request->done->Done();
    request = next;
  }
}

void Answers::Publish() {
  EngineStats& stats = context_.stats;
  stats.requests_refused_total = admission_->refused_total();
  stats.queue_items = admission_->places_used();
  stats.device_allocations_total = context_.backend.allocations();
  stats.draining = admission_->is_refusing() && !stats.failed;
  stats.seqs = context_.store.seqs_used();
  for (size_t i = 0; i < stats.models.size(); ++i) {
    stats.models[i].seqs = context_.store.seqs_of_model(static_cast<int32_t>(i));
  }
  for (PoolStats& pool : stats.pools) Fill(context_.store.Pool(pool.model, pool.group), &pool);
  for (size_t i = 0; i < stats.tenants.size(); ++i) {
    const auto id = static_cast<cache::TenantId>(i);
    TenantStats& tenant = stats.tenants[i];
    tenant.requests_refused_total = admission_->refused_total(id);
    tenant.queue_items = admission_->places_used(id);
    tenant.seqs = context_.store.seqs_used(id);
    for (PoolStats& pool : tenant.pools) {
      Fill(context_.store.Pool(pool.model, pool.group, id), &pool);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  published_ = stats;
}

EngineStats Answers::Published() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return published_;
}

}  // namespace fp8kvd::engine
