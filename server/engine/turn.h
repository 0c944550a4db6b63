// server/engine/turn.h: who is the engine now. The engine's state has no lock: it belongs to
// whoever holds the turn, the engine's own thread or a caller that found it free.
//
// Promises: one holder at a time; what a holder wrote, the next one sees. Whoever is turned away
//   after it made work visible (admission.h) may leave: the holder's look for work after End finds
//   it, since Try, End and both sides of the queue are in one order (seq_cst).
// Does not manage: that look, which is the holder's duty; waiting: nobody waits for a turn.
// Threads: any.
#pragma once

#include <atomic>

namespace fp8kvd::engine {

class Turn {
 public:
  bool Try() { return !is_taken_.exchange(true, std::memory_order_seq_cst); }
  void End() { is_taken_.store(false, std::memory_order_seq_cst); }

 private:
  std::atomic<bool> is_taken_{false};
};

}  // namespace fp8kvd::engine
