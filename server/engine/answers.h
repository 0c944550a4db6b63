// server/engine/answers.h: how a request ends: its sequences let go, its places given back, its
// call told.
//
// Promises: every request that Intake took is told exactly once, and only after the counters that
//   include it were published, so a caller that has its answer finds it counted.
// Threads: the engine's, but for Published.
#pragma once

#include <mutex>

#include "absl/status/status.h"

#include "server/engine/admission.h"
#include "server/engine/step_context.h"

namespace fp8kvd::engine {

class Answers {
 public:
  Answers(const StepContext& context, Admission* admission);

  // The item has its status, or its rows are ready. Ends the request with its last item.
  void CloseItem(DecodeRequest* request, DecodeItem* item);
  // What still waits of the request ends with this status; it is out of the batcher already.
  void EndWaiting(Request* request, const absl::Status& status);
  // Nothing of an append waits any more: what is committed now is what it reports.
  void NoteLengths(AppendRequest* request) const;
  // Nothing of it runs either.
  void EndAppend(AppendRequest* request);
  void EndControl(ControlRequest* request);
  // Without looking at the store, which is of no use after a device fault.
  void EndAfterFault(Request* request, const absl::Status& status);

  // Publishes the counters, then tells all that ended.
  void Tell();
  EngineStats Published() const;

 private:
  void End(Request* request);
  void Publish();

  const StepContext context_;
  Admission* const admission_;
  Request* ended_ = nullptr;  // linked by book.next
  Request** ended_tail_ = &ended_;

  mutable std::mutex mutex_;
  EngineStats published_;  // guarded by mutex_
};

}  // namespace fp8kvd::engine
