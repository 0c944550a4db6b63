// Slices of bulk appends: their rows set out for the device first, and a slice is launched when
// they are there. So no decode behind it waits for the bus.
#include <algorithm>
#include <optional>

#include "server/engine/engine_parts.h"

namespace fp8kvd::engine {
namespace {

// Where decodes always wait, they take each place that comes free. A slice waits for so many of
// their launches, then it goes behind the last one, as one launch more.
constexpr int32_t kDecodesBeforeSlice = 4;

}  // namespace

// One slice a turn, so that a decode waits for a part of it and no more: its rows set out for the
// device, or it is launched, now that they are there. It goes while a decode is under way, or when
// none is about to come.
bool Engine::Parts::MoveAppends(AppendRequest* picked) {
  if (!fault_.ok() || (picked == nullptr && coming_.empty())) return false;
  if (launches_.rows() == 0 && setup_.clock->NowUs() < slices_from_) return false;
  // Full by the decode of this turn.
  if (launches_.is_full() && ++decodes_before_slice_ < kDecodesBeforeSlice) return false;
  if (DropEnded()) return true;  // this turn's look may have ended some
  if (!coming_.empty() && !coming_.Oldest().has_ended() && HasArrived(coming_.Oldest())) {
    LaunchComing(setup_.clock->NowUs());
    return true;
  }
  if (picked == nullptr || coming_.is_full() || !fault_.ok()) return false;
  SetOut(picked);
  return true;
}

bool Engine::Parts::HasArrived(const ComingSlice& slice) {
  if (!slice.bring.has_value()) return true;
  const absl::StatusOr<bool> arrived = setup_.backend->Brought(*slice.bring);
  if (!arrived.ok()) Fail(arrived.status());
  return arrived.ok() && *arrived;
}

void Engine::Parts::SetOut(AppendRequest* append) {
  batcher_.EndTurn(*append);
  const int32_t pieces = append_step_->NextPieces(*append);
  const absl::StatusOr<std::optional<kernels::BringId>> bring =
      append_step_->Bring(*append, pieces);
  if (!bring.ok()) {
    Fail(bring.status());
    return;
  }
  const bool is_next = coming_.empty();
  coming_.Push({.append = append, .pieces = pieces, .bring = *bring});
  append->pieces_coming += pieces;
  ++append->book.running;
  if (is_next && !bring->has_value()) LaunchComing(setup_.clock->NowUs());
}

void Engine::Parts::LaunchComing(TimeUs now) {
  decodes_before_slice_ = 0;
  ComingSlice& slice = coming_.Oldest();
  AppendRequest* const append = slice.append;
  const int32_t pieces_before = append->pieces_done;
  if (pieces_before == 0) {
    stats_.append_queue_us.Observe(
        static_cast<uint64_t>(std::max<TimeUs>(0, now - append->arrived)));
  }
  Launch& launch = launches_.Free();
  launch.items.clear();
  launch.append = append;
  bool has_launched = false;
  const absl::Status status =
      append_step_->Run(append, slice.pieces, slice.bring.has_value(), &has_launched);
  if (has_launched) {
    ++append->book.running;
    launches_.Push();
  }
  const int32_t pieces = append->pieces_done - pieces_before;
  append->pieces_coming -= pieces;
  slice.pieces -= pieces;
  if (append->book.waiting == 0) {
    batcher_.Remove(append);
    answers_->NoteLengths(append);
  }
  if (!status.ok()) {
    Fail(status);
    return;
  }
  if (slice.pieces == 0 || append->book.waiting == 0) EndComing();
  if (has_launched) Take(launch, now);
  PoisonFreed();
}

// The oldest slice has been launched, or shall not be.
void Engine::Parts::EndComing() {
  AppendRequest* const append = coming_.Oldest().append;
  coming_.Pop();
  if (--append->book.running == 0 && append->book.waiting == 0) answers_->EndAppend(append);
}

// Slices of appends that have ended meanwhile: the copy engine reads their rows no more.
bool Engine::Parts::DropEnded() {
  bool has_dropped = false;
  while (fault_.ok() && !coming_.empty() && coming_.Oldest().has_ended() &&
         HasArrived(coming_.Oldest())) {
    EndComing();
    has_dropped = true;
  }
  return has_dropped;
}

}  // namespace fp8kvd::engine
