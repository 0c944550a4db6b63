#include "server/engine/batcher.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

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
                 int32_t seqs_max, int32_t tenants)
    : models_(models),
      rows_max_(bounds.rows_max),
      kv_bytes_max_(bounds.kv_bytes_max),
      lines_(tenants),
      blocked_(int64_t{2} * places_max + 1),
      last_turn_(seqs_max, 0) {
  pick_.items.reserve(rows_max_);
  order_.reserve(lines_.size());
}

void Batcher::Add(Request* request) {
  Line& line = LineOf(*request);
  request->book.next = nullptr;
  request->book.prev = line.newest;
  (line.newest == nullptr ? line.oldest : line.newest->book.next) = request;
  line.newest = request;
  const bool is_decode = request->kind == Request::Kind::kDecode;
  ++(is_decode ? line.decodes : line.others);
  ++waiting_;
  if (!is_decode) ++others_;
}

void Batcher::Remove(Request* request) {
  Line& line = LineOf(*request);
  Request* const prev = request->book.prev;
  Request* const next = request->book.next;
  (prev == nullptr ? line.oldest : prev->book.next) = next;
  (next == nullptr ? line.newest : next->book.prev) = prev;
  request->book.next = request->book.prev = nullptr;
  const bool is_decode = request->kind == Request::Kind::kDecode;
  --(is_decode ? line.decodes : line.others);
  --waiting_;
  if (!is_decode) --others_;
}

Request* Batcher::TakeAll() {
  Request* all = nullptr;
  for (Line& line : lines_) {
    if (line.newest != nullptr) {
      line.newest->book.next = all;
      all = line.oldest;
    }
    line = Line{};
  }
  waiting_ = others_ = 0;
  return all;
}

void Batcher::EndTurn(const AppendRequest& append) {
  last_turn_[static_cast<uint32_t>(append.seq)] = ++turns_;
  LineOf(append).append_turn = turns_;
}

void Batcher::EndRound(absl::Span<const BatchItem> launched) {
  if (launched.empty()) return;
  LineOf(*launched.front().request).led = ++rounds_;
  if (kv_bytes_part_ == 0) return;
  for (const BatchItem& batch_item : launched) {
    LineOf(*batch_item.request).kv_bytes_owed += KvBytesOf(*batch_item.request, batch_item.item());
  }
  for (Line& line : lines_) {
    const int64_t least = line.oldest != nullptr && line.has_more ? -kv_bytes_max_ : 0;
    line.kv_bytes_owed = std::max(least, line.kv_bytes_owed - kv_bytes_part_);
  }
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
  controls_tail_ = &pick_.controls;
  ended_tail_ = &pick_.ended;
  blocked_.Clear();
  ShareRoom();
  for (Line* const line : order_) LookAlong(*line, now);
  return pick_;
}

// Which lines wait, in which order they are looked at, and what each may take.
void Batcher::ShareRoom() {
  order_.clear();
  int64_t sharers = 0;
  int64_t owed_min = std::numeric_limits<int64_t>::max();
  for (Line& line : lines_) {
    if (line.oldest == nullptr) continue;
    order_.push_back(&line);
    line.controls_left = kControlsMax;
    line.has_more = false;
    if (line.decodes == 0) continue;
    ++sharers;
    owed_min = std::min(owed_min, line.kv_bytes_owed);
  }
  kv_bytes_part_ = sharers < 2 ? 0 : std::max<int64_t>(1, kv_bytes_max_ / sharers);
  for (Line* const line : order_) {
    if (kv_bytes_part_ == 0) {
      line->kv_bytes_left = kv_bytes_max_;
      continue;
    }
    // What all of them owe would only make all of them wait.
    if (owed_min > 0) line->kv_bytes_owed = std::max<int64_t>(0, line->kv_bytes_owed - owed_min);
    line->kv_bytes_left = std::max<int64_t>(0, kv_bytes_part_ - line->kv_bytes_owed);
  }
  if (order_.size() < 2) return;
  // Those that owe nothing are alike: they lead in turn.
  const auto rank = [](const Line* line) {
    return std::make_pair(std::max<int64_t>(0, line->kv_bytes_owed), line->led);
  };
  std::sort(order_.begin(), order_.end(),
            [&rank](const Line* a, const Line* b) { return rank(a) < rank(b); });
}

void Batcher::LookAlong(Line& line, TimeUs now) {
  Request* next = nullptr;
  int64_t others_left = line.others;
  for (Request* request = line.oldest; request != nullptr; request = next) {
    next = request->book.next;
    if (pick_.items.size() == rows_max_ && others_left == 0) {
      line.has_more = true;
      break;
    }
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
      LineOf(*request).has_more = true;
      blocked_.Insert(key);
    }
    blocked_.Insert(Key(item.seq, kAnyWork));
  }
}

int64_t Batcher::KvBytesOf(const DecodeRequest& request, const DecodeItem& item) const {
  const LayerGroup& group = (*models_)[request.model].GroupOf(request.layer);
  return KeysSeen(group, item.pos, item.q_len) * item.q_len * group.kv_heads *
         KvBytesPerToken(group.precision, group.head_dim);
}

// Takes the room, too. The first always has it; where lines share, it takes of its own part.
bool Batcher::HasRoom(const DecodeRequest& request, const DecodeItem& item) {
  Line& line = LineOf(request);
  if (pick_.items.empty() && kv_bytes_part_ == 0) return true;
  const int64_t kv_bytes = KvBytesOf(request, item);
  if (!pick_.items.empty() &&
      (pick_.items.size() == rows_max_ || kv_bytes > line.kv_bytes_left / kRoomParts)) {
    pick_.has_passed_over = true;
    return false;
  }
  line.kv_bytes_left = std::max<int64_t>(0, line.kv_bytes_left - kv_bytes);
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
  if (!is_eligible || request->pieces_coming == request->book.waiting) return;
  const auto turn_of = [this](const AppendRequest& append) {
    return std::make_pair(LineOf(append).append_turn,
                          last_turn_[static_cast<uint32_t>(append.seq)]);
  };
  if (pick_.append == nullptr || turn_of(*request) < turn_of(*pick_.append)) {
    pick_.append = request;
  }
}

void Batcher::LookAtControl(ControlRequest* request) {
  bool is_eligible = LineOf(*request).controls_left > 0;
  for (const cache::SeqIndex seq : request->held) {
    is_eligible = is_eligible && !blocked_.Contains(Key(seq, kAnyWork));
  }
  if (is_eligible) {
    --LineOf(*request).controls_left;
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
