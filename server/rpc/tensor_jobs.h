// server/rpc/tensor_jobs.h: the jobs of messages with tensors: they hold a staging slot of each
// device that the message concerns from before it is submitted until the reply is made.
#pragma once

#include <optional>
#include <vector>

#include "grpcpp/support/slice.h"

#include "server/engine/staging.h"
#include "server/rpc/job.h"
#include "server/translate/requests.h"

namespace fp8kvd::rpc {

// A message's slices, held while its tensors are read in place.
class MessageSlices {
 public:
  // False where gRPC cannot give them.
  bool Take(grpc::ByteBuffer* message);
  absl::Span<const translate::Piece> pieces() const { return pieces_; }
  void Drop();

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<translate::Piece> pieces_;
};

// One DecodeRequest, of a unary call or of a stream.
class DecodeJob final : public Job {
 public:
  DecodeJob(const Parts* parts, Poller* poller, WorkOwner* owner)
      : Job(parts, poller, owner), spread_(parts->fleet) {}

  Next Begin(grpc::ByteBuffer* message, const Arrival& arrival) override;
  absl::Status Answer(grpc::ByteBuffer* reply) override;
  void Cancel() override { spread_.Cancel(); }

  uint64_t request_id() const { return message_.request_id(); }

 private:
  absl::Status Load(grpc::ByteBuffer* message, cache::TenantId tenant);

  MessageSlices slices_;
  translate::DecodeMessage message_;
  engine::DecodeSpread spread_;
  absl::Status status_;  // why it was not submitted
};

// One chunk of an Append stream. Prepare fills the slot while an earlier chunk is still running;
// Run submits it.
class AppendWork final : public Work {
 public:
  using Work::Work;
  ~AppendWork() override;

  // RESOURCE_EXHAUSTED: no slot is free now; `message` is untouched, so Prepare may be tried again.
  absl::Status Prepare(grpc::ByteBuffer* message, cache::TenantId tenant);
  // After a Prepare that succeeded; ok: OnWork comes.
  absl::Status Run(const Arrival& arrival);
  // After OnWork: the chunk's status, and the slot goes back. request() keeps its place and
  // lengths.
  absl::Status Finish();
  // Gives back what Prepare took, for a chunk that is not run.
  void Drop();
  const engine::AppendRequest& request() const { return message_.request(); }

  void Cancel() override { message_.request().cancelled.store(true, std::memory_order_relaxed); }

 private:
  MessageSlices slices_;
  engine::Engine& engine() const;  // of the message's sequence

  translate::AppendMessage message_;
  std::optional<engine::StagingSlot> slot_;
};

}  // namespace fp8kvd::rpc
