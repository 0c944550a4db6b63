#include "server/engine/batcher.h"

#include <bit>

#include "config/base/check.h"

namespace fp8kvd::engine {
namespace {

// Marks of a sequence beside those of its layers.
constexpr uint32_t kAnyWork = UINT32_MAX;      // something on it is older: a control request waits
constexpr uint32_t kControl = UINT32_MAX - 1;  // a control request is older: everything waits

// An item joins a launch that has room for so many of its size.
constexpr int64_t kRoomParts = 4;

uint64_t Key(cache::SeqIndex seq, uint32_t layer_or_mark) {
  return uint64_t{static_cast<uint32_t>(seq)} << 32 | layer_or_mark;
}

}  // namespace

KeySet::KeySet(int64_t keys_max) : entries_(std::bit_ceil(static_cast<uint64_t>(2 * keys_max))) {}

size_t KeySet::Find(uint64_t key) const {
  const size_t mask = entries_.size() - 1;
  size_t at = (key * 0x9E3779B97F4A7C15u) >> 32 & mask;
  while (entries_[at].round == round_ && entries_[at].key != key) at = (at + 1) & mask;
  return at;
}

void KeySet::Insert(uint64_t key) { entries_[Find(key)] = Entry{.key = key, .round = round_}; }

bool KeySet::Contains(uint64_t key) const { return entries_[Find(key)].round == round_; }

// Each place in the queue marks its own (sequence, layer) and its sequence at most; an append marks
// its layers, one place each, and its sequence.
Batcher::Batcher(const std::vector<ModelSetup>* models, Bounds bounds, int32_t places_max,
                 int32_t seqs_max)
    : models_(models),
      rows_max_(bounds.rows_max),
      kv_bytes_max_(bounds.kv_bytes_max),
      blocked_(int64_t{2} * places_max + 1),
      last_turn_(seqs_max, 0) {
  pick_.items.reserve(rows_max_);
}

void Batcher::Add(Request* request) {
  request->book.next = nullptr;
  request->book.prev = newest_;
  (newest_ == nullptr ? oldest_ : newest_->book.next) = request;
  newest_ = request;
  if (request->kind != Request::Kind::kDecode) ++others_;
}

void Batcher::Remove(Request* request) {
  Request* const prev = request->book.prev;
  Request* const next = request->book.next;
  (prev == nullptr ? oldest_ : prev->book.next) = next;
  (next == nullptr ? newest_ : next->book.prev) = prev;
  request->book.next = request->book.prev = nullptr;
  if (request->kind != Request::Kind::kDecode) --others_;
}

Request* Batcher::TakeAll() {
  Request* const all = oldest_;
  oldest_ = newest_ = nullptr;
  others_ = 0;
  return all;
}

void Batcher::EndTurn(const AppendRequest& append) {
  last_turn_[static_cast<uint32_t>(append.seq)] = ++turns_;
}

DecodeShape Batcher::ShapeOf(const DecodeRequest& request) const {
  const ModelSetup& model = (*models_)[request.model];
  const LayerGroup& group = model.GroupOf(request.layer);
  return DecodeShape{.head_dim = group.head_dim,
                     .group = model.geometry.q_heads / group.kv_heads,
                     .precision = group.precision,
                     .out_type = request.out_type};
}

const Batcher::Pick& Batcher::Look(TimeUs now) {
  pick_.items.clear();
  pick_.append = nullptr;
  pick_.controls = nullptr;
  pick_.ended = nullptr;
  pick_.has_passed_over = false;
  kv_bytes_left_ = kv_bytes_max_;
  controls_tail_ = &pick_.controls;
  ended_tail_ = &pick_.ended;
  blocked_.Clear();
  Request* next = nullptr;
  int64_t others_left = others_;
  for (Request* request = oldest_; request != nullptr; request = next) {
    next = request->book.next;
    if (pick_.items.size() == rows_max_ && others_left == 0) break;
    if (request->kind != Request::Kind::kDecode) --others_left;
    if (EndIfLate(request, now)) continue;
    switch (request->kind) {
      case Request::Kind::kDecode:
        LookAtDecode(static_cast<DecodeRequest*>(request));
        break;
      case Request::Kind::kAppend:
        LookAtAppend(static_cast<AppendRequest*>(request));
        break;
      case Request::Kind::kControl:
        LookAtControl(static_cast<ControlRequest*>(request));
        break;
    }
  }
  return pick_;
}

bool Batcher::EndIfLate(Request* request, TimeUs now) {
  if (!request->cancelled.load(std::memory_order_relaxed) && request->deadline > now) return false;
  Remove(request);
  *ended_tail_ = request;
  ended_tail_ = &request->book.next;
  return true;
}

void Batcher::LookAtDecode(DecodeRequest* request) {
  const DecodeShape shape = ShapeOf(*request);
  for (int32_t i = 0; i < static_cast<int32_t>(request->items.size()); ++i) {
    const DecodeItem& item = request->items[i];
    if (item.stage != DecodeItem::Stage::kWaiting) continue;
    const uint64_t key = Key(item.seq, request->layer);
    const bool is_eligible = !blocked_.Contains(key) && !blocked_.Contains(Key(item.seq, kControl));
    if (is_eligible && pick_.items.empty()) {
      pick_.shape = shape;
      pick_.oldest_arrived = request->arrived;
    }
    if (is_eligible && shape == pick_.shape && HasRoom(*request, item)) {
      pick_.items.push_back(BatchItem{.request = request, .index = i});
    } else {
      blocked_.Insert(key);
    }
    blocked_.Insert(Key(item.seq, kAnyWork));
  }
}

// Takes the room, too.
bool Batcher::HasRoom(const DecodeRequest& request, const DecodeItem& item) {
  if (pick_.items.empty()) return true;
  const LayerGroup& group = (*models_)[request.model].GroupOf(request.layer);
  const int64_t kv_bytes = KeysSeen(group, item.pos, item.q_len) * item.q_len * group.kv_heads *
                           KvBytesPerToken(group.precision, group.head_dim);
  if (pick_.items.size() == rows_max_ || kv_bytes > kv_bytes_left_ / kRoomParts) {
    pick_.has_passed_over = true;
    return false;
  }
  kv_bytes_left_ -= kv_bytes;
  return true;
}

void Batcher::LookAtAppend(AppendRequest* request) {
  bool is_eligible = !blocked_.Contains(Key(request->seq, kControl));
  for (int32_t layer = request->layer; layer < request->layer + request->layers_count; ++layer) {
    const uint64_t key = Key(request->seq, layer);
    is_eligible = is_eligible && !blocked_.Contains(key);
    blocked_.Insert(key);
  }
  blocked_.Insert(Key(request->seq, kAnyWork));
  if (!is_eligible) return;
  if (pick_.append == nullptr || last_turn_[static_cast<uint32_t>(request->seq)] <
                                     last_turn_[static_cast<uint32_t>(pick_.append->seq)]) {
    pick_.append = request;
  }
}

void Batcher::LookAtControl(ControlRequest* request) {
  bool is_eligible = true;
  for (const cache::SeqIndex seq : request->held) {
    is_eligible = is_eligible && !blocked_.Contains(Key(seq, kAnyWork));
  }
  if (is_eligible) {
    Remove(request);
    *controls_tail_ = request;
    controls_tail_ = &request->book.next;
    return;
  }
  for (const cache::SeqIndex seq : request->held) {
    blocked_.Insert(Key(seq, kAnyWork));
    blocked_.Insert(Key(seq, kControl));
  }
}

}  // namespace fp8kvd::engine
