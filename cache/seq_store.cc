#include "cache/seq_store.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"

namespace fp8kvd::cache {

absl::StatusOr<std::unique_ptr<SeqStore>> SeqStore::Make(StoreOptions options) {
  absl::Status status = CheckOptions(options);
  if (!status.ok()) return status;
  return std::unique_ptr<SeqStore>(new SeqStore(std::move(options)));
}

SeqStore::SeqStore(StoreOptions options)
    : options_(std::move(options)),
      seqs_(static_cast<size_t>(options_.seqs_max)),
      leases_(options_.seqs_max),
      tenant_seqs_(options_.tenants.size(), 0),
      model_seqs_(options_.models.size(), 0) {
  for (int32_t i = 0; i < options_.seqs_max; ++i) free_.push_back(static_cast<uint32_t>(i));
  const auto model_count = static_cast<int32_t>(options_.models.size());
  for (int32_t m = 0; m < model_count; ++m) {
    const ModelOptions& model_options = options_.models[static_cast<size_t>(m)];
    ModelPools& model = models_.emplace_back();
    for (const GroupOptions& group : model_options.groups) {
      const auto g = static_cast<int32_t>(model.pools.size());
      for (size_t i = 0; i < group.layers.size(); ++i) {
        const auto layer = static_cast<size_t>(group.layers[i]);
        if (model.places.size() <= layer) model.places.resize(layer + 1);
        model.places[layer] = {.group = g, .group_layer = static_cast<int32_t>(i)};
      }
      model.shapes.push_back({.page_tokens = options_.page_tokens,
                              .window = group.window,
                              .reclaim_slack_tokens = options_.reclaim_slack_tokens,
                              .seq_len_max = options_.seq_len_max});
      std::function<void(PageId)> on_page_freed;
      if (options_.on_page_freed) {
        on_page_freed = [this, m, g](PageId page_id) { options_.on_page_freed(m, g, page_id); };
      }
      model.pools.push_back(
          std::make_unique<PagePool>(group.pages_total, std::move(on_page_freed)));
      model.tenants.emplace_back(options_.tenants.size());
    }
  }
  SetPages();
  const auto pages_max = static_cast<size_t>(options_.seq_len_max / options_.page_tokens + 2);
  copies_.reserve(pages_max);
  edits_.reserve(pages_max);
  page_ids_.reserve(pages_max);
}

SeqStore::Seq& SeqStore::At(SeqIndex seq) {
  const auto index = static_cast<size_t>(seq);
  FP8KVD_CHECK(index < seqs_.size() && seqs_[index].occupied);
  return seqs_[index];
}

const SeqStore::Seq& SeqStore::At(SeqIndex seq) const {
  const auto index = static_cast<size_t>(seq);
  FP8KVD_CHECK(index < seqs_.size() && seqs_[index].occupied);
  return seqs_[index];
}

bool SeqStore::Occupied(SeqIndex seq) const {
  const auto index = static_cast<size_t>(seq);
  return index < seqs_.size() && seqs_[index].occupied;
}

SeqStore::Place SeqStore::PlaceOf(const Seq& seq, int32_t layer) const {
  return models_[static_cast<size_t>(seq.model)].places[static_cast<size_t>(layer)];
}

const BlockTable::Shape& SeqStore::Shape(const Seq& seq, Place place) const {
  return models_[static_cast<size_t>(seq.model)].shapes[static_cast<size_t>(place.group)];
}

PagePool& SeqStore::MutablePool(int32_t model, int32_t group) const {
  return *models_[static_cast<size_t>(model)].pools[static_cast<size_t>(group)];
}

const PagePool& SeqStore::PagesOf(int32_t model, int32_t group) const {
  return MutablePool(model, group);
}

void SeqStore::SeqGroup::FindSlowest() {
  seq_len_min = *std::min_element(seq_lens.begin(), seq_lens.end());
  slowest_layers = static_cast<int32_t>(std::count(seq_lens.begin(), seq_lens.end(), seq_len_min));
}

void SeqStore::SeqGroup::SetSeqLen(size_t group_layer, int64_t seq_len) {
  const bool was_slowest = seq_lens[group_layer] == seq_len_min;
  seq_lens[group_layer] = seq_len;
  if (was_slowest && --slowest_layers == 0) FindSlowest();  // once a token of all layers
}

absl::Status SeqStore::CheckLive(const Seq& seq) const {
  if (!seq.freed) return absl::OkStatus();
  return absl::NotFoundError("the sequence has been freed; create it anew");
}

absl::Status SeqStore::CheckLayer(const Seq& seq, int32_t layer) const {
  const size_t layers = models_[static_cast<size_t>(seq.model)].places.size();
  if (layer >= 0 && static_cast<size_t>(layer) < layers) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("layer ", layer, " asked; the model has layers 0 to ", layers - 1));
}

