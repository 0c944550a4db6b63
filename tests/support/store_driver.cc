#include "tests/support/store_driver.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cache/audit.h"
#include "config/base/geometry.h"

namespace fp8kvd::cache {

using absl::StatusCode;

StoreOptions StoreDriver::Options() {
  StoreOptions options;
  options.models = {
      {.groups = {{.layers = {0, 2}, .window = 0, .pages_total = 18},
                  {.layers = {1, 3, 4}, .window = 6, .pages_total = 36}}},
      {.groups = {{.layers = {1}, .window = 10, .pages_total = 30},
                  {.layers = {0}, .window = 0, .pages_total = 14}}},
  };
  options.tenants = {{.pages_share_max = 0.8}, {.pages_share_max = 0.6}};
  options.incarnation = 99;
  options.seqs_max = 10;
  options.seq_len_max = 100;
  options.reclaim_slack_tokens = 3;
  options.replay_digests_max = 3;
  options.page_tokens = 4;
  return options;
}

StoreDriver::StoreDriver(Choose choose)
    : choose_(std::move(choose)), options_(Options()), model_(options_), pages_(options_) {
  options_.on_page_freed = [this](int32_t model, int32_t group, PageId page_id) {
    pages_.Poison(model, group, page_id);
  };
  store_ = *SeqStore::Make(options_);
}

std::string StoreDriver::Step() {
  const uint32_t choice = Below(33);
  std::string fault;
  if (choice < 17) {
    fault = Append();
  } else if (choice < 19) {
    fault = Create();
  } else if (choice < 21) {
    fault = Fork();
  } else if (choice < 23) {
    fault = Truncate();
  } else if (choice < 24) {
    fault = Free();
  } else if (choice < 26) {
    fault = HoldOrUnhold();
  } else if (choice < 28) {
    fault = RenewOrSetTtl();
  } else if (choice < 29) {
    fault = Expire();
  } else if (choice < 30) {
    fault = FindStale();
  } else if (choice < 31) {
    fault = Restart();
  } else {
    fault = Visible();
  }
  return fault.empty() ? Compare() : fault;
}

ModelSeq* StoreDriver::AnySeq() {
  if (seqs_.empty()) return nullptr;
  ModelSeq* seq = &seqs_[Below(static_cast<uint32_t>(seqs_.size()))];
  return seq->freed ? nullptr : seq;
}

std::string StoreDriver::Answer(const char* operation, StatusCode got, StatusCode want) {
  ++answers_[absl::StrCat(operation, " ", absl::StatusCodeToString(got))];
  if (got == want) return "";
  return absl::StrCat(operation, " is answered ", absl::StatusCodeToString(got), ", not ",
                      absl::StatusCodeToString(want));
}

int64_t StoreDriver::PagesLeft(int32_t model, int32_t group, TenantId tenant) const {
  const PoolStat pool = store_->Pool(model, group);
  const PoolStat mine = store_->Pool(model, group, tenant);
  return std::min(pool.pages_free - pool.pages_reserved, mine.pages_free - mine.pages_reserved);
}

int64_t StoreDriver::ExpectedTokens() { return Below(2) == 0 ? 0 : 1 + Below(60); }

std::string StoreDriver::Create() {
  const CreateArgs args = {.model = static_cast<int32_t>(Below(2)),
                           .expected_tokens = ExpectedTokens(),
                           .ttl_ms = 1 + Below(200),
                           .tenant = static_cast<TenantId>(Below(2))};
  std::vector<SeqHandle> handles(1 + Below(2));
  const size_t count = handles.size();
  StatusCode want = StatusCode::kOk;
  if (seqs_.size() + count > static_cast<size_t>(options_.seqs_max)) {
    want = StatusCode::kResourceExhausted;
  }
  const auto& groups = options_.models[static_cast<size_t>(args.model)].groups;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t pages = SeqPagesMax(args.expected_tokens, groups[g].window,
                                      options_.reclaim_slack_tokens, options_.page_tokens);
    if (pages > 0 && pages * static_cast<int64_t>(count) >
                         PagesLeft(args.model, static_cast<int32_t>(g), args.tenant)) {
      want = StatusCode::kResourceExhausted;
    }
  }
  const absl::Status got = store_->Create(args, now_ms_, absl::MakeSpan(handles));
  std::string fault = Answer("create", got.code(), want);
  if (!fault.empty() || !got.ok()) return fault;
  for (const SeqHandle& handle : handles) {
    ModelSeq seq = model_.NewSeq(args.model);
    seq.handle = handle;
    seq.index = *store_->Find(handle, args.tenant);
    seq.tenant = args.tenant;
    seq.expected_tokens = args.expected_tokens;
    seq.ttl_ms = args.ttl_ms;
    seq.lease_end_ms = now_ms_ + args.ttl_ms;
    seqs_.push_back(seq);
  }
  return "";
}

