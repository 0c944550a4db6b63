#include "server/engine/engine.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/engine/engine_parts.h"

namespace fp8kvd::engine {
namespace {

// Awake for so long after the last work, where callers take no turns: a client that answers within
// it finds no sleeper. Some tens of microseconds, so that an idle daemon costs no core.
constexpr int64_t kSpinUs = 50;
// Turns that a caller takes one after the other, for others who came meanwhile; then it goes back
// to its own work.
constexpr int kCallerTurnsMax = 4;
// Where callers take turns, who has an answer often sends the next decode within so long: a client
// beside the daemon within 10 us. A slice begun meanwhile would be in its way, if the one before
// took no longer than kShortDecodeUs: to longer ones a slice is little, and what is between them is
// all that prompts have where they fill the places among the launches.
constexpr TimeUs kNextDecodeUs = 25;
constexpr TimeUs kShortDecodeUs = 50;
// Asleep for so long at most: leases end without anybody ringing.
constexpr int64_t kSleepUsMax = 50'000;

int64_t MsOf(TimeUs time) { return time / 1000; }

}  // namespace

absl::Status Engine::Parts::Submit(Request* request) {
  if (absl::Status status = admission_.Offer(request); !status.ok()) return status;
  // Who takes messages in has enough to do: a thread that looks on anyway has the launches, too,
  // and an upload's slices in any case, each some 20 us that a decode of its sessions would wait.
  if (callers_take_turns_ && request->kind != Request::Kind::kAppend &&
      !is_looking_on_.load(std::memory_order_relaxed)) {
    TakeTurns();
  } else {
    doorbell_.Ring();
  }
  return absl::OkStatus();
}

// The engine's thread is rung only for what is left: launches in flight, or slices to come.
void Engine::Parts::TakeTurns() {
  for (int turn = 0; turn < kCallerTurnsMax; ++turn) {
    const TurnEnd end = TakeTurn();
    if (end.was_taken) return;
    if (end.needs_thread()) break;
    if (!admission_.HasOffers()) return;
  }
  WakeThread();
}

void Engine::Parts::WakeThread() {
  is_wanted_.store(true);
  doorbell_.Ring();
}

void Engine::Parts::LookOn() {
  if (!callers_take_turns_ || is_looking_on_.load(std::memory_order_relaxed)) return;
  const TurnEnd end = TakeTurn();
  // Who offered something during this turn found it taken, and may be looked after no more.
  if (!end.was_taken && (end.needs_thread() || admission_.HasOffers())) WakeThread();
}

bool Engine::Parts::is_watched() const {
  if (launches_.count() != 1 || !batcher_.empty() || !coming_.empty()) return false;
  const Launch& launch = launches_.Newest();
  return launch.append == nullptr && launch.items.front().request->looks_on &&
         launch.items.front().request == launch.items.back().request;
}

Engine::Parts::TurnEnd Engine::Parts::TakeTurn() {
  if (!turn_.Try()) return {.was_taken = true};
  TurnEnd end{.has_worked = RunTurn()};
  end.is_idle = is_idle();
  end.is_watched = is_watched();
  end.is_over = !fault_.ok() || is_drained_;
  turn_.End();
  return end;
}

void Engine::Parts::Drain() {
  admission_.Refuse(/*is_device_failed=*/false);
  doorbell_.Ring();
}

void Engine::Parts::SetTenants(std::vector<config::TenantOptions> tenants) {
  admission_.SetTenants(tenants);
  {
    const std::lock_guard<std::mutex> lock(tenants_mutex_);
    new_tenants_ = std::move(tenants);
  }
  has_new_tenants_.store(true);
  doorbell_.Ring();
}

// The store is its turn's.
void Engine::Parts::TakeTenants() {
  has_new_tenants_.store(false);
  const std::lock_guard<std::mutex> lock(tenants_mutex_);
  store_->SetTenants(LimitsOf(new_tenants_));
}

void Engine::Parts::NoteReply(const DecodeRequest& request) {
  if (request.batch_items == 0) return;  // nothing of it ran
  reply_us_.Observe(
      static_cast<uint64_t>(std::max<TimeUs>(0, setup_.clock->NowUs() - request.fenced)));
}

EngineStats Engine::Parts::stats() const {
  EngineStats stats = answers_->Published();
  stats.reply_us = reply_us_.Copy();
  stats.staging_slots_used = staging_->slots_used();
  stats.staging_slots_total = staging_->slots_total();
  return stats;
}

// A turn. Offers first, so that a renewal that has arrived saves its lease; answers as soon as a
// fence has passed, before the next launch can delay them (the CPU backend works inside the call).
bool Engine::Parts::RunTurn() {
  if (!fault_.ok() || is_drained_) return false;
  const TimeUs now = setup_.clock->NowUs();
  bool has_worked = has_new_tenants_.load(std::memory_order_relaxed);
  if (has_worked) TakeTenants();
  if (Request* const offered = admission_.TakeAll(); offered != nullptr) {
    intake_->Take(offered, MsOf(now));
    has_worked = true;
  }
  has_worked |= Poll();
  has_worked |= ExpireLeases(now);
  has_worked |= Work();
  has_worked |= Poll();
  CloseIfDrained(now);
  if (has_worked || !fault_.ok()) answers_->Tell();  // a fault ends requests wherever it is seen
  return has_worked;
}

bool Engine::Parts::Work() {
  if (!fault_.ok() || launches_.is_full() || batcher_.empty() || !CanFillNext()) return false;
  const TimeUs now = setup_.clock->NowUs();
  const Batcher::Pick& pick = batcher_.Look(now);
  bool has_worked = pick.ended != nullptr || pick.controls != nullptr;
  for (Request* request = pick.ended; request != nullptr;) {
    Request* const next = request->book.next;
    EndLate(request, now);
    request = next;
  }
  for (Request* request = pick.controls; request != nullptr;) {
    Request* const next = request->book.next;
    RunControl(static_cast<ControlRequest*>(request), now);
    request = next;
  }
  PoisonFreed();
  if (MustGather(pick, now) || !FillsNext(pick)) return has_worked;
  if (!pick.items.empty() && fault_.ok()) {
    has_worked = true;
    if (!LaunchDecode(pick, now)) return true;
    if (Poll()) {
      PoisonFreed();  // before the slice takes what has just come back
      answers_->Tell();
    }
  }
  return MoveAppends(pick.append) || has_worked;
}

// The launch may wait for company, and then everything that was picked after it waits too.
bool Engine::Parts::MustGather(const Batcher::Pick& pick, TimeUs now) const {
  const int32_t wait_us = setup_.options.batch_wait_us_max;
  return wait_us > 0 && !pick.items.empty() && !pick.has_passed_over && !admission_.is_refusing() &&
         static_cast<int32_t>(pick.items.size()) < setup_.options.batch_rows_max &&
         now - pick.oldest_arrived < wait_us;
}

// Behind a launch that runs, a smaller one would start no sooner than when the device is free, and
// only split what gathers until then: it waits until it is as large. So two launches in flight hide
// the host's share without halving the batches.
bool Engine::Parts::FillsNext(const Batcher::Pick& pick) const {
  return launches_.empty() || pick.items.empty() || pick.has_passed_over ||
         admission_.is_refusing() || pick.items.size() >= launches_.Newest().items.size();
}

// False where a look at all that waits would only find too few.
bool Engine::Parts::CanFillNext() const {
  if (launches_.empty() || !batcher_.has_only_decodes() || admission_.is_refusing()) return true;
  const auto waiting_max = static_cast<size_t>(admission_.places_used()) - launches_.rows();
  return waiting_max >= launches_.Newest().items.size();
}

// False if something picked was put off: then nothing that was picked behind it may go.
bool Engine::Parts::LaunchDecode(const Batcher::Pick& pick, TimeUs now) {
  Launch& launch = launches_.Free();
  const absl::Status status = decode_step_->Run(pick, now, &launch);
  batcher_.EndRound(launch.items);
  const auto begin = [this](DecodeRequest* request) {
    if (--request->book.waiting == 0) batcher_.Remove(request);
  };
  for (const BatchItem& batch_item : launch.items) {
    ++batch_item.request->book.running;
    begin(batch_item.request);
  }
  for (const BatchItem& batch_item : decode_step_->failed()) {
    begin(batch_item.request);
    answers_->CloseItem(batch_item.request, &batch_item.item());
  }
  const bool is_whole = launch.items.size() + decode_step_->failed().size() == pick.items.size();
  if (!launch.items.empty()) launches_.Push();
  if (!status.ok()) {
    Fail(status);
    return false;
  }
  if (!launch.items.empty()) Take(launch, now);
  PoisonFreed();
  return is_whole;
}

// The launch is on its way.
void Engine::Parts::Take(Launch& launch, TimeUs now) {
  launch.begun = now;
  const absl::StatusOr<kernels::FenceId> fence = setup_.backend->Fence();
  if (!fence.ok()) {
    Fail(fence.status());
    return;
  }
  launch.fence = *fence;
}

void Engine::Parts::RunControl(ControlRequest* request, TimeUs now) {
  if (!fault_.ok()) {
    answers_->EndAfterFault(request, DeviceFailedError());
    return;
  }
  const absl::Status status = control_step_->Run(request, MsOf(now));
  if (status.ok()) {
    answers_->EndControl(request);
    return;
  }
  Fail(status);
  answers_->EndAfterFault(request, DeviceFailedError());
}

void Engine::Parts::EndLate(Request* request, TimeUs now) {
  if (request->cancelled.load(std::memory_order_relaxed)) {
    ++stats_.requests_cancelled_total;
    answers_->EndWaiting(request, absl::CancelledError("the caller cancelled before work began"));
    return;
  }
  ++stats_.requests_late_total;
  answers_->EndWaiting(
      request,
      absl::DeadlineExceededError(absl::StrCat(
          "the deadline passed ", now - request->deadline, " us ago, ", now - request->arrived,
          " us after arrival, before work began; allow more time or send less at once")));
}

void Engine::Parts::PoisonFreed() {
  if (!fault_.ok()) return;
  for (const FreedPages::Page& page : freed_.to_poison()) {
    const absl::Status status =
        setup_.backend->Poison(pages_.Page(page.model, page.group, page.page_id),
                               pages_.page_stride(page.model, page.group));
    if (!status.ok()) {
      Fail(status);
      break;
    }
  }
  freed_.ForgetPoisoned();
}

bool Engine::Parts::Poll() {
  bool has_landed = false;
  while (fault_.ok() && !launches_.empty()) {
    const absl::StatusOr<bool> passed = setup_.backend->Passed(launches_.Oldest().fence);
    if (!passed.ok()) {
      Fail(passed.status());
      return true;
    }
    if (!*passed) break;
    Land(launches_.Oldest(), setup_.clock->NowUs());
    launches_.Pop();
    has_landed = true;
  }
  stats_.launches_inflight = launches_.count();
  return DropEnded() || has_landed;
}

void Engine::Parts::Land(const Launch& launch, TimeUs now) {
  const int64_t took_us = std::max<int64_t>(0, now - launch.begun);
  stats_.kernel_us.Observe(static_cast<uint64_t>(took_us));
  if (launch.append != nullptr) {
    Request::Book& book = launch.append->book;
    if (--book.running == 0 && book.waiting == 0) answers_->EndAppend(launch.append);
    return;
  }
  if (callers_take_turns_ && took_us <= kShortDecodeUs) slices_from_ = now + kNextDecodeUs;
  const double item_us = static_cast<double>(took_us) / static_cast<double>(launch.items.size());
  item_us_ += (item_us - item_us_) / 8;
  admission_.SetItemUs(static_cast<int64_t>(item_us_) + 1);
  for (const BatchItem& batch_item : launch.items) {
    batch_item.request->fenced = now;
    --batch_item.request->book.running;
    answers_->CloseItem(batch_item.request, &batch_item.item());
  }
}

bool Engine::Parts::ExpireLeases(TimeUs now) {
  if (!fault_.ok()) return false;
  const int32_t ended = store_->Expire(MsOf(now), absl::MakeSpan(expired_));
  stats_.lease_expiries_total += ended;
  return ended > 0;
}

void Engine::Parts::CloseIfDrained(TimeUs now) {
  if (!admission_.is_refusing() || !fault_.ok() || !is_idle() || admission_.HasOffers()) return;
  Request* const slipped_in = admission_.Close();
  if (slipped_in != nullptr) {
    intake_->Take(slipped_in, MsOf(now));
  } else {
    answers_->Tell();
    is_drained_ = true;
  }
}

// The device is gone: everything that was taken is answered, and nothing new is.
void Engine::Parts::Fail(const absl::Status& fault) {
  if (!fault_.ok()) return;
  fault_ = fault;
  stats_.failed = true;
  admission_.Refuse(/*is_device_failed=*/true);
  const absl::Status answer = DeviceFailedError();
  const auto end = [&](Request* request) {
    if (request->book.waiting == 0 && request->book.running == 0) {
      answers_->EndAfterFault(request, answer);
    }
  };
  for (; !coming_.empty(); coming_.Pop()) {
    --coming_.Oldest().append->book.running;
    end(coming_.Oldest().append);
  }
  while (!launches_.empty()) {
    const Launch& launch = launches_.Oldest();
    if (launch.append != nullptr) {
      --launch.append->book.running;
      end(launch.append);
    }
    for (const BatchItem& batch_item : launch.items) {
      --batch_item.request->book.running;
      end(batch_item.request);
    }
    launches_.Pop();
  }
  for (Request* request = batcher_.TakeAll(); request != nullptr;) {
    Request* const next = request->book.next;
    request->book.waiting = 0;
    end(request);
    request = next;
  }
  for (Request* request = admission_.Close(); request != nullptr;) {
    Request* const next = request->book.next;
    ++stats_.requests_taken_total[static_cast<size_t>(request->kind)];
    end(request);
    request = next;
  }
}

absl::Status Engine::Parts::Run() {
  const int64_t spin_us = callers_take_turns_ ? 0 : kSpinUs;
  TimeUs worked_at = setup_.clock->NowUs();
  while (true) {
    is_wanted_.store(false);  // before the turn: who asks after it is heard
    const TurnEnd end = TakeTurn();
    if (end.is_over) return fault_;
    if (end.has_worked) {
      worked_at = setup_.clock->NowUs();
      continue;
    }
    const bool must_look_on = !end.was_taken && !end.is_idle;
    is_looking_on_.store(must_look_on, std::memory_order_relaxed);
    if (must_look_on || setup_.clock->NowUs() - worked_at < spin_us) {
      std::this_thread::yield();
      continue;
    }
    doorbell_.Sleep(kSleepUsMax, [this] {
      return is_wanted_.load() || admission_.HasOffers() || admission_.is_refusing();
    });
    worked_at = setup_.clock->NowUs();
  }
}

Engine::Engine(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Engine::~Engine() = default;

absl::Status Engine::Submit(Request* request) { return parts_->Submit(request); }
Staging& Engine::staging() { return parts_->staging(); }
bool Engine::callers_take_turns() const { return parts_->callers_take_turns(); }
void Engine::LookOn() { parts_->LookOn(); }
void Engine::LookAway() { parts_->LookAway(); }
bool Engine::Step() { return parts_->Step(); }
absl::Status Engine::Run() { return parts_->Run(); }
void Engine::Drain() { parts_->Drain(); }
void Engine::SetTenants(std::vector<config::TenantOptions> tenants) {
  parts_->SetTenants(std::move(tenants));
}
void Engine::NoteReply(const DecodeRequest& request) { parts_->NoteReply(request); }
EngineStats Engine::stats() const { return parts_->stats(); }
const std::vector<ModelSetup>& Engine::models() const { return parts_->setup().models; }
const config::CacheOptions& Engine::cache_options() const { return parts_->setup().cache_options; }
uint64_t Engine::incarnation() const { return parts_->incarnation(); }
absl::Status Engine::PrepareSnapshots() { return parts_->PrepareSnapshots(); }
const SnapshotParts& Engine::snapshots() const { return parts_->snapshots(); }
absl::StatusOr<SnapshotPart> Engine::TakePart() const { return parts_->TakePart(); }
absl::StatusOr<std::unique_ptr<cache::SeqStore>> Engine::LoadPart(const SnapshotHead& head,
                                                                  SnapshotReader* reader) {
  return parts_->LoadPart(head, reader);
}
absl::Status Engine::Adopt(std::unique_ptr<cache::SeqStore> store) {
  return parts_->Adopt(std::move(store));
}

int32_t Engine::AppendSliceTokens(int32_t model, int32_t layer, int32_t layers_count) const {
  const Parts::Setup& setup = parts_->setup();
  return engine::AppendSliceTokens(setup.options, setup.cache_options, setup.models[model].geometry,
                                   layer, layers_count);
}

}  // namespace fp8kvd::engine