absl::Status SeqStore::CheckNew(int64_t expected_tokens, int64_t ttl_ms, TenantId tenant,
                                size_t count) const {
  if (expected_tokens < 0 || expected_tokens > options_.seq_len_max) {
    return absl::InvalidArgumentError(absl::StrCat("expected_tokens is ", expected_tokens,
                                                   "; it may be 0 (no reservation) to ",
                                                   options_.seq_len_max));
  }
  if (ttl_ms < 1 || ttl_ms > kLeaseTtlMsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("ttl_ms is ", ttl_ms, "; it may be 1 to ", kLeaseTtlMsMax));
  }
  const auto t = static_cast<size_t>(tenant);
  const int32_t seqs_max = std::min(options_.tenants[t].seqs_max, options_.seqs_max);
  const int32_t seqs_left =
      std::max(0, std::min(seqs_max - tenant_seqs_[t], options_.seqs_max - seqs_used_));
  if (count > static_cast<size_t>(seqs_left)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(count, " sequences asked, ", seqs_left, " of ", seqs_max,
                     " are left; free sequences, or retry when leases have ended"));
  }
  return absl::OkStatus();
}

absl::Status SeqStore::CheckRoom(int32_t model, int32_t group, TenantId tenant,
                                 int64_t pages_needed) const {
  const TenantPages& pages = PagesOfTenant(model, group, tenant);
  const int64_t pages_left = pages.Left(PagesOf(model, group));
  if (pages_needed <= 0 || pages_needed <= pages_left) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      pages_needed, " pages to reserve in layer group ", group, ", ", pages_left, " of ", pages.max,
      " are left; expect fewer tokens, free sequences, or retry later"));
}

// Tables for a model, unless the index has them.
void SeqStore::MakeGroups(Seq* seq, int32_t model) const {
  if (seq->model == model) return;
  seq->groups.clear();
  const ModelPools& shape = models_[static_cast<size_t>(model)];
  for (size_t g = 0; g < shape.pools.size(); ++g) {
    const size_t layers = options_.models[static_cast<size_t>(model)].groups[g].layers.size();
    seq->groups.push_back(
        {.table = BlockTable(shape.shapes[g], shape.pools[g].get()),
         .seq_lens = std::vector<int64_t>(layers, 0),
         .replays = std::vector<ReplayWindow>(layers, ReplayWindow(options_.replay_digests_max)),
         .slowest_layers = static_cast<int32_t>(layers)});
  }
  seq->model = model;
}

SeqHandle SeqStore::TakeIndex(const CreateArgs& args, int64_t now_ms) {
  const uint32_t index = free_[free_head_];
  free_head_ = (free_head_ + 1) % free_.size();
  ++seqs_used_;
  ++tenant_seqs_[static_cast<size_t>(args.tenant)];
  ++model_seqs_[static_cast<size_t>(args.model)];
  Seq& seq = seqs_[index];
  MakeGroups(&seq, args.model);
  seq.tenant = args.tenant;
  ++seq.generation;
  if (seq.generation == 0) ++seq.generation;  // 0 means none, also after 2^32 uses of the index
  seq.occupied = true;
  seq.expected_tokens = args.expected_tokens;
  seq.ttl_ms = args.ttl_ms;
  seq.lease_end_ms = now_ms + args.ttl_ms;
  leases_.Set(static_cast<SeqIndex>(index), seq.lease_end_ms);
  return Handle(static_cast<SeqIndex>(index));
}

