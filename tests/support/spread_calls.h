// tests/support/spread_calls.h: calls of tests to the engines of several devices (engine_calls.h
// has those to one).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "config/base/check.h"
#include "server/engine/control_spread.h"
#include "server/engine/fleet.h"
#include "server/engine/spread.h"
#include "tests/support/engine_calls.h"

namespace fp8kvd::testing {

// As rpc::ControlJob has it: rounds go on as they end.
class SpreadControlCall {
 public:
  SpreadControlCall(engine::Fleet* fleet, engine::ControlRequest::Op op)
      : request(op), spread_(fleet) {}
  absl::Status Submit() {
    return spread_.Submit(&request, {.done = &rounds_,
                                     .tenant = request.tenant,
                                     .arrived = request.arrived,
                                     .deadline = request.deadline});
  }
  bool done() { return times_done() > 0; }
  int32_t times_done() {
    for (; rounds_seen_ < rounds_.times(); ++rounds_seen_) ends_ += spread_.GoOn() ? 0 : 1;
    return ends_;
  }
  void Cancel() { spread_.Cancel(); }

  engine::ControlRequest request;

 private:
  engine::ControlSpread spread_;
  CountedDone rounds_;
  int32_t rounds_seen_ = 0;
  int32_t ends_ = 0;
};

// Its items, grouped by device, as translate::DecodeMessage groups them: each group's rows are
// those of a DecodeCall of its own, whose request and slot stand in for the part's.
class SpreadDecodeCall {
 public:
  SpreadDecodeCall(engine::Fleet* fleet, int32_t model, int32_t layer, std::vector<ItemSpec> items,
                   kernels::OutType out_type = kernels::OutType::kBf16)
      : spread_(fleet) {
    places_.resize(items.size());
    for (int32_t device = 0; device < fleet->devices(); ++device) {
      std::vector<ItemSpec> mine;
      for (size_t i = 0; i < items.size(); ++i) {
        if (fleet->DeviceOf(items[i].handle) != device) continue;
        places_[i] = {calls_.size(), static_cast<int32_t>(mine.size())};
        mine.push_back(items[i]);
      }
      if (mine.empty()) continue;
      calls_.push_back(std::make_unique<DecodeCall>(&fleet->Of(device), model, layer,
                                                    std::move(mine), out_type));
      DecodeCall& call = *calls_.back();
      parts_.push_back(std::make_unique<engine::DecodePart>());
      engine::DecodePart& part = *parts_.back();
      part.device = device;
      part.slot_bytes = 1;  // the rows are in the DecodeCall's slot
      part.request.model = model;
      part.request.layer = layer;
      part.request.items = absl::MakeSpan(call.items);
      part.request.q = call.request.q;
      part.request.k = call.request.k;
      part.request.v = call.request.v;
      part.request.out = call.request.out;
      part.request.lse = call.request.lse;
      part.request.out_type = out_type;
      part_pointers_.push_back(&part);
    }
  }
  ~SpreadDecodeCall() { spread_.Release(); }
  SpreadDecodeCall(const SpreadDecodeCall&) = delete;
  SpreadDecodeCall& operator=(const SpreadDecodeCall&) = delete;

  absl::Status Submit() {
    FP8KVD_CHECK(spread_.AcquireSlots(part_pointers_, facts.tenant).ok());
    engine::Sender sender = facts;
    sender.done = &done_;
    return spread_.Submit(sender);
  }
  void Cancel() { spread_.Cancel(); }
  bool done() const { return done_.times() > 0; }
  int32_t times_done() const { return done_.times(); }

  // Once done.
  absl::Status status() {
    for (size_t i = 0; i < calls_.size(); ++i) {
      calls_[i]->request.status = parts_[i]->request.status;  // of each, for who judges items
    }
    return spread_.Finish();
  }
  int32_t retry_after_ms() const { return spread_.retry_after_ms(); }
  absl::Status ItemStatus(int32_t item) const { return ItemOf(item).status; }
  int32_t ItemRetryMs(int32_t item) const { return ItemOf(item).retry_after_ms; }
  std::string Check(int32_t item, std::vector<uint64_t> history) const {
    return CallOf(item).Check(places_[static_cast<size_t>(item)].second, history);
  }
  // The part of an item, and its number there.
  const DecodeCall& CallOf(int32_t item) const {
    return *calls_[places_[static_cast<size_t>(item)].first];
  }
  size_t parts() const { return parts_.size(); }
  int32_t NumberOf(int32_t item) const { return places_[static_cast<size_t>(item)].second; }
  void Scribble() const {
    for (const auto& call : calls_) call->Scribble();
  }

  engine::Sender facts;  // tenant, times

 private:
  const engine::DecodeItem& ItemOf(int32_t item) const {
    return CallOf(item).items[static_cast<size_t>(NumberOf(item))];
  }

  engine::DecodeSpread spread_;
  std::vector<std::unique_ptr<DecodeCall>> calls_;
  std::vector<std::unique_ptr<engine::DecodePart>> parts_;
  std::vector<engine::DecodePart*> part_pointers_;
  std::vector<std::pair<size_t, int32_t>> places_;  // [items] call, item in it
  CountedDone done_;
};

}  // namespace fp8kvd::testing
