#include "cache/lease_queue.h"

#include "config/base/check.h"

namespace fp8kvd::cache {
namespace {

// The sequence number settles ties, so that the order depends on the calls alone.
bool Earlier(int64_t a_ms, uint32_t a_seq, int64_t b_ms, uint32_t b_seq) {
  return a_ms != b_ms ? a_ms < b_ms : a_seq < b_seq;
}

}  // namespace

LeaseQueue::LeaseQueue(int32_t seqs_max)
    : at_(static_cast<size_t>(seqs_max), kNotQueued), end_ms_(static_cast<size_t>(seqs_max), 0) {
  heap_.reserve(static_cast<size_t>(seqs_max));
}

void LeaseQueue::Place(int32_t at, Entry entry) {
  heap_[static_cast<size_t>(at)] = entry;
  at_[entry.seq] = at;
}

void LeaseQueue::SiftUp(int32_t at) {
  const Entry entry = heap_[static_cast<size_t>(at)];
  while (at > 0) {
    const Entry& parent = heap_[static_cast<size_t>((at - 1) / 2)];
    if (!Earlier(entry.key_ms, entry.seq, parent.key_ms, parent.seq)) break;
    Place(at, parent);
    at = (at - 1) / 2;
  }
  Place(at, entry);
}

void LeaseQueue::SiftDown(int32_t at) {
  const Entry entry = heap_[static_cast<size_t>(at)];
  const auto count = static_cast<int32_t>(heap_.size());
  for (;;) {
    int32_t child = 2 * at + 1;
    if (child >= count) break;
    const Entry* next = &heap_[static_cast<size_t>(child)];
    if (child + 1 < count) {
      const Entry* right = &heap_[static_cast<size_t>(child) + 1];
      if (Earlier(right->key_ms, right->seq, next->key_ms, next->seq)) {
        next = right;
        ++child;
      }
    }
    if (!Earlier(next->key_ms, next->seq, entry.key_ms, entry.seq)) break;
    Place(at, *next);
    at = child;
  }
  Place(at, entry);
}

void LeaseQueue::Set(SeqIndex seq, int64_t end_ms) {
  const auto index = static_cast<uint32_t>(seq);
  FP8KVD_CHECK(index < at_.size());
  end_ms_[index] = end_ms;
  if (at_[index] == kNotQueued) {
    at_[index] = static_cast<int32_t>(heap_.size());
    heap_.push_back({.key_ms = end_ms, .seq = index});
    SiftUp(at_[index]);
    return;
  }
  Entry& entry = heap_[static_cast<size_t>(at_[index])];
  if (end_ms >= entry.key_ms) return;  // a later end waits for PopEnded to meet it
  entry.key_ms = end_ms;
  SiftUp(at_[index]);
}

void LeaseQueue::RemoveAt(int32_t at) {
  at_[heap_[static_cast<size_t>(at)].seq] = kNotQueued;
  const Entry last = heap_.back();
  heap_.pop_back();
  if (static_cast<size_t>(at) == heap_.size()) return;
  Place(at, last);
  SiftUp(at);
  SiftDown(at_[last.seq]);
}

void LeaseQueue::Remove(SeqIndex seq) {
  const auto index = static_cast<uint32_t>(seq);
  FP8KVD_CHECK(index < at_.size());
  if (at_[index] != kNotQueued) RemoveAt(at_[index]);
}

bool LeaseQueue::PopEnded(int64_t now_ms, int32_t* steps_left, SeqIndex* seq) {
  while (*steps_left > 0 && !heap_.empty() && heap_.front().key_ms <= now_ms) {
    --*steps_left;
    const uint32_t index = heap_.front().seq;
    if (end_ms_[index] <= now_ms) {
      RemoveAt(0);
      *seq = static_cast<SeqIndex>(index);
      return true;
    }
    heap_.front().key_ms = end_ms_[index];
    SiftDown(0);
  }
  return false;
}

}  // namespace fp8kvd::cache