absl::Status SeqStore::Create(const CreateArgs& args, int64_t now_ms,
                              absl::Span<SeqHandle> handles) {
  FP8KVD_CHECK(!plan_open_);
  if (args.model < 0 || static_cast<size_t>(args.model) >= models_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model ", args.model, " asked; models are 0 to ", models_.size() - 1));
  }
  absl::Status status = CheckNew(args.expected_tokens, args.ttl_ms, args.tenant, handles.size());
  const ModelPools& model = models_[static_cast<size_t>(args.model)];
  for (size_t g = 0; status.ok() && g < model.pools.size(); ++g) {
    const int64_t pages = BlockTable::ClaimsOfEmpty(model.shapes[g], args.expected_tokens);
    status = CheckRoom(args.model, static_cast<int32_t>(g), args.tenant,
                       pages * static_cast<int64_t>(handles.size()));
  }
  if (!status.ok()) return status;
  for (SeqHandle& handle : handles) {
    handle = TakeIndex(args, now_ms);
    Seq& seq = At(static_cast<SeqIndex>(handle.seq_id));
    for (size_t g = 0; g < seq.groups.size(); ++g) {
      const Charge charge = ChargeOf(seq, g);
      seq.groups[g].table.Start(args.expected_tokens);
    }
  }
  return absl::OkStatus();
}

absl::Status SeqStore::Fork(SeqIndex parent_index, const ForkArgs& args, int64_t now_ms,
                            absl::Span<SeqHandle> handles) {
  FP8KVD_CHECK(!plan_open_);
  const Seq& parent = At(parent_index);
  absl::Status status = CheckLive(parent);
  if (status.ok()) {
    status = CheckNew(args.expected_tokens, args.ttl_ms, parent.tenant, handles.size());
  }
  for (size_t g = 0; status.ok() && g < parent.groups.size(); ++g) {
    const SeqGroup& group = parent.groups[g];
    status = CheckRoom(parent.model, static_cast<int32_t>(g), parent.tenant,
                       group.table.ShareNeed(static_cast<int64_t>(handles.size()),
                                             args.expected_tokens, group.seq_len_min));
  }
  if (!status.ok()) return status;
  for (SeqHandle& handle : handles) {
    handle = TakeIndex({.model = parent.model,
                        .expected_tokens = args.expected_tokens,
                        .ttl_ms = args.ttl_ms,
                        .tenant = parent.tenant},
                       now_ms);
    Seq& child = At(static_cast<SeqIndex>(handle.seq_id));
    child.parent = Handle(parent_index);
    for (size_t g = 0; g < parent.groups.size(); ++g) {
      const SeqGroup& from = parent.groups[g];
      SeqGroup& to = child.groups[g];
      to.seq_lens = from.seq_lens;
      to.first_pos = from.first_pos;
      to.FindSlowest();
      for (size_t i = 0; i < from.replays.size(); ++i) to.replays[i].CopyFrom(from.replays[i]);
      const Charge charge = ChargeOf(child, g);
      to.table.ShareFrom(from.table, args.expected_tokens, from.seq_len_min);
    }
  }
  return absl::OkStatus();
}

absl::Status SeqStore::Truncate(SeqIndex seq_index, int64_t pos) {
  FP8KVD_CHECK(!plan_open_);
  Seq& seq = At(seq_index);
  absl::Status status = CheckLive(seq);
  if (!status.ok()) return status;
  if (pos < 0) {
    return absl::InvalidArgumentError(absl::StrCat("truncate to ", pos, ": positions begin at 0"));
  }
  int64_t lowest = 0;
  for (const SeqGroup& group : seq.groups) lowest = std::max(lowest, group.first_pos);
  if (pos < lowest) {
    return absl::FailedPreconditionError(absl::StrCat(
        "truncate to ", pos, ": a windowed layer has reclaimed its tokens before ", lowest,
        "; the lowest position possible is ", lowest, "; or create the sequence anew"));
  }
  for (size_t g = 0; status.ok() && g < seq.groups.size(); ++g) {
    const SeqGroup& group = seq.groups[g];
    status = CheckRoom(seq.model, static_cast<int32_t>(g), seq.tenant,
                       group.table.TruncateNeed(pos, std::min(pos, group.seq_len_min)));
  }
  if (!status.ok()) return status;
  for (size_t g = 0; g < seq.groups.size(); ++g) {
    SeqGroup& group = seq.groups[g];
    const Charge charge = ChargeOf(seq, g);
    for (int64_t& seq_len : group.seq_lens) seq_len = std::min(seq_len, pos);
    group.FindSlowest();
    for (ReplayWindow& replay : group.replays) replay.Truncate(pos);
    group.table.Truncate(pos, group.seq_len_min);
  }
  return absl::OkStatus();
}

void SeqStore::Free(SeqIndex seq_index) {
  FP8KVD_CHECK(!plan_open_);
  Seq& seq = At(seq_index);
  if (seq.freed) return;
  seq.freed = true;
  leases_.Remove(seq_index);
  if (seq.holds == 0) Release(seq_index);
}

