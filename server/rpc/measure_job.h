// server/rpc/measure_job.h: MeasureKvError: what fp8_kv does to rows that a client sends, and to
// attention over them where queries come with them. Plain arithmetic in double precision on a
// thread of its own, bounded in bytes and in work; the engine and the device know nothing of it. K
// and V go in pieces of some milliseconds. Attention over them takes seconds at most, a piece for
// each of its steps, and some hundred megabytes; so one call at a time is at it, and others of that
// kind wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fp8kvd/v1/kv.pb.h"
#include "kernels/reference/accuracy.h"
#include "kernels/reference/format.h"
#include "server/rpc/helper_jobs.h"

namespace fp8kvd::rpc {

class MeasureJob final : public HelperJob {
 public:
  using HelperJob::HelperJob;

 private:
  HelperThread& thread() override { return *parts().measuring; }
  absl::Status Read(grpc::ByteBuffer* bytes) override;
  absl::StatusOr<bool> Compute() override;
  const google::protobuf::Message& response() const override { return response_; }
  void Forget() override;

  absl::Status CheckRows() const;
  absl::Status CheckQueries() const;
  absl::Status CheckQueryNumbers() const;
  // K or V.
  struct Rows {
    const char* name;
    const std::string* bytes;
    kernels::reference::RowsErrorSum sum;
  };
  absl::Status Measure(Rows& rows, size_t bytes) const;
  absl::StatusOr<bool> ContinueAttention();
  absl::Status BeginAttention();

  int64_t tokens() const;

  v1::MeasureKvErrorRequest request_;
  v1::MeasureKvErrorResponse response_;
  std::vector<Rows> rows_;
  size_t bytes_measured_ = 0;  // of each
  std::optional<kernels::reference::AccuracyMeasurement> attention_;
};

}  // namespace fp8kvd::rpc
