// server/rpc/helper_jobs.h: the rpcs that compute without the engine, on the helper thread.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "config/calibration.h"
#include "config/live_load.h"
#include "fp8kvd/v1/kv.pb.h"
#include "server/rpc/helper_thread.h"
#include "server/rpc/job.h"

namespace fp8kvd::rpc {

// Parses on the poller, computes on the helper thread.
class HelperJob : public Job, private HelperThread::Task {
 public:
  using Job::Job;
  Next Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) final;
  absl::Status Answer(grpc::ByteBuffer* reply) final;

 protected:
  // On the poller: the message, checked as far as its size goes.
  virtual absl::Status Read(grpc::ByteBuffer* bytes) = 0;
  // On the helper thread.
  virtual absl::Status Compute() = 0;
  virtual const google::protobuf::Message& response() const = 0;
  // Gives the messages' memory back: the job waits for its next call, and these are the largest.
  virtual void Forget() = 0;

 private:
  void Execute() final;

  absl::Status status_;
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
  absl::Status Read(grpc::ByteBuffer* bytes) override;
  absl::Status Compute() override;
  const google::protobuf::Message& response() const override { return response_; }
  void Forget() override { v1::PlanPrecisionRequest().Swap(&request_); }

  absl::Status SetLive();

  v1::PlanPrecisionRequest request_;
  v1::PlanPrecisionResponse response_;
};

class MeasureJob final : public HelperJob {
 public:
  using HelperJob::HelperJob;

 private:
  absl::Status Read(grpc::ByteBuffer* bytes) override;
  absl::Status Compute() override;
  const google::protobuf::Message& response() const override { return response_; }
  void Forget() override { v1::MeasureKvErrorRequest().Swap(&request_); }

  v1::MeasureKvErrorRequest request_;
  v1::MeasureKvErrorResponse response_;
};

}  // namespace fp8kvd::rpc
