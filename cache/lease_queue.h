// cache/lease_queue.h: which leases have ended by a given now.
//
// Promises: PopEnded gives every queued sequence whose lease ends at or before now, and no other,
//   in an order that depends on the calls alone.
// Does not manage: a clock (now is given), or what becomes of a sequence whose lease ended.
// Threads: one caller at a time. Cost: Set is O(1) when it extends a lease (the usual case: every
//   message renews), else O(log n); PopEnded is O(log n) a step. No allocation once constructed.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/ids.h"

namespace fp8kvd::cache {

class LeaseQueue {
 public:
  explicit LeaseQueue(int32_t seqs_max);

  // Queues seq, or changes when its lease ends.
  void Set(SeqIndex seq, int64_t end_ms);
  // Takes seq out; it need not be queued.
  void Remove(SeqIndex seq);
  // Takes one step: true if it took out a sequence whose lease ended by now_ms, in *seq. Counts the
  // step against *steps_left, and stops there: false may mean that steps ran out.
  bool PopEnded(int64_t now_ms, int32_t* steps_left, SeqIndex* seq);

 private:
  static constexpr int32_t kNotQueued = -1;
  struct Entry {
    int64_t key_ms = 0;  // <= the lease's end: renewals leave it behind, PopEnded catches up
    uint32_t seq = 0;
  };
  void SiftUp(int32_t at);
  void SiftDown(int32_t at);
  void Place(int32_t at, Entry entry);
  void RemoveAt(int32_t at);

  std::vector<Entry> heap_;      // binary heap by key_ms, then seq
  std::vector<int32_t> at_;      // [seqs_max] place in heap_, or kNotQueued
  std::vector<int64_t> end_ms_;  // [seqs_max]
};

}  // namespace fp8kvd::cache
