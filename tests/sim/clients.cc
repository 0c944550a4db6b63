// What the clients of a world do, and how their answers are judged.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/sim/world.h"

namespace fp8kvd::testing {
namespace {

using Op = engine::ControlRequest::Op;
constexpr size_t kFlightsMax = 6;  // of one client
constexpr size_t kSeqsMax = 8;     // that it remembers

}  // namespace

void World::ActAs(Client& client) {
  if (client.flights.size() >= kFlightsMax) return;
  SeqModel* const seq = PickSeq(client);
  const int64_t dice = random_.In(1, 100);
  if (seq == nullptr || dice <= 6) {
    Create(client);
  } else if (dice <= 58) {
    Decode(client, *seq);
  } else if (dice <= 70) {
    Append(client, *seq);
  } else if (dice <= 73) {
    Skip(client, *seq);
  } else if (dice <= 82) {
    Retry(client);
  } else if (dice <= 87) {
    Fork(client, *seq);
  } else if (dice <= 92) {
    Truncate(client, *seq);
  } else {
    FreeOrRenew(client, *seq);
  }
}

// Mostly one that lives; forgets old ones that are gone and that nothing in flight names.
SeqModel* World::PickSeq(Client& client) {
  if (client.seqs.size() > kSeqsMax) {
    client.seqs.remove_if(
        [](const SeqModel& seq) { return seq.is_gone() && seq.calls_in_flight == 0; });
  }
  for (int32_t tries = 0; tries < 4 && !client.seqs.empty(); ++tries) {
    auto seq = client.seqs.begin();
    std::advance(seq, random_.In(0, static_cast<int64_t>(client.seqs.size()) - 1));
    if (!seq->is_exclusive && (!seq->is_gone() || random_.Chance(10))) return &*seq;
  }
  return nullptr;
}

void World::Create(Client& client) {
  Flight flight;
  flight.control = std::make_unique<SpreadControlCall>(fleet_.get(), Op::kCreate);
  engine::ControlRequest& request = flight.control->request;
  request.model =
      static_cast<int32_t>(random_.In(0, static_cast<int64_t>(fleet_->Of(0).models().size()) - 1));
  request.count = static_cast<int32_t>(random_.In(1, 2));
  request.expected_tokens = random_.Chance(50) ? random_.In(1, 200) : 0;
  request.ttl_ms = random_.Chance(50) ? random_.In(20, 3'000) : 0;
  flight.what = absl::StrCat("create ", request.count, " of ", request.expected_tokens);
  Submit(client, std::move(flight));
}

ItemSpec World::MakeItem(SeqModel& seq, int32_t layer, bool is_append) {
  ItemSpec spec{.handle = seq.handle(), .pos = seq.hoped[layer], .tokens = {}, .queries = {}};
  const int64_t q_len = random_.Chance(80) ? 1 : random_.In(2, 4);
  for (int64_t j = 0; j < q_len; ++j) {
    if (is_append) spec.tokens.push_back(next_token_++);
    spec.queries.push_back(next_token_++);
  }
  if (!is_append) {
    spec.pos = std::max<int64_t>(0, seq.hoped[layer] - q_len - random_.In(0, 70));
    if (random_.Chance(5)) spec.pos = random_.In(0, 300);
  } else if (random_.Chance(4)) {
    spec.pos = random_.In(0, 300);  // a gap, other bytes, or too old
  } else {
    seq.hoped[layer] += q_len;
  }
  return spec;
}

void World::Decode(Client& client, SeqModel& seq) {
  const ModelGeometry& geometry = fleet_->Of(0).models()[seq.model()].geometry;
  SentDecode sent;
  sent.model = seq.model();
  sent.layer = static_cast<int32_t>(random_.In(0, geometry.layers - 1));
  if (random_.Chance(70)) {  // the slowest layer, as a model's pass would
    sent.layer = static_cast<int32_t>(std::min_element(seq.hoped.begin(), seq.hoped.end()) -
                                      seq.hoped.begin());
  }
  sent.out_type = random_.Chance(25) ? kernels::OutType::kFp32 : kernels::OutType::kBf16;
  const bool is_append = random_.Chance(75);
  for (SeqModel& other : client.seqs) {
    const bool may_join = &other == &seq || (random_.Chance(50) && other.model() == seq.model() &&
                                             !other.is_exclusive);
    if (may_join) sent.items.push_back(MakeItem(other, sent.layer, is_append));
  }
  Send(client, std::move(sent), is_append ? "decode" : "attend");
}

// Sends what is in flight, or was answered last, again: with the same bytes or, rarely, with
// others.
void World::Retry(Client& client) {
  SentDecode sent = client.answered;
  for (const Flight& flight : client.flights) {
    if (flight.decode && random_.Chance(40)) sent = flight.sent;
  }
  const bool has_other_bytes = random_.Chance(20);
  for (ItemSpec& item : sent.items) {
    if (has_other_bytes && !item.tokens.empty()) item.tokens[0] = next_token_++;
    for (uint64_t& query : item.queries) query = next_token_++;
  }
  Send(client, std::move(sent), has_other_bytes ? "other bytes" : "again");
}

void World::Send(Client& client, SentDecode sent, std::string what) {
  Flight flight;
  std::vector<ItemSpec> items;
  for (const ItemSpec& item : sent.items) {  // those whose sequence the client still remembers
    for (SeqModel& seq : client.seqs) {
      if (!(seq.handle() == item.handle) || seq.is_exclusive) continue;
      flight.seqs.push_back(&seq);
      items.push_back(item);
    }
  }
  if (items.empty()) return;
  sent.items = items;
  flight.what = absl::StrCat(what, " layer ", sent.layer);
  for (const ItemSpec& item : items) {
    absl::StrAppend(&flight.what, " seq ", static_cast<uint64_t>(item.handle.seq_id), "@", item.pos,
                    "+", item.queries.size());
  }
  flight.decode = std::make_unique<SpreadDecodeCall>(fleet_.get(), sent.model, sent.layer,
                                                     std::move(items), sent.out_type);
  if (flight.decode->parts() > 1) ++tally_["decode on two devices"];
  flight.sent = std::move(sent);
  Submit(client, std::move(flight));
}

void World::Append(Client& client, SeqModel& seq) {
  const ModelGeometry& geometry = fleet_->Of(0).models()[seq.model()].geometry;
  int32_t layer = 0;
  int32_t count = geometry.layers;
  if (random_.Chance(40)) {
    layer = static_cast<int32_t>(random_.In(0, geometry.layers - 1));
    count = static_cast<int32_t>(random_.In(1, geometry.layers - layer));
  }
  int64_t pos = seq.hoped[layer];
  if (random_.Chance(4)) pos = random_.In(0, 300);
  std::vector<uint64_t> tokens(random_.Chance(70) ? random_.In(1, 40) : random_.In(41, 150));
  for (uint64_t& token : tokens) token = next_token_++;
  for (int32_t l = layer; l < layer + count; ++l) {
    if (seq.hoped[l] == pos) seq.hoped[l] += static_cast<int64_t>(tokens.size());
  }
  Flight flight;
  flight.seqs = {&seq};
  flight.what = absl::StrCat("append seq ", static_cast<uint64_t>(seq.handle().seq_id), " layers ",
                             layer, "+", count, " @", pos, "+", tokens.size());
  flight.append = std::make_unique<AppendCall>(&EngineOf(seq), seq.model(), layer, count,
                                               seq.handle(), pos, std::move(tokens));
  Submit(client, std::move(flight));
}

// skip_to moves all layers of a group, so nothing else of the sequence may be in flight beside it.
void World::Skip(Client& client, SeqModel& seq) {
  const ModelGeometry& geometry = fleet_->Of(0).models()[seq.model()].geometry;
  const int32_t layer = static_cast<int32_t>(random_.In(0, geometry.layers - 1));
  if (seq.calls_in_flight > 0 || geometry.layer[layer].window == 0) return;
  const int64_t pos = seq.hoped[layer] + random_.In(1, 90);
  std::vector<uint64_t> tokens(random_.In(1, 4));
  for (uint64_t& token : tokens) token = next_token_++;
  seq.is_exclusive = true;
  Flight flight;
  flight.seqs = {&seq};
  flight.what = absl::StrCat("skip seq ", static_cast<uint64_t>(seq.handle().seq_id), " layer ",
                             layer, " to ", pos, "+", tokens.size());
  flight.append =
      std::make_unique<AppendCall>(&EngineOf(seq), seq.model(), layer, /*layers_count=*/1,
                                   seq.handle(), pos, std::move(tokens), /*skip_to=*/pos);
  Submit(client, std::move(flight));
}

void World::Fork(Client& client, SeqModel& seq) {
  Flight flight;
  flight.control = std::make_unique<SpreadControlCall>(fleet_.get(), Op::kFork);
  flight.control->request.handles = {seq.handle()};
  flight.control->request.count = static_cast<int32_t>(random_.In(1, 2));
  flight.control->request.expected_tokens = random_.Chance(40) ? random_.In(1, 200) : 0;
  flight.seqs = {&seq};
  flight.what = absl::StrCat("fork seq ", static_cast<uint64_t>(seq.handle().seq_id));
  Submit(client, std::move(flight));
}

void World::Truncate(Client& client, SeqModel& seq) {
  Flight flight;
  flight.control = std::make_unique<SpreadControlCall>(fleet_.get(), Op::kTruncate);
  const int64_t longest = *std::max_element(seq.hoped.begin(), seq.hoped.end());
  const int64_t seq_len = std::max<int64_t>(0, longest - random_.In(0, 80));
  flight.control->request.handles = {seq.handle()};
  flight.control->request.seq_lens = {seq_len};
  for (int64_t& hoped : seq.hoped) hoped = std::min(hoped, seq_len);
  flight.seqs = {&seq};
  flight.what =
      absl::StrCat("truncate seq ", static_cast<uint64_t>(seq.handle().seq_id), " to ", seq_len);
  Submit(client, std::move(flight));
}

void World::FreeOrRenew(Client& client, SeqModel& seq) {
  Flight flight;
  const Op op = random_.Of({Op::kFree, Op::kRenew, Op::kStat});
  flight.control = std::make_unique<SpreadControlCall>(fleet_.get(), op);
  flight.control->request.handles = {seq.handle()};
  flight.seqs = {&seq};
  flight.what = absl::StrCat(op == Op::kFree    ? "free"
                             : op == Op::kRenew ? "renew"
                                                : "stat",
                             " seq ", static_cast<uint64_t>(seq.handle().seq_id));
  Submit(client, std::move(flight));
}

void World::Submit(Client& client, Flight flight) {
  engine::TimeUs deadline = engine::kNoDeadline;
  if (random_.Chance(12)) {
    deadline = now() + random_.In(0, 6'000);
    flight.facts.may_be_late = true;
  }
  flight.Sign(client.tenant, now(), deadline);
  flight.facts.submitted_us = now();
  Count(absl::OkStatus(), "call");
  Trace(flight.what);
  const absl::Status status = flight.Submit();
  if (callers_take_turns_) {
    CheckEngines();
    if (flight.done()) ++tally_["answered within Submit"];
  } else if (flight.done()) {
    Complain("a caller took a turn");
  }
  if (!status.ok()) {
    Count(status, "refused");
    Trace(absl::StrCat("  refused: ", status.ToString()));
    if (!absl::IsResourceExhausted(status) && !has_fault_) Complain(status.ToString());
    if (absl::IsResourceExhausted(status) && flight.retry_after_ms() < 1) Complain("no delay");
    for (SeqModel* seq : flight.seqs) {
      seq->is_exclusive = false;
      if (seq->calls_in_flight == 0) seq->ForgetHopes();
    }
    return;
  }
  for (SeqModel* seq : flight.seqs) {
    seq->Touch(now());
    ++seq->calls_in_flight;
  }
  client.flights.push_back(std::move(flight));
}

void World::CancelSomething() {
  for (Client& client : clients_) {
    for (Flight& flight : client.flights) {
      if (!random_.Chance(30)) continue;
      Trace(absl::StrCat("cancel: ", flight.what));
      flight.Cancel();
      flight.facts.was_cancelled = true;
      return;
    }
  }
}

World::Client World::NewClient() {
  Client client;
  client.tenant = static_cast<cache::TenantId>(random_.In(0, tenants_ - 1));
  return client;
}

// Tries a handle that it has seen with a client of another tenant.
void World::Spy(Client& client) {
  const Client& other = clients_.back();
  if (other.tenant == client.tenant || other.seqs.empty()) return;
  constexpr Op kOps[] = {Op::kStat, Op::kFree, Op::kRenew, Op::kTruncate};
  SpreadControlCall& spy = spies_.emplace_back(fleet_.get(), kOps[random_.In(0, 3)]);
  spy.request.tenant = client.tenant;
  spy.request.arrived = now();
  spy.request.handles = {other.seqs.back().handle()};
  spy.request.seq_lens = {0};
  if (!spy.Submit().ok()) spies_.pop_back();
}

void World::JudgeSpies() {
  spies_.remove_if([this](SpreadControlCall& spy) {
    if (!spy.done()) return false;
    const bool is_found = spy.request.status.ok() && !absl::IsNotFound(spy.request.item_status[0]);
    if (is_found) Complain("a handle of another tenant was found");
    ++tally_["spy"];
    return true;
  });
}

// Its connection is gone: what is in flight is cancelled, and nobody renews.
void World::Kill(Client& client) {
  Trace("a client dies");
  client.is_alive = false;
  ++tally_["killed client"];
  for (Flight& flight : client.flights) {
    flight.Cancel();
    flight.facts.was_cancelled = true;
  }
}

// Answers are judged in the order of the calls, since that is the order in which they take effect.
void World::JudgeDone() {
  JudgeSpies();
  for (Client& client : clients_) {
    while (is_ok() && !client.flights.empty() && client.flights.front().done()) {
      Flight& flight = client.flights.front();
      if (flight.times_done() != 1) Complain("a call was answered twice");
      Judge(client, flight);
      for (SeqModel* seq : flight.seqs) {
        --seq->calls_in_flight;
        seq->is_exclusive = false;
        if (seq->calls_in_flight == 0) seq->ForgetHopes();
      }
      if (flight.decode) {
        flight.decode->Scribble();
        client.answered = std::move(flight.sent);
      }
      if (flight.append) flight.append->Scribble();
      client.flights.pop_front();
    }
  }
}

// Whether this is the answer of a server, or of one of its devices, that ends.
bool World::EndsAll(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return false;
  if (!has_fault_ && !is_draining_ && !fleet_->stats().failed) {
    Complain("unavailable without a fault");
  }
  return true;
}

void World::Judge(Client& client, Flight& flight) {
  const absl::Status status = flight.status();
  Trace(absl::StrCat("  answer to ", flight.what, ": ", status.ToString()));
  Count(status, "answer");
  if (EndsAll(status)) {
    for (SeqModel* seq : flight.seqs) seq->Lose();
    return;
  }
  if (flight.decode) {
    JudgeDecode(flight);
  } else if (!flight.seqs.empty() && flight.seqs[0]->is_lost()) {
    return;
  } else if (flight.append) {
    const std::string why = flight.seqs[0]->JudgeAppend(flight.facts, *flight.append);
    if (!why.empty()) Complain(absl::StrCat(flight.what, ": ", why));
  } else {
    JudgeControl(client, flight);
  }
}

void World::JudgeDecode(Flight& flight) {
  for (size_t i = 0; i < flight.seqs.size(); ++i) {
    if (flight.seqs[i]->is_lost()) continue;
    const auto item = static_cast<int32_t>(i);
    const SpreadDecodeCall& call = *flight.decode;
    Count(call.ItemStatus(item), "item");
    Trace(absl::StrCat("    item ", i, ": ", call.ItemStatus(item).ToString()));
    // One of two devices failed, and the other's part, which the caller cancelled, is the answer.
    if (EndsAll(call.CallOf(item).request.status)) {
      ++tally_["failed by one device"];
      flight.seqs[i]->Lose();
      continue;
    }
    // One of two devices had no place in its queue: its items fail with a delay, and alone.
    if (call.parts() > 1 && absl::IsResourceExhausted(call.CallOf(item).request.status)) {
      if (flight.status().ok() && call.ItemRetryMs(item) < 1) Complain("no delay");
      ++tally_["refused by one device"];
      flight.seqs[i]->Lose();  // its lease was not renewed, as the model took it to be
      continue;
    }
    const std::string why = flight.seqs[i]->JudgeItem(
        flight.facts, call.CallOf(item), call.NumberOf(item), flight.sent.items[i].tokens);
    if (!why.empty()) Complain(absl::StrCat(flight.what, " item ", i, ": ", why));
  }
}

void World::JudgeControl(Client& client, Flight& flight) {
  engine::ControlRequest& request = flight.control->request;
  SeqModel* const seq = flight.seqs.empty() ? nullptr : flight.seqs[0];
  const bool has_items = !request.item_status.empty();
  const absl::Status status =
      request.status.ok() && has_items ? request.item_status[0] : request.status;
  if (has_items) Count(status, "control");
  std::string why;
  switch (request.op) {
    case Op::kCreate:
      if (!status.ok()) break;
      for (const cache::SeqHandle& handle : request.handles) {
        client.seqs.emplace_back(
            handle, request.model, &fleet_->Of(0).models()[request.model].geometry,
            request.expected_tokens, request.ttl_ms, flight.facts.submitted_us);
      }
      break;
    case Op::kFork:
      why = seq->JudgeFork(flight.facts, status);
      for (size_t i = 0; status.ok() && i < request.handles.size(); ++i) {
        client.seqs.push_back(
            seq->Child(request.handles[i], request.expected_tokens, flight.facts.submitted_us));
      }
      break;
    case Op::kTruncate:
      why = seq->JudgeTruncate(flight.facts, status, request.seq_lens[0]);
      break;
    case Op::kFree:
      why = seq->JudgeFree(flight.facts, status);
      break;
    case Op::kStat:
      if (status.ok() && request.infos[0].seq_lens.size() != seq->hoped.size()) why = "lengths";
      for (size_t l = 0; status.ok() && why.empty() && l < seq->hoped.size(); ++l) {
        if (request.infos[0].seq_lens[l] != seq->Length(static_cast<int32_t>(l))) why = "a length";
      }
      [[fallthrough]];
    default:
      if (!status.ok()) why = seq->JudgeTruncate(flight.facts, status, 0);
      break;
  }
  if (!why.empty()) Complain(absl::StrCat(flight.what, ": ", why));
}

void World::Count(const absl::Status& status, const std::string& what) {
  ++tally_[status.ok() ? what : absl::StrCat(what, " ", absl::StatusCodeToString(status.code()))];
}

}  // namespace fp8kvd::testing
