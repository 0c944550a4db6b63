// server/rpc/append_call.h: an Append stream: chunks run one after the other; the next is copied
// into its slot and digested while one runs, and the one after it read.
//
// Promises: never more than two chunks in slots and one message unread. When no slot is free it
//   waits for one without reading on (a deadline or a cancel ends that). A stream that breaks gives
//   back its slots; what it committed stays. A stream that fails is read on, and what comes is
//   dropped, until its client has sent all, kLastReadsMs at most: an answer before that makes gRPC
//   reset the stream behind it, for which some proxies (HAProxy 2.6) drop the answer.
// Threads: its poller's.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "grpcpp/alarm.h"
#include "grpcpp/support/async_stream.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/rpc/call.h"
#include "server/rpc/tensor_jobs.h"

namespace fp8kvd::rpc {

class AppendCall final : public Call, private WorkOwner {
 public:
  // (sequence, layer) pairs that one stream may name: its reply lists them all.
  static constexpr size_t kPlacesMax = size_t{1} << 16;
  static constexpr int32_t kLastReadsMs = 500;

  explicit AppendCall(MethodSlot* slot);

 private:
  void Request(Event* arrived) override;
  void OnArrived() override;
  void OnCancelled() override;
  void OnWork(Work* work) override;
  void OnDrain() override;
  void FinishWith(const absl::Status& status, int32_t retry_after_ms) override;
  void Reset() override;
  bool IsBusy() const override {
    return reading_ || waiting_for_slot_ || has_last_reads_ || loading_ != nullptr ||
           running_ != nullptr;
  }
  Call* Another() const override { return new AppendCall(&slot()); }

  void OnRead(bool ok);
  void OnSlotAlarm(bool ok);
  void OnLastReadsAlarm(bool ok);
  void ReadMore();
  void PrepareChunk();
  void OnLoaded(const absl::Status& status);
  void OnRan(const absl::Status& status);
  void RunNext();
  void Note(const engine::AppendRequest& request);
  void Fail(const absl::Status& status, int32_t retry_after_ms);
  bool ReadsOn();
  void FinishIfOver();

  std::array<AppendWork, 2> works_;
  AppendWork* running_ = nullptr;
  AppendWork* loading_ = nullptr;  // on its way into its slot
  AppendWork* ready_ = nullptr;    // prepared, runs next
  bool reading_ = false;
  bool has_message_ = false;       // message_ is read and not yet prepared
  bool waiting_for_slot_ = false;  // for it there was none
  bool read_all_ = false;
  bool has_last_reads_ = false;  // their alarm is to come
  bool are_last_reads_over_ = false;
  absl::Status failure_;
  int32_t failure_retry_after_ms_ = 0;
  grpc::ByteBuffer message_;
  v1::AppendResponse response_;
  struct Place {
    cache::SeqHandle handle;
    int32_t layer;
    template <typename H>
    friend H AbslHashValue(H h, const Place& place) {
      return H::combine(std::move(h), place.handle.seq_id, place.handle.generation, place.layer);
    }
    bool operator==(const Place&) const = default;
  };
  absl::flat_hash_map<Place, int> places_;  // index into response_.committed
  std::optional<grpc::ServerAsyncReader<grpc::ByteBuffer, grpc::ByteBuffer>> reader_;
  grpc::ByteBuffer reply_;
  grpc::Alarm slot_alarm_;
  grpc::Alarm last_reads_alarm_;
  MemberEvent<AppendCall> on_read_;
  MemberEvent<AppendCall> on_slot_alarm_;
  MemberEvent<AppendCall> on_last_reads_alarm_;
};

}  // namespace fp8kvd::rpc
