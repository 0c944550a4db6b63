#include "server/engine/control_spread.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "config/base/limits.h"
#include "server/engine/step_context.h"

namespace fp8kvd::engine {
namespace {

using Op = ControlRequest::Op;

// Of list_after: the device, above the place that its engine gave (control_step.cc).
constexpr int kDeviceShift = 48;
constexpr uint64_t kPlaceMask = (uint64_t{1} << kDeviceShift) - 1;
static_assert(uint64_t{kModelsMax} << 32 < kPlaceMask);

}  // namespace

struct ControlSpread::Part {
  explicit Part(int32_t device_of, Op op) : device(device_of), request(op) {}
  const int32_t device;
  ControlRequest request;
  std::vector<size_t> places;  // of its handles among the whole's
};

ControlSpread::ControlSpread(Fleet* fleet) : fleet_(fleet) {}
ControlSpread::~ControlSpread() = default;

absl::Status ControlSpread::Submit(ControlRequest* whole, const Sender& sender) {
  whole_ = whole;
  sender_ = sender;
  step_ = Step::kWhole;
  parts_.clear();
  seqs_taken_ = 0;
  if (fleet_->devices() == 1) return SubmitWhole(0);
  switch (whole->op) {
    case Op::kCreate:
    case Op::kFork: {
      const int32_t device = whole->op == Op::kFork && !whole->handles.empty()
                                 ? fleet_->DeviceOf(whole->handles.front())
                                 : 0;
      if (!CanPlace(*whole)) return SubmitWhole(device);
      absl::Status status = fleet_->TakeSeqs(sender.tenant, whole->count);
      if (!status.ok()) {
        whole->retry_after_ms = kRoomRetryMs;
        return status;
      }
      seqs_taken_ = whole->count;
      if (whole->op == Op::kFork) return SubmitWhole(device);
      step_ = Step::kCreate;
      made_.assign(static_cast<size_t>(whole->count), {});
      full_.clear();
      SplitCreate();
      break;
    }
    case Op::kList:
      step_ = Step::kList;
      if (whole->count < 1 || whole->count > kItemsMax) whole->count = kItemsMax;
      list_device_ = static_cast<int32_t>(whole->list_after >> kDeviceShift);
      list_after_ = whole->list_after & kPlaceMask;
      if (list_device_ >= fleet_->devices()) return SubmitWhole(0);  // which refuses the token
      SplitList();
      break;
    default:
      step_ = Step::kEach;
      SplitByDevice();
      if (parts_.size() == 1) return SubmitWhole(parts_.front()->device);
      break;
  }
  if (Round() || GoOn()) return absl::OkStatus();
  return whole->status;
}

// Of a request that cannot be placed an engine says what is wrong.
bool ControlSpread::CanPlace(const ControlRequest& request) const {
  const Engine& engine = fleet_->Of(0);
  const bool has_model =
      request.op == Op::kFork ||
      (request.model >= 0 && static_cast<size_t>(request.model) < engine.models().size());
  return has_model && request.count >= 1 && request.count <= kItemsMax &&
         request.expected_tokens >= 0 &&
         request.expected_tokens <= engine.cache_options().seq_len_max;
}

absl::Status ControlSpread::SubmitWhole(int32_t device) {
  step_ = Step::kWhole;
  sender_.Sign(whole_);
  absl::Status status = fleet_->Of(device).Submit(whole_);
  if (!status.ok()) Finish(status, whole_->retry_after_ms);
  return status;
}

bool ControlSpread::Round() {
  join_.Open(sender_.done, static_cast<int32_t>(parts_.size()));
  int32_t refused = 0;
  for (const std::unique_ptr<Part>& part : parts_) {
    sender_.Sign(&part->request);
    part->request.done = &join_;
    if (step_ == Step::kUndo) part->request.deadline = kNoDeadline;
    const absl::Status status = fleet_->Of(part->device).Submit(&part->request);
    if (status.ok()) continue;
    part->request.status = status;
    ++refused;
  }
  return join_.Close(refused);
}

bool ControlSpread::GoOn() {
  bool has_next = true;
  do {
    switch (step_) {
      case Step::kWhole:
        return Finish(whole_->status, whole_->retry_after_ms);
      case Step::kEach:
        JoinEach();
        return false;
      case Step::kCreate:
        has_next = NextOfCreate();
        break;
      case Step::kUndo:
        return Finish(failure_, failure_retry_ms_);
      case Step::kList:
        has_next = NextOfList();
        break;
    }
  } while (has_next && !Round());
  return has_next;
}

void ControlSpread::Cancel() {
  if (step_ == Step::kUndo) return;  // what was made must go
  whole_->cancelled.store(true, std::memory_order_relaxed);
  for (const std::unique_ptr<Part>& part : parts_) {
    part->request.cancelled.store(true, std::memory_order_relaxed);
  }
}

ControlSpread::Part& ControlSpread::AddPart(int32_t device, Op op) {
  parts_.push_back(std::make_unique<Part>(device, op));
  Part& part = *parts_.back();
  part.request.cancelled = whole_->cancelled.load(std::memory_order_relaxed) && op != Op::kFree;
  return part;
}

ControlSpread::Part& ControlSpread::PartOf(int32_t device, Op op) {
  for (const std::unique_ptr<Part>& part : parts_) {
    if (part->device == device) return *part;
  }
  return AddPart(device, op);
}

void ControlSpread::SplitByDevice() {
  for (size_t i = 0; i < whole_->handles.size(); ++i) {
    Part& part = PartOf(fleet_->DeviceOf(whole_->handles[i]), whole_->op);
    part.request.handles.push_back(whole_->handles[i]);
    if (whole_->op == Op::kTruncate) part.request.seq_lens.push_back(whole_->seq_lens[i]);
    part.places.push_back(i);
  }
}

void ControlSpread::JoinEach() {
  const bool has_failed = std::all_of(parts_.begin(), parts_.end(),
                                      [](const auto& part) { return !part->request.status.ok(); });
  if (has_failed) {
    Finish(parts_.front()->request.status, parts_.front()->request.retry_after_ms);
    return;
  }
  const size_t count = whole_->handles.size();
  whole_->item_status.assign(count, absl::OkStatus());
  if (whole_->op == Op::kStat) whole_->infos.assign(count, {});
  int32_t retry_after_ms = 0;
  for (const std::unique_ptr<Part>& part : parts_) {
    ControlRequest& request = part->request;
    retry_after_ms = std::max(retry_after_ms, request.retry_after_ms);
    for (size_t i = 0; i < part->places.size(); ++i) {
      const size_t place = part->places[i];
      whole_->item_status[place] = request.status.ok() ? request.item_status[i] : request.status;
      if (whole_->op == Op::kStat && request.status.ok()) {
        whole_->infos[place] = std::move(request.infos[i]);
      }
    }
  }
  Finish(absl::OkStatus(), retry_after_ms);
}

// Places what is not made yet, on devices that have not said that they are full.
void ControlSpread::SplitCreate() {
  parts_.clear();
  std::vector<size_t> missing;
  for (size_t i = 0; i < made_.size(); ++i) {
    if (made_[i].generation == 0) missing.push_back(i);
  }
  placing_ = fleet_->Place(whole_->model, whole_->expected_tokens,
                           static_cast<int32_t>(missing.size()), full_);
  for (size_t i = 0; i < placing_.devices.size(); ++i) {
    PartOf(placing_.devices[i], Op::kCreate).places.push_back(missing[i]);
  }
  for (const std::unique_ptr<Part>& part : parts_) {
    part->request.model = whole_->model;
    part->request.count = static_cast<int32_t>(part->places.size());
    part->request.expected_tokens = whole_->expected_tokens;
    part->request.ttl_ms = whole_->ttl_ms;
  }
}

bool ControlSpread::NextOfCreate() {
  fleet_->Placed(placing_);
  failure_ = absl::OkStatus();
  for (const std::unique_ptr<Part>& part : parts_) {
    const ControlRequest& request = part->request;
    if (request.status.ok()) {
      for (size_t i = 0; i < part->places.size(); ++i) made_[part->places[i]] = request.handles[i];
      continue;
    }
    full_.push_back(part->device);
    const bool is_final = !absl::IsResourceExhausted(request.status);
    if (failure_.ok() || is_final) {
      failure_ = request.status;
      failure_retry_ms_ = request.retry_after_ms;
    }
  }
  if (failure_.ok()) {
    whole_->ttl_ms = parts_.front()->request.ttl_ms;
    whole_->handles = std::move(made_);
    return Finish(absl::OkStatus(), 0);
  }
  const bool has_others = full_.size() < static_cast<size_t>(fleet_->devices());
  if (!absl::IsResourceExhausted(failure_) || !has_others) return Undo(failure_, failure_retry_ms_);
  SplitCreate();
  return true;
}

bool ControlSpread::Undo(const absl::Status& why, int32_t retry_after_ms) {
  parts_.clear();
  for (const cache::SeqHandle& handle : made_) {
    if (handle.generation == 0) continue;
    PartOf(fleet_->DeviceOf(handle), Op::kFree).request.handles.push_back(handle);
  }
  step_ = Step::kUndo;
  return parts_.empty() ? Finish(why, retry_after_ms) : true;
}

void ControlSpread::SplitList() {
  parts_.clear();
  ControlRequest& request = AddPart(list_device_, Op::kList).request;
  request.model = whole_->model;
  request.count = whole_->count - static_cast<int32_t>(whole_->infos.size());
  request.list_after = list_after_;
}

bool ControlSpread::NextOfList() {
  ControlRequest& request = parts_.front()->request;
  if (!request.status.ok()) return Finish(request.status, request.retry_after_ms);
  std::move(request.infos.begin(), request.infos.end(), std::back_inserter(whole_->infos));
  list_after_ = request.list_next;
  if (list_after_ == 0) ++list_device_;
  const bool is_last = list_device_ == fleet_->devices();
  if (is_last || static_cast<int32_t>(whole_->infos.size()) >= whole_->count) {
    whole_->list_next =
        is_last ? 0 : static_cast<uint64_t>(list_device_) << kDeviceShift | list_after_;
    return Finish(absl::OkStatus(), 0);
  }
  SplitList();
  return true;
}

bool ControlSpread::Finish(const absl::Status& status, int32_t retry_after_ms) {
  whole_->status = status;
  whole_->retry_after_ms = retry_after_ms;
  if (seqs_taken_ > 0) fleet_->GiveBackSeqs(sender_.tenant, std::exchange(seqs_taken_, 0));
  parts_.clear();
  return false;
}

}  // namespace fp8kvd::engine
