// server/rpc/helper_jobs.h: the rpcs that compute without the engine, on a helper thread.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <vector>

#include "config/calibration.h"
#include "config/live_load.h"
#include "fp8kvd/v1/kv.pb.h"
#include "server/rpc/helper_thread.h"
#include "server/rpc/job.h"

namespace fp8kvd::rpc {

// Parses on the poller, computes on a helper thread, in pieces.
class HelperJob : public Job, private HelperThread::Task {
 public:
  using Job::Job;
  Next Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) final;
  absl::Status Answer(grpc::ByteBuffer* reply) final;
  void Cancel() final { cancelled_.store(true, std::memory_order_relaxed); }

 protected:
  virtual HelperThread& thread() = 0;
  // On the poller: the message, checked as far as its size goes.
  virtual absl::Status Read(grpc::ByteBuffer* bytes) = 0;
  // On the helper thread: a piece of it; true: there is more.
  virtual absl::StatusOr<bool> Compute() = 0;
  // Then nobody waits for the rest; looked at before each piece.
  bool is_cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  virtual const google::protobuf::Message& response() const = 0;
  // Gives back what the call took, but for its response: the job waits for its next call, and
  // messages are the largest. On the helper thread after the last piece, and once more later.
  virtual void Forget() = 0;

 private:
  bool Continue() final;

  absl::Status status_;
  std::atomic<bool> cancelled_{false};
};

// What PlanPrecision plans with: the configuration's models and policy.
struct Planner {
  config::PolicyOptions policy;
  std::optional<config::Calibration> calibration;  // of the device in use
  std::vector<config::ModelOptions> models;        // hf_config imported
  // What a model served lately; nothing before its first step.
  std::function<std::optional<config::LiveVerdict>(int32_t model)> live = [](int32_t) {
    return std::nullopt;
  };
};

class PlanJob final : public HelperJob {
 public:
  using HelperJob::HelperJob;

 private:
  HelperThread& thread() override { return *parts().planning; }
  absl::Status Read(grpc::ByteBuffer* bytes) override;
  absl::StatusOr<bool> Compute() override;
  const google::protobuf::Message& response() const override { return response_; }
  void Forget() override { v1::PlanPrecisionRequest().Swap(&request_); }

  absl::Status Plan();
  absl::Status SetLive();

  v1::PlanPrecisionRequest request_;
  v1::PlanPrecisionResponse response_;
};

}  // namespace fp8kvd::rpc
