// server/rpc/call.h: what the three kinds of call share: they listen for one call of one method,
// live on one poller until it is finished, and then listen again.
//
// Life of a call object: Listen -> (the call arrives) -> OnArrived -> ... -> the status was sent,
// and gRPC said that the call has ended -> Listen again, or the object goes when the server shuts
// down. A call that the client cancelled is finished like any other: gRPC's shutdown waits for it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "grpcpp/server_context.h"

#include "server/ops/metrics.h"
#include "server/rpc/job.h"
#include "server/rpc/poller.h"

namespace fp8kvd::rpc {

class Call;
class RawService;

// Who may call an rpc. Which is whose stands in one table, in services.cc.
enum class Access : uint8_t {
  kAnyone,  // no token, for it tells and changes nothing that is a tenant's
  kTenant,  // needs a token where the daemon has tokens, and sees what is its tenant's
};

// One rpc of the service, on one poller; only that poller's thread touches it.
struct MethodSlot {
  RawService* service = nullptr;
  int index = 0;  // of the method, as proto declares it
  Parts* parts = nullptr;
  Poller* poller = nullptr;
  ops::MethodMetrics* metrics = nullptr;
  Access access = Access::kTenant;
  // Objects that listen. A call that arrives and leaves none makes one more, so that the next need
  // not wait; more than kListeningMax idle ones are not kept.
  static constexpr int kListeningMax = 64;
  int listening = 0;
  absl::flat_hash_set<Call*> open;  // that have arrived and are not over
};

class Call {
 public:
  explicit Call(MethodSlot* slot);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void Listen();
  void Drain() { OnDrain(); }
  // So many times within reader_stall_ms_max: cancels a call whose client takes nothing.
  static constexpr int kSweeps = 4;
  void Sweep();

 protected:
  virtual ~Call() = default;

  virtual void Request(Event* arrived) = 0;  // asks gRPC for one call
  virtual void OnArrived() = 0;              // one is there
  virtual void OnCancelled() = 0;            // the client went, or its deadline passed
  // Ends the call with an error.
  virtual void FinishWith(const absl::Status& status, int32_t retry_after_ms) = 0;
  virtual void OnDrain() {}  // new work is refused from now on
  virtual void Reset() = 0;  // to the state before Request
  // Operations or work are under way whose events are still to come.
  virtual bool IsBusy() const = 0;
  // A reply is under way to the client; TookReply when one has got there.
  virtual bool IsWriting() const { return false; }
  void TookReply() { sweeps_stalled_ = 0; }
  // Another object of the same kind for the same slot.
  virtual Call* Another() const = 0;

  // The call's status is on its way; `finished` is the tag to give to gRPC.
  Event* Finishing(const grpc::Status& status, int32_t retry_after_ms);
  bool finishing() const { return finishing_; }
  bool cancelled() const { return cancelled_; }

  MethodSlot& slot() const { return *slot_; }
  const Parts& parts() const { return *slot_->parts; }
  grpc::ServerContext& context() { return *context_; }
  cache::TenantId tenant() const { return tenant_; }
  Arrival ArrivalNow() const;  // of a message of this call
  // The last line of every event of a subclass: the object may be gone after it.
  void RetireIfOver();

 private:
  void Arrived(bool ok);
  absl::Status Identify();  // fills tenant_
  absl::Status Admit();     // counts the call
  absl::Status AdmitAnyone();
  void Ended(bool ok);
  void Finished(bool ok);

  MethodSlot* const slot_;
  std::optional<grpc::ServerContext> context_;
  cache::TenantId tenant_{0};  // who calls
  bool is_tenants_ = false;    // counted among the tenant's
  engine::TimeUs arrived_ = 0;
  bool finishing_ = false;
  bool finished_ = false;
  bool ended_ = false;
  bool cancelled_ = false;
  int sweeps_stalled_ = 0;
  MemberEvent<Call> on_arrived_;
  MemberEvent<Call> on_ended_;
  MemberEvent<Call> on_finished_;
};

}  // namespace fp8kvd::rpc