std::string StoreDriver::Fork() {
  const ModelSeq* found = AnySeq();
  if (found == nullptr) return "";
  const ModelSeq parent = *found;
  const ForkArgs args = {.expected_tokens = ExpectedTokens(), .ttl_ms = 1 + Below(200)};
  std::vector<SeqHandle> handles(1 + Below(2));
  const auto count = static_cast<int64_t>(handles.size());
  bool room = true;  // for certain: every page of the parent and of its children needs a copy
  for (size_t g = 0; g < parent.gone_before.size(); ++g) {
    const int64_t pages = SeqPagesMax(args.expected_tokens, model_.Group(parent.model, g).window,
                                      options_.reclaim_slack_tokens, options_.page_tokens);
    const auto held =
        static_cast<int64_t>(store_->Table(parent.index, static_cast<int32_t>(g)).pages().size());
    room &= count * pages + held <= PagesLeft(parent.model, static_cast<int32_t>(g), parent.tenant);
  }
  const bool indices = seqs_.size() + handles.size() <= static_cast<size_t>(options_.seqs_max);
  const absl::Status got = store_->Fork(parent.index, args, now_ms_, absl::MakeSpan(handles));
  StatusCode want = indices ? StatusCode::kOk : StatusCode::kResourceExhausted;
  if (indices && !room && !got.ok()) want = StatusCode::kResourceExhausted;
  std::string fault = Answer("fork", got.code(), want);
  if (!fault.empty() || !got.ok()) return fault;
  for (const SeqHandle& handle : handles) {
    ModelSeq child = parent;
    child.handle = handle;
    child.index = *store_->Find(handle, parent.tenant);
    child.expected_tokens = args.expected_tokens;
    child.ttl_ms = args.ttl_ms;
    child.lease_end_ms = now_ms_ + args.ttl_ms;
    child.holds = 0;
    seqs_.push_back(child);
  }
  return "";
}

// Mostly what a client would send, and every way to be wrong about it.
AppendArgs StoreDriver::AnyAppend(const ModelSeq& seq) {
  AppendArgs args;
  args.layer = static_cast<int32_t>(Below(static_cast<uint32_t>(seq.layers.size())));
  const ModelSeq::Layer& layer = seq.layers[static_cast<size_t>(args.layer)];
  args.pos = layer.len;
  args.n = static_cast<int32_t>(1 + Below(Below(4) == 0 ? 20 : 6));
  args.digest = ++digest_ % 1000;
  switch (Below(12)) {
    case 0:  // a retry, or other bytes at the same place
    case 1:
      if (layer.kept.empty()) break;
      {
        const auto& kept = layer.kept[Below(static_cast<uint32_t>(layer.kept.size()))];
        args.pos = kept.pos;
        args.n = kept.n;
        if (Below(2) == 0) args.digest = kept.digest;
      }
      break;
    case 2:  // anywhere
      args.pos = static_cast<int64_t>(Below(110)) - 2;
      break;
    case 3:  // skips
    case 4:
      args.skip_to = layer.len + Below(30);
      args.pos = args.skip_to + (Below(8) == 0 ? 1 : 0);
      break;
    case 5:  // skips less than the layer has, or to a place of its own
      args.skip_to = Below(100);
      if (Below(2) == 0) args.pos = args.skip_to;
      break;
    case 6:  // nonsense
      if (Below(2) == 0) args.n = -static_cast<int32_t>(Below(2));
      if (Below(2) == 0) args.layer += static_cast<int32_t>(seq.layers.size());
      break;
    default:
      break;
  }
  return args;
}

// A refusal is right only outside the reservation, and when the pages are really not there.
std::string StoreDriver::CheckRefusedForRoom(const ModelSeq& seq, const AppendArgs& args) const {
  if (args.pos + args.n <= seq.expected_tokens) {
    return "an append inside its reservation failed for room";
  }
  const size_t group = model_.GroupOf(seq.model, args.layer);
  const int64_t pages_max =
      (args.pos + args.n - 1) / options_.page_tokens - args.pos / options_.page_tokens + 1;
  if (pages_max <= PagesLeft(seq.model, static_cast<int32_t>(group), seq.tenant)) {
    return "an append failed for room though there was enough";
  }
  return "";
}