void SeqStore::Release(SeqIndex seq_index) {
  Seq& seq = At(seq_index);
  for (size_t g = 0; g < seq.groups.size(); ++g) {
    SeqGroup& group = seq.groups[g];
    const Charge charge = ChargeOf(seq, g);
    group.table.Clear();
    std::fill(group.seq_lens.begin(), group.seq_lens.end(), 0);
    group.FindSlowest();
    for (ReplayWindow& replay : group.replays) replay.Clear();
    group.first_pos = 0;
  }
  seq.occupied = false;
  seq.freed = false;
  seq.lease_parked = false;
  seq.parent = {};
  --seqs_used_;
  --tenant_seqs_[static_cast<size_t>(seq.tenant)];
  --model_seqs_[static_cast<size_t>(seq.model)];
  const size_t tail = free_head_ + free_.size() - static_cast<size_t>(seqs_used_) - 1;
  free_[tail % free_.size()] = static_cast<uint32_t>(seq_index);
}

absl::StatusOr<SeqIndex> SeqStore::Find(const SeqHandle& handle, TenantId tenant) const {
  const auto index = static_cast<uint64_t>(handle.seq_id);
  if (handle.incarnation == options_.incarnation && handle.home == options_.home &&
      index < seqs_.size()) {
    const Seq& seq = seqs_[index];
    if (seq.occupied && !seq.freed && seq.generation == handle.generation && seq.tenant == tenant) {
      return static_cast<SeqIndex>(index);
    }
  }
  // One text for every cause: it tells nothing about other sequences.
  return absl::NotFoundError(
      "no sequence has this handle: it was freed, its lease ended, or another run of the daemon "
      "made it; create it anew");
}

SeqHandle SeqStore::Handle(SeqIndex seq) const {
  return {.seq_id = static_cast<SeqId>(seq),
          .generation = At(seq).generation,
          .home = options_.home,
          .incarnation = options_.incarnation};
}

void SeqStore::Renew(SeqIndex seq_index, int64_t now_ms) {
  Seq& seq = At(seq_index);
  if (seq.freed) return;
  seq.lease_end_ms = now_ms + seq.ttl_ms;
  if (!seq.lease_parked) leases_.Set(seq_index, seq.lease_end_ms);
}

absl::Status SeqStore::SetTtl(SeqIndex seq_index, int64_t ttl_ms, int64_t now_ms) {
  absl::Status status = CheckNew(0, ttl_ms, At(seq_index).tenant, 0);
  if (!status.ok()) return status;
  At(seq_index).ttl_ms = ttl_ms;
  Renew(seq_index, now_ms);
  return absl::OkStatus();
}

void SeqStore::Hold(SeqIndex seq) { ++At(seq).holds; }

void SeqStore::Unhold(SeqIndex seq_index) {
  FP8KVD_CHECK(!plan_open_);
  Seq& seq = At(seq_index);
  FP8KVD_CHECK(seq.holds > 0);
  if (--seq.holds > 0) return;
  if (seq.freed) {
    Release(seq_index);
  } else if (seq.lease_parked) {
    seq.lease_parked = false;
    leases_.Set(seq_index, seq.lease_end_ms);
  }
}

int32_t SeqStore::Expire(int64_t now_ms, absl::Span<SeqHandle> handles) {
  FP8KVD_CHECK(!plan_open_);
  auto steps_left = static_cast<int32_t>(handles.size());
  int32_t freed = 0;
  SeqIndex seq_index{0};
  while (leases_.PopEnded(now_ms, &steps_left, &seq_index)) {
    Seq& seq = At(seq_index);
    if (seq.holds > 0) {
      seq.lease_parked = true;  // Unhold queues it again
      continue;
    }
    handles[static_cast<size_t>(freed++)] = Handle(seq_index);
    Free(seq_index);
  }
  return freed;
}

absl::Status SeqStore::CheckVisible(SeqIndex seq_index, int32_t layer, int64_t pos,
                                    int32_t q_len) const {
  const Seq& seq = At(seq_index);
  absl::Status status = CheckLayer(seq, layer);
  if (!status.ok()) return status;
  const Place place = PlaceOf(seq, layer);
  const SeqGroup& group = seq.groups[static_cast<size_t>(place.group)];
  if (q_len < 1 || pos < 0) {
    return absl::InvalidArgumentError(absl::StrCat("query at ", pos, " with q_len ", q_len,
                                                   " in layer ", layer,
                                                   ": positions begin at 0, and q_len at 1"));
  }
  const int64_t seq_len = group.seq_lens[static_cast<size_t>(place.group_layer)];
  if (pos > seq_len - q_len) {
    return absl::OutOfRangeError(absl::StrCat("query at ", pos, " with q_len ", q_len, " in layer ",
                                              layer, ": the layer's seq_len is ", seq_len,
                                              "; append the tokens first"));
  }
  return CheckWindow(seq, place, layer, pos);
}

