#include "client/cc/tensor_calls.h"

#include <algorithm>
#include <deque>
#include <string>

#include "client/cc/convert.h"
#include "client/cc/shared_session.h"

namespace fp8kvd::client {
namespace {

using std::chrono::milliseconds;

// Tokens of one layer before the next layer's turn: layers of a windowed group may run apart by
// their window and a slack, which is 128 unless configured otherwise.
constexpr uint64_t kTokensApartMax = 128;
// Chunks of an Append on their way through shared memory: one is copied while others run.
constexpr size_t kChunksInFlight = 4;

uint64_t ChunkTokens(const AppendArgs& args, uint64_t row, int64_t chunk_bytes) {
  const uint64_t token_bytes = std::max<uint64_t>(1, row * 2 * sizeof(uint16_t));
  const uint64_t tokens = std::max<uint64_t>(1, static_cast<uint64_t>(chunk_bytes) / token_bytes);
  return args.layers_count == 1 ? tokens : std::min(tokens, kTokensApartMax);
}

SharedSession::Time SteadyTime(Clock::time_point deadline) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(deadline - Clock::now());
}

int64_t MsUntil(Clock::time_point deadline) {
  return std::max<int64_t>(
      1, std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count());
}

absl::Status NoReply() {
  return absl::DeadlineExceededError("no reply came through shared memory until the deadline");
}

v1::AppendRequest ToMessage(AppendChunk chunk) {
  const auto set = [](absl::Span<const uint16_t> rows, std::string* field) {
    field->assign(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(uint16_t));
  };
  set(chunk.k, chunk.head.mutable_k());
  set(chunk.v, chunk.head.mutable_v());
  return std::move(chunk.head);
}

Outcome AppendByGrpc(Core& core, Clock::time_point deadline, AppendProgress* progress) {
  grpc::ClientContext context;
  core.Prepare(&context);
  context.set_deadline(deadline);
  v1::AppendResponse response;
  auto writer = core.stub().Append(&context, &response);
  progress->ForEachChunk(
      [&](AppendChunk chunk) { return writer->Write(ToMessage(std::move(chunk))); });
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  return {ToStatus(status), RetryAdviceMs(status, context)};
}

Outcome AppendShared(SharedSession& session, Clock::time_point deadline, AppendProgress* progress) {
  const SharedSession::Time until = SteadyTime(deadline);
  Outcome outcome;
  std::deque<SharedCallPtr> sent;
  const auto take_oldest = [&] {
    const SharedCallPtr call = std::move(sent.front());
    sent.pop_front();
    const bool is_done = session.Wait(call, until);
    if (!outcome.status.ok()) return;  // the first failure is the reason of later ones
    outcome.status = is_done ? call->status : NoReply();
    if (is_done) outcome.pushback_ms = call->pushback_ms;
  };
  progress->ForEachChunk([&](const AppendChunk& chunk) {
    if (sent.size() >= kChunksInFlight) take_oldest();
    if (!outcome.status.ok()) return false;
    absl::StatusOr<SharedCallPtr> call = session.Send({.kind = shm::Kind::kAppend,
                                                       .head = chunk.head.SerializeAsString(),
                                                       .k = chunk.k,
                                                       .v = chunk.v,
                                                       .items = 1,
                                                       .timeout_ms = MsUntil(deadline)},
                                                      /*id=*/0, until);
    outcome.status = call.status();
    if (call.ok()) sent.push_back(*std::move(call));
    return outcome.status.ok();
  });
  while (!sent.empty()) take_oldest();
  return outcome;
}

}  // namespace

AppendProgress::AppendProgress(const AppendArgs& args, int64_t chunk_bytes)
    : args_(args),
      row_(args.n == 0 ? 0 : args.k.size() / (args.layers_count * args.n)),
      chunk_tokens_(ChunkTokens(args, row_, chunk_bytes)),
      next_(args.layers_count, args.pos),
      sent_(args.layers_count, args.pos) {}

bool AppendProgress::done() const {
  return std::all_of(next_.begin(), next_.end(), [&](uint64_t pos) { return pos == end(); });
}

bool AppendProgress::Update(const std::vector<uint64_t>& seq_lens) {
  bool moved = false;
  for (size_t i = 0; i < next_.size() && args_.layer + i < seq_lens.size(); ++i) {
    const uint64_t pos = std::min(std::max(seq_lens[args_.layer + i], args_.pos), sent_[i]);
    moved = moved || pos > next_[i];
    next_[i] = pos;
  }
  return moved;
}

uint64_t AppendProgress::chunk_bytes_max() const {
  return 2 * sizeof(uint16_t) * row_ * std::min(chunk_tokens_, args_.n);
}

AppendChunk AppendProgress::MakeChunk(uint32_t i, uint64_t pos, uint64_t chunk_end) const {
  AppendChunk chunk;
  chunk.head.set_model(args_.model);
  ToProto(args_.handle, chunk.head.mutable_handle());
  chunk.head.set_layer(args_.layer + i);
  chunk.head.set_pos(pos);
  chunk.head.set_n(static_cast<uint32_t>(chunk_end - pos));
  if (pos == args_.pos) chunk.head.set_skip_to(args_.skip_to);
  const uint64_t at = (i * args_.n + (pos - args_.pos)) * row_;
  const uint64_t elements = (chunk_end - pos) * row_;
  chunk.k = args_.k.subspan(at, elements);
  chunk.v = args_.v.subspan(at, elements);
  return chunk;
}

Outcome TryAppend(Core& core, Clock::time_point deadline, AppendProgress* progress) {
  const auto session = core.Shared(SharedSession::RoomFor(progress->chunk_bytes_max()));
  if (!session.ok()) return {session.status()};
  return *session != nullptr ? AppendShared(**session, deadline, progress)
                             : AppendByGrpc(core, deadline, progress);
}

Outcome DecodeTry::Run(Core& core, Clock::time_point deadline) {
  const auto session = core.Shared(SharedSession::RoomFor(args_));
  if (!session.ok()) return {session.status()};
  return *session != nullptr ? RunShared(**session, deadline) : RunByGrpc(core, deadline);
}

Outcome DecodeTry::RunShared(SharedSession& session, Clock::time_point deadline) {
  const SharedSession::Time until = SteadyTime(deadline);
  SharedMessage message = DecodeMessageOf(args_, MsUntil(deadline));
  message.head = HeadOf(args_).SerializeAsString();
  absl::StatusOr<SharedCallPtr> call = session.Send(message, /*id=*/0, until);
  if (!call.ok()) return {call.status()};
  if (!session.Wait(*call, until)) return {NoReply()};
  reply_ = std::move((*call)->reply);
  return {(*call)->status, (*call)->pushback_ms};
}

Outcome DecodeTry::RunByGrpc(Core& core, Clock::time_point deadline) {
  if (!request_.has_value()) request_ = ToProto(args_);
  grpc::ClientContext context;
  core.Prepare(&context);
  context.set_deadline(deadline);
  v1::DecodeResponse response;
  const grpc::Status status = core.stub().Decode(&context, *request_, &response);
  if (!status.ok()) return {ToStatus(status), RetryAdviceMs(status, context)};
  absl::StatusOr<DecodeReply> reply = FromProto(response, args_.out_type);
  if (!reply.ok()) return {reply.status()};
  reply_ = *std::move(reply);
  return {absl::OkStatus()};
}

}  // namespace fp8kvd::client