std::string StoreDriver::Append() {
  ModelSeq* seq = AnySeq();
  if (seq == nullptr) return "";
  const AppendArgs args = AnyAppend(*seq);
  bool replay = false;
  StatusCode want = model_.OfAppend(*seq, args, &replay);
  const absl::StatusOr<AppendPlan> plan = store_->PlanAppend(seq->index, args);
  if (want == StatusCode::kOk && plan.status().code() == StatusCode::kResourceExhausted) {
    std::string fault = CheckRefusedForRoom(*seq, args);
    if (!fault.empty()) return fault;
    want = StatusCode::kResourceExhausted;
  }
  std::string fault = Answer(replay ? "replay" : "append", plan.status().code(), want);
  if (!fault.empty() || !plan.ok()) return fault;
  if (replay != (plan->verdict == AppendVerdict::kReplay)) return "replay and commit are mixed up";
  if (replay) return "";
  const absl::Status audit = Audit(*store_);
  if (!audit.ok()) return absl::StrCat("with an open plan: ", audit.ToString());
  if (Below(8) == 0) {
    store_->Abandon(*plan);
    return "";
  }
  if (!pages_.Do(*store_, *plan, args)) return "a plan writes a page that is not its own";
  store_->Commit(*plan);
  model_.Append(seq, args);
  return "";
}

std::string StoreDriver::Truncate() {
  ModelSeq* seq = AnySeq();
  if (seq == nullptr) return "";
  const int64_t longest = std::max(model_.LongestLayer(*seq, 0), model_.LongestLayer(*seq, 1));
  const int64_t pos = Below(3) == 0 ? static_cast<int64_t>(Below(100)) - 1
                                    : std::max<int64_t>(0, longest - Below(8));
  StatusCode want = model_.OfTruncate(*seq, pos);
  bool room = true;  // for certain: every shared page that reaches past pos needs a copy
  for (int32_t g = 0; g < 2; ++g) {
    int64_t shared = 0;
    const BlockTable& table = store_->Table(seq->index, g);
    for (int64_t i = std::max(pos, int64_t{0}) / options_.page_tokens; i < table.end_page(); ++i) {
      if (table.page(i) == kNoPage) continue;
      shared += store_->PagesOf(seq->model, g).owners(table.page(i)) > 1 ? 1 : 0;
    }
    room &= shared <= PagesLeft(seq->model, g, seq->tenant);
  }
  const absl::Status got = store_->Truncate(seq->index, pos);
  if (want == StatusCode::kOk && !room && pos < seq->expected_tokens &&
      got.code() == StatusCode::kResourceExhausted) {
    want = got.code();  // a promise to write shared tokens again needs pages of its own
  }
  std::string fault = Answer("truncate", got.code(), want);
  if (fault.empty() && got.ok()) model_.Truncate(seq, pos);
  return fault;
}

void StoreDriver::Forget(size_t at) {
  stale_.push_back(seqs_[at].handle);
  if (stale_.size() > 100) stale_.erase(stale_.begin());
  seqs_.erase(seqs_.begin() + static_cast<ptrdiff_t>(at));
}

std::string StoreDriver::Free() {
  ModelSeq* seq = AnySeq();
  if (seq == nullptr) return "";
  store_->Free(seq->index);
  if (store_->Find(seq->handle, seq->tenant).ok()) return "a freed sequence is found";
  seq->freed = true;
  if (seq->holds == 0) Forget(static_cast<size_t>(seq - seqs_.data()));
  return "";
}

std::string StoreDriver::HoldOrUnhold() {
  if (seqs_.empty()) return "";
  const size_t at = Below(static_cast<uint32_t>(seqs_.size()));
  ModelSeq& seq = seqs_[at];
  if (seq.holds > 0 && Below(3) != 0) {
    store_->Unhold(seq.index);
    if (--seq.holds == 0 && seq.freed) Forget(at);
  } else if (!seq.freed) {
    store_->Hold(seq.index);
    ++seq.holds;
  }
  return "";
}

std::string StoreDriver::RenewOrSetTtl() {
  ModelSeq* seq = AnySeq();
  if (seq == nullptr) return "";
  if (Below(2) == 0) {
    const int64_t ttl_ms = Below(300);
    const absl::Status got = store_->SetTtl(seq->index, ttl_ms, now_ms_);
    if (got.ok() != (ttl_ms > 0)) return "set ttl is answered wrongly";
    if (!got.ok()) return "";
    seq->ttl_ms = ttl_ms;
  } else {
    store_->Renew(seq->index, now_ms_);
  }
  seq->lease_end_ms = now_ms_ + seq->ttl_ms;
  return "";
}

std::string StoreDriver::Expire() {
  now_ms_ += Below(60);
  std::vector<SeqHandle> handles(64);  // more steps than the queue can need for 8 sequences
  handles.resize(static_cast<size_t>(store_->Expire(now_ms_, absl::MakeSpan(handles))));
  for (size_t i = seqs_.size(); i-- > 0;) {
    const ModelSeq& seq = seqs_[i];
    const bool due = !seq.freed && seq.holds == 0 && seq.lease_end_ms <= now_ms_;
    const bool expired = std::count(handles.begin(), handles.end(), seq.handle) == 1;
    if (due != expired) return due ? "a lease did not end" : "a lease ended too early";
    if (expired) Forget(i);
  }
  answers_["expired"] += static_cast<int64_t>(handles.size());
  return "";
}

