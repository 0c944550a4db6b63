// server/rpc/tensor_jobs.h: the jobs of messages with tensors: they hold a staging slot of each
// device that the message concerns from before it is submitted until the reply is made. Rows that
// are few are copied on the poller, others by a copier (copiers.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "grpcpp/support/slice.h"

#include "server/engine/staging.h"
#include "server/rpc/copiers.h"
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
class DecodeJob final : public Job, private Copiers::Task {
 public:
  DecodeJob(const Parts* parts, Poller* poller, WorkOwner* owner)
      : Job(parts, poller, owner), spread_(parts->fleet) {}

  Next Begin(grpc::ByteBuffer* message, const Arrival& arrival) override;
  absl::Status Answer(grpc::ByteBuffer* reply) override;
  void Cancel() override { spread_.Cancel(); }

  uint64_t request_id() const { return message_.request_id(); }
  // Begin left its rows to a copier, and it is not submitted yet.
  bool is_loading() const { return is_loading_; }

 private:
  enum class Stage : uint8_t { kLoading, kRunning, kReplying };  // what it waits for

  absl::Status Take(grpc::ByteBuffer* message, cache::TenantId tenant);
  void Load();
  bool Submit();
  void MakeReply();
  void NoteEnd();
  bool GoesOn() override;
  void Copy() override;

  MessageSlices slices_;
  translate::DecodeMessage message_;
  engine::DecodeSpread spread_;
  Stage stage_ = Stage::kRunning;
  bool is_loading_ = false;
  bool is_watched_ = false;  // by the poller
  Arrival arrival_;
  grpc::ByteBuffer reply_;
  absl::Status status_;  // why there is no reply
};

// One chunk of an Append stream: Prepare takes a slot and fills it, while an earlier chunk may be
// running, and Run submits it.
class AppendWork final : public Work, private Copiers::Task {
 public:
  using Work::Work;
  ~AppendWork() override;

  // RESOURCE_EXHAUSTED: no slot is free now; `message` is untouched, so it may be tried again.
  absl::Status Prepare(grpc::ByteBuffer* message, cache::TenantId tenant);
  // After that, if it is_large(): the slot is still to be filled, by a copier, and OnWork comes.
  // `arrival`: then it is run, too, and Finish says how all went; null: FinishLoading says it.
  bool is_large() const { return message_.slot_bytes() >= Copiers::kBytesMin; }
  void Load(const Arrival* arrival);
  absl::Status FinishLoading();
  // Once it is in its slot; ok: OnWork comes.
  absl::Status Run(const Arrival& arrival);
  // After OnWork: the chunk's status, and the slot goes back. request() keeps its place and
  // lengths.
  absl::Status Finish();
  // Gives back what Prepare took, for a chunk that is not run.
  void Drop();
  const engine::AppendRequest& request() const { return message_.request(); }

  void Cancel() override { message_.request().cancelled.store(true, std::memory_order_relaxed); }

 private:
  engine::Engine& engine() const;  // of the message's sequence
  void Copy() override;

  MessageSlices slices_;
  translate::AppendMessage message_;
  std::optional<engine::StagingSlot> slot_;
  absl::Status loaded_;  // and, by a copier, submitted
  std::optional<Arrival> arrival_;
};

}  // namespace fp8kvd::rpc
