// server/engine/intake.h: from the queue to what waits: looks up the sequences that a request
// names, starts their leases anew and holds them until the request has its answer.
//
// A held sequence does not expire, and its index and pages stay. It may still be freed by a client
// before the request's turn; the steps look again, and the item is NOT_FOUND then.
// Threads: the engine's.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "server/engine/answers.h"
#include "server/engine/batcher.h"
#include "server/engine/step_context.h"

namespace fp8kvd::engine {

class Intake {
 public:
  Intake(const StepContext& context, Batcher* batcher, Answers* answers)
      : context_(context), batcher_(batcher), answers_(answers) {}

  // Takes requests linked by book.next. What can be answered at once is.
  void Take(Request* requests, int64_t now_ms);

 private:
  void TakeDecode(DecodeRequest* request, int64_t now_ms);
  void TakeAppend(AppendRequest* request, int64_t now_ms);
  void TakeControl(ControlRequest* request, int64_t now_ms);
  absl::StatusOr<cache::SeqIndex> FindOf(const cache::SeqHandle& handle, const Request& request,
                                         int32_t model) const;

  const StepContext context_;
  Batcher* const batcher_;
  Answers* const answers_;
};

}  // namespace fp8kvd::engine
