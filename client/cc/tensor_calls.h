// client/cc/tensor_calls.h: one try of an Append or a Decode, through shared memory where there is
// a session that holds it, else by gRPC. Private to client/cc; client.h has the loop of retries.
// Threads: one call of the user's each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "client/cc/core.h"
#include "client/cc/types.h"
#include "fp8kvd/v1/kv.pb.h"

namespace fp8kvd::client {

// What a try came to, and the delay that the server asks for.
struct Outcome {
  absl::Status status;
  std::optional<int64_t> pushback_ms = {};
};

// A message of an Append, its tensors where the caller has them.
struct AppendChunk {
  v1::AppendRequest head;
  absl::Span<const uint16_t> k;
  absl::Span<const uint16_t> v;
};

// Where an Append stands: the next position of each of its layers, and how far each was sent.
class AppendProgress {
 public:
  AppendProgress(const AppendArgs& args, int64_t chunk_bytes);

  bool done() const;
  // Takes the server's lengths; true when they are ahead of what was known. Lengths below pos are
  // not ours to fill, and tokens that were never sent are not ours: the server's answer to the
  // resent chunk says so.
  bool Update(const std::vector<uint64_t>& seq_lens);

  // Calls send(chunk) for every chunk that is left, in order, until one is refused.
  template <typename Send>
  void ForEachChunk(Send send) {
    for (uint64_t begin = 0; begin == 0 || begin < args_.n; begin += chunk_tokens_) {
      const uint64_t chunk_end = args_.pos + std::min(begin + chunk_tokens_, args_.n);
      for (uint32_t i = 0; i < args_.layers_count; ++i) {
        const uint64_t pos = std::max(next_[i], args_.pos + begin);
        if (pos >= chunk_end && args_.n != 0) continue;
        if (!send(MakeChunk(i, pos, chunk_end))) return;
        sent_[i] = std::max(sent_[i], chunk_end);
      }
    }
  }

  uint64_t chunk_bytes_max() const;  // of k and v

 private:
  uint64_t end() const { return args_.pos + args_.n; }
  AppendChunk MakeChunk(uint32_t i, uint64_t pos, uint64_t chunk_end) const;

  const AppendArgs& args_;
  const uint64_t row_;  // elements of one token in one layer
  const uint64_t chunk_tokens_;
  std::vector<uint64_t> next_;
  std::vector<uint64_t> sent_;  // the end of each layer's chunks that were handed over
};

Outcome TryAppend(Core& core, Clock::time_point deadline, AppendProgress* progress);

class DecodeTry {
 public:
  explicit DecodeTry(const DecodeArgs& args) : args_(args) {}
  Outcome Run(Core& core, Clock::time_point deadline);
  DecodeReply TakeReply() { return std::move(reply_); }

 private:
  Outcome RunShared(SharedSession& session, Clock::time_point deadline);
  Outcome RunByGrpc(Core& core, Clock::time_point deadline);

  const DecodeArgs& args_;
  std::optional<v1::DecodeRequest> request_;  // for gRPC, made at need
  DecodeReply reply_;
};

}  // namespace fp8kvd::client
