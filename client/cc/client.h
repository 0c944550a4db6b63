// client/cc/client.h: talks to an fp8kvd daemon. Everything that needs a connection is here and in
// decode_stream.h; types.h has the structs.
//
//   auto client = Client::Connect({.target = "127.0.0.1:50051"}).value();
//   auto seqs = client->CreateSequences({.model = "llama", .expected_tokens = 4096}).value();
//   client->Append({.handle = seqs[0].handle(), .layer = 0, .n = n, .k = k, .v = v});
//   auto reply = client->Decode({.layer = 0, .handles = {…}, .positions = {…}, .q = q});
//
// Promises: a call that may have been lost is sent again (the server tells a replay from new data
//   by position and bytes), waits as long as the server asks, and stays within its timeout.
//   Sequences are renewed in the background at a third of their lease and freed when they go out of
//   scope. Where the server is on this host, tensors go through shared memory (types.h, Transport);
//   what is promised is the same.
// Does not manage: failed items of a batch, which come back beside the good ones.
// Threads: all calls may come from any thread at any time. One background thread a client.
// Errors: the server's, with the call and the target before its words. UNAVAILABLE that says
//   "cannot reach" is a connection; NOT_FOUND of a handle means freed, expired, or a restarted
//   server.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cc/types.h"

namespace fp8kvd::client {

class Core;
class DecodeStream;

// Owns a sequence of the server: renewed while this lives, freed when it goes. Movable.
class Sequence {
 public:
  Sequence(std::shared_ptr<Core> core, const Handle& handle, uint64_t ttl_ms);
  Sequence(Sequence&&) noexcept = default;
  Sequence& operator=(Sequence&& other) noexcept;
  ~Sequence();

  const Handle& handle() const { return handle_; }

  // Frees now and says how that went; the destructor cannot (the lease covers for it).
  absl::Status Free();
  // Gives it up without freeing: it lives on until its lease ends.
  Handle Release();

 private:
  friend class Client;
  std::shared_ptr<Core> core_;  // null: no longer owned
  Handle handle_;
};

class Client {
 public:
  // Checks the options and starts to connect; an unreachable server shows at the first call.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const Options& options);
  ~Client();

  absl::StatusOr<ServerInfo> GetServerInfo();

  // A retry after a lost answer may leave a twin behind that its lease ends.
  absl::StatusOr<std::vector<Sequence>> CreateSequences(const CreateArgs& args);
  absl::StatusOr<std::vector<Sequence>> ForkSequences(const Handle& parent, const ForkArgs& args);

  // Sends in chunks, all layers of a range of tokens before the next. After a broken connection it
  // asks for the committed lengths and goes on from there.
  absl::Status Append(const AppendArgs& args);

  absl::StatusOr<DecodeReply> Decode(const DecodeArgs& args);
  // Takes a part of Options::shared_memory_bytes for as long as the rows live; RESOURCE_EXHAUSTED
  // where too little is left. Ordinary memory where tensors go by gRPC, with the same use.
  absl::StatusOr<SharedRows> MakeRows(size_t elements);
  // How the tensors of the latest Append, Decode or stream went.
  TransportState transport();
  // At most in_flight_max requests unanswered at a time.
  absl::StatusOr<std::unique_ptr<DecodeStream>> OpenDecodeStream(int32_t in_flight_max);

  // seq_lens [handles]: tokens that remain of each.
  absl::StatusOr<std::vector<ItemError>> TruncateSequences(absl::Span<const Handle> handles,
                                                           absl::Span<const uint64_t> seq_lens);
  absl::StatusOr<std::vector<ItemError>> FreeSequences(absl::Span<const Handle> handles);
  // The same for sequences that this process owns, in as few calls as servers take.
  absl::StatusOr<std::vector<ItemError>> FreeSequences(std::vector<Sequence> sequences);
  absl::StatusOr<StatReply> StatSequences(absl::Span<const Handle> handles);
  // Starts leases anew; only needed for handles that this process does not own.
  absl::StatusOr<std::vector<ItemError>> RenewSequences(absl::Span<const Handle> handles);
  // Owns from now on what somebody else made.
  absl::StatusOr<Sequence> AdoptSequence(const Handle& handle);
  // All live sequences of a model (empty: of all models), at most sequences_max.
  absl::StatusOr<std::vector<SequenceInfo>> ListSequences(const std::string& model,
                                                          size_t sequences_max);

  // Whether fp8_kv pays for a model, and what a configured one served lately.
  absl::StatusOr<PrecisionPlan> PlanPrecision(const PlanArgs& args);

  // k and v: bf16 [tokens, kv_heads, head_dim]. Touches no sequence.
  absl::StatusOr<KvError> MeasureKvError(uint32_t kv_heads, uint32_t head_dim,
                                         absl::Span<const uint16_t> k,
                                         absl::Span<const uint16_t> v);
  // What fp8_kv does to attention over rows: at most 16 MiB of them, and some seconds of work.
  absl::StatusOr<Accuracy> MeasureAccuracy(const MeasureArgs& args);

 private:
  explicit Client(std::shared_ptr<Core> core);
  std::vector<Sequence> Own(const std::vector<Handle>& handles, uint64_t ttl_ms);

  std::shared_ptr<Core> core_;
};

}  // namespace fp8kvd::client
