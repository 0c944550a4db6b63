// client/cc/core.h: what the calls of one client share: the channel, the rule of retries, and the
// thread that renews leases. Private to client/cc.
// Threads: everything may be called from anywhere. mu_ guards the leases and is never held over a
// call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

#include "client/cc/shared_session.h"
#include "client/cc/types.h"
#include "fp8kvd/v1/kv.grpc.pb.h"

namespace fp8kvd::client {

using Clock = std::chrono::system_clock;  // gRPC's deadlines are on this one
// A lease ends by the server's clock, whatever the time of day here is set to.
using LeaseClock = std::chrono::steady_clock;

// The delay that the server asks for: by the trailer grpc-retry-pushback-ms, where a value that is
// no number, or negative, forbids a retry; without it, by a RetryInfo in the status's details.
std::optional<int64_t> RetryAdviceMs(const grpc::Status& status,
                                     const grpc::ClientContext& context);

// How often, and how long apart, one call is tried. For one call on one thread.
class Retry {
 public:
  Retry(const Options& options, Clock::time_point deadline);

  // How long to wait before the next try; nothing when there shall be none: the status is not one
  // that a retry cures, the server forbade it, the tries are used up, or the wait would pass the
  // deadline.
  std::optional<std::chrono::milliseconds> Next(const grpc::Status& status,
                                                const grpc::ClientContext& context);
  // The same with the delay that the server asked for.
  std::optional<std::chrono::milliseconds> Next(const absl::Status& status,
                                                std::optional<int64_t> pushback_ms);
  // Progress was made: the tries count anew.
  void Reset() { tries_ = 0; }

 private:
  const Options& options_;
  const Clock::time_point deadline_;
  int32_t tries_ = 0;
  std::minstd_rand random_;  // spreads clients that failed together
};

class Core {
 public:
  explicit Core(Options options);
  ~Core();  // stops renewing; sequences that are still live end with their leases

  const Options& options() const { return options_; }
  v1::DecodeAttention::Stub& stub() { return *stub_; }

  // What every call brings.
  void Prepare(grpc::ClientContext* context) const;

  // Tries `attempt` until it succeeds or Retry gives up. `name` is the call's, for the message.
  absl::Status Try(const char* name, int64_t timeout_ms,
                   const std::function<grpc::Status(grpc::ClientContext&)>& attempt);

  // The status for a caller: the call and the target before the server's words.
  absl::Status Explain(const char* name, const grpc::Status& status);
  absl::Status Explain(const char* name, const absl::Status& status);

  // The session that a call of so many bytes goes through; null: gRPC. Opens one where there may be
  // one and none is open. With Transport::kSharedMemory a Status says why there is none.
  absl::StatusOr<std::shared_ptr<SharedSession>> Shared(uint64_t bytes);
  TransportState transport();

  // Waits, or until there is a connection again; false when the client is going away.
  bool Wait(std::chrono::milliseconds delay);

  void AddLease(const Handle& handle, uint64_t ttl_ms);
  void DropLease(const Handle& handle);

 private:
  struct Lease {
    Handle handle;
    std::chrono::milliseconds period;
    LeaseClock::time_point due;
  };

  absl::StatusOr<std::shared_ptr<SharedSession>> OpenShared();
  void RenewLoop();
  std::vector<Handle> TakeDue(LeaseClock::time_point now);
  std::chrono::milliseconds RenewPatience() const;  // with mu_
  void Renew(const std::vector<Handle>& handles, std::chrono::milliseconds patience);

  const Options options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::DecodeAttention::Stub> stub_;

  std::mutex shared_mu_;                   // held while a session is opened: others wait for it
  std::shared_ptr<SharedSession> shared_;  // guarded by shared_mu_, as are these
  absl::Status shared_status_;             // of the last attempt
  Clock::time_point shared_next_ = {};     // not tried before

  std::mutex mu_;
  std::condition_variable changed_;
  bool closing_ = false;
  std::map<std::pair<uint32_t, uint64_t>, Lease> leases_;  // by home and seq_id
  std::thread renewer_;                                    // last: it uses all of the above
};

}  // namespace fp8kvd::client