absl::Status SeqStore::CheckWindow(const Seq& seq, Place place, int32_t layer, int64_t pos) const {
  const SeqGroup& group = seq.groups[static_cast<size_t>(place.group)];
  const int64_t key_min = std::max<int64_t>(0, pos - Shape(seq, place).window + 1);
  if (key_min < group.first_pos) {
    return absl::FailedPreconditionError(absl::StrCat(
        "query at ", pos, " in layer ", layer, ": its window begins at ", key_min,
        ", and tokens before ", group.first_pos, " are reclaimed; the lowest position possible is ",
        group.first_pos + Shape(seq, place).window - 1));
  }
  return absl::OkStatus();
}

absl::Status SeqStore::CheckPlanVisible(const AppendPlan& plan) const {
  FP8KVD_CHECK(plan_open_ && plan.seq == plan_.seq);
  return CheckWindow(At(plan_.seq), {plan_.group, plan_.group_layer}, plan_args_.layer, plan_.pos);
}

int32_t SeqStore::Model(SeqIndex seq) const { return At(seq).model; }
TenantId SeqStore::Tenant(SeqIndex seq) const { return At(seq).tenant; }

int64_t SeqStore::SeqLen(SeqIndex seq_index, int32_t layer) const {
  const Seq& seq = At(seq_index);
  const Place place = PlaceOf(seq, layer);
  return seq.groups[static_cast<size_t>(place.group)]
      .seq_lens[static_cast<size_t>(place.group_layer)];
}

const BlockTable& SeqStore::Table(SeqIndex seq, int32_t group) const {
  return At(seq).groups[static_cast<size_t>(group)].table;
}

SeqStat SeqStore::Stat(SeqIndex seq_index, int64_t now_ms) const {
  const Seq& seq = At(seq_index);
  SeqStat stat;
  stat.model = seq.model;
  const size_t layers = models_[static_cast<size_t>(seq.model)].places.size();
  for (size_t i = 0; i < layers; ++i) {
    stat.seq_lens.push_back(SeqLen(seq_index, static_cast<int32_t>(i)));
  }
  for (size_t g = 0; g < seq.groups.size(); ++g) {
    const PagePool& pool = PagesOf(seq.model, static_cast<int32_t>(g));
    const BlockTable& table = seq.groups[g].table;
    for (PageId page_id : table.pages()) {
      ++(pool.owners(page_id) == 1 ? stat.pages_unique : stat.pages_shared);
    }
    stat.pages_reserved += table.open_claims();
  }
  stat.expected_tokens = seq.expected_tokens;
  stat.ttl_ms = seq.ttl_ms;
  stat.lease_left_ms = std::max<int64_t>(0, seq.lease_end_ms - now_ms);
  stat.parent = seq.parent;
  return stat;
}

int32_t SeqStore::List(int32_t model, TenantId tenant, uint32_t* cursor,
                       absl::Span<SeqHandle> handles) const {
  constexpr uint32_t kScanMax = 65536;
  const uint32_t end =
      std::min<uint32_t>(static_cast<uint32_t>(seqs_.size()),
                         *cursor > UINT32_MAX - kScanMax ? UINT32_MAX : *cursor + kScanMax);
  size_t found = 0;
  for (; *cursor < end && found < handles.size(); ++*cursor) {
    const Seq& seq = seqs_[*cursor];
    if (!seq.occupied || seq.freed || seq.model != model || seq.tenant != tenant) continue;
    handles[found++] = Handle(static_cast<SeqIndex>(*cursor));
  }
  return static_cast<int32_t>(found);
}

PoolStat SeqStore::Pool(int32_t model, int32_t group) const {
  const PagePool& pool = PagesOf(model, group);
  return {.pages_total = pool.pages_total(),
          .pages_used = pool.pages_used(),
          .pages_free = pool.pages_free(),
          .pages_reserved = pool.pages_reserved(),
          .evictions_total = pool.evictions_total()};
}

}  // namespace fp8kvd::cache