std::string StoreDriver::FindStale() {
  if (stale_.empty()) return "";
  SeqHandle handle = stale_[Below(static_cast<uint32_t>(stale_.size()))];
  if (Below(4) == 0 && !seqs_.empty()) {
    handle = seqs_[0].handle;
    ++handle.incarnation;
  }
  return Answer("find stale", store_->Find(handle, TenantId{0}).status().code(),
                StatusCode::kNotFound);
}

std::string StoreDriver::Visible() {
  const ModelSeq* seq = AnySeq();
  if (seq == nullptr) return "";
  const auto layer = static_cast<int32_t>(Below(static_cast<uint32_t>(seq->layers.size())));
  const int64_t len = seq->layers[static_cast<size_t>(layer)].len;
  const int64_t pos = len + 1 - Below(30);
  const auto q_len = static_cast<int32_t>(Below(5));
  return Answer("visible", store_->CheckVisible(seq->index, layer, pos, q_len).code(),
                model_.OfVisible(*seq, layer, pos, q_len));
}

std::string StoreDriver::Restart() {
  now_ms_ += Below(1000);  // leases stand still meanwhile
  const StoreImage image = store_->Image();
  absl::StatusOr<std::unique_ptr<SeqStore>> restored = SeqStore::Restore(options_, image, now_ms_);
  if (!restored.ok()) return absl::StrCat("not restored: ", restored.status().ToString());
  pages_.Renumber(image.pages);
  store_ = *std::move(restored);
  for (size_t i = seqs_.size(); i-- > 0;) {
    if (seqs_[i].freed) {  // and was held
      Forget(i);
      continue;
    }
    seqs_[i].holds = 0;
    seqs_[i].lease_end_ms = now_ms_ + seqs_[i].ttl_ms;
    const SeqStat stat = store_->Stat(seqs_[i].index, now_ms_);
    if (stat.expected_tokens != seqs_[i].expected_tokens || stat.ttl_ms != seqs_[i].ttl_ms) {
      return "a restored sequence has another reservation or lease";
    }
  }
  ++answers_["restart"];
  return "";
}

std::string StoreDriver::CompareGroup(const ModelSeq& seq, size_t group) const {
  const BlockTable& table = store_->Table(seq.index, static_cast<int32_t>(group));
  const int64_t page_tokens = options_.page_tokens;
  const int64_t longest = model_.LongestLayer(seq, group);
  if (table.first_page() != seq.gone_before[group] / page_tokens ||
      table.end_page() != (longest + page_tokens - 1) / page_tokens) {
    return absl::StrCat("group ", group, " holds pages ", table.first_page(), " to ",
                        table.end_page(), "; tokens ", seq.gone_before[group], " to ", longest,
                        " remain");
  }
  for (const int32_t layer : model_.Group(seq.model, group).layers) {
    const ModelSeq::Layer& want = seq.layers[static_cast<size_t>(layer)];
    if (store_->SeqLen(seq.index, layer) != want.len) {
      return absl::StrCat("layer ", layer, " has length ", store_->SeqLen(seq.index, layer),
                          ", not ", want.len);
    }
    for (const auto& [pos, digest] : want.tokens) {
      const uint64_t value = pages_.Read(*store_, seq.index, layer, pos);
      if (value != SimulatedPages::Value(digest, layer, pos)) {
        return absl::StrCat("layer ", layer, " reads another token at ", pos);
      }
    }
  }
  return "";
}

std::string StoreDriver::CompareSeq(const ModelSeq& seq) const {
  if (store_->Find(seq.handle, seq.tenant).ok() == seq.freed)
    return "found though freed, or the reverse";
  for (size_t g = 0; g < seq.gone_before.size(); ++g) {
    std::string fault = CompareGroup(seq, g);
    if (!fault.empty()) return fault;
  }
  return "";
}

std::string StoreDriver::Compare() const {
  const absl::Status audit = Audit(*store_);
  if (!audit.ok()) return audit.ToString();
  for (int32_t m = 0; m < 2; ++m) {
    for (int32_t g = 0; g < 2; ++g) {
      const PoolStat pool = store_->Pool(m, g);
      if (pool.pages_used + pool.pages_free != pool.pages_total) return "used + free != total";
      if (seqs_.empty() && pool.pages_used + pool.pages_reserved > 0) return "pages leaked";
    }
  }
  if (static_cast<size_t>(store_->seqs_used()) != seqs_.size()) return "sequences leaked";
  for (const ModelSeq& seq : seqs_) {
    std::string fault = CompareSeq(seq);
    if (!fault.empty())
      return absl::StrCat("sequence ", static_cast<uint64_t>(seq.handle.seq_id), ": ", fault);
  }
  return "";
}

}  // namespace fp8kvd::cache
