#include "client/cc/client.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

#include "client/cc/convert.h"
#include "client/cc/core.h"
#include "client/cc/decode_stream.h"
#include "client/cc/tensor_calls.h"

namespace fp8kvd::client {
namespace {

using std::chrono::milliseconds;

// A destructor may not hold its thread long; the lease frees what this does not.
constexpr int64_t kFreeInDestructorMs = 1'000;
constexpr uint32_t kListPageSize = 256;
constexpr size_t kHandlesMax = 1024;  // that every server takes in a request
// Of one sequence: beyond what any server takes, and no sum or product of them overflows.
constexpr uint64_t kTokensMax = std::numeric_limits<uint32_t>::max();

template <typename Request>
Request Naming(absl::Span<const Handle> handles) {
  Request request;
  for (const Handle& handle : handles) ToProto(handle, request.add_handles());
  return request;
}

std::vector<Handle> Handles(const google::protobuf::RepeatedPtrField<v1::Handle>& handles) {
  std::vector<Handle> out;
  out.reserve(handles.size());
  for (const v1::Handle& handle : handles) out.push_back(FromProto(handle));
  return out;
}

// By the whole of the host: "localhost.example" and "127.example" are others, as is any of a list.
bool IsThisMachine(absl::string_view target) {
  if (absl::StartsWith(target, "unix:")) return true;
  if (!absl::ConsumePrefix(&target, "ipv4:")) absl::ConsumePrefix(&target, "ipv6:");
  const size_t colon = target.rfind(':');
  const bool has_port = colon != absl::string_view::npos &&
                        target.find_first_not_of("0123456789", colon + 1) == target.npos;
  const absl::string_view host = has_port ? target.substr(0, colon) : target;
  return host == "localhost" || host == "[::1]" ||
         (absl::StartsWith(host, "127.") && host.find_first_not_of("0123456789.") == host.npos);
}

absl::Status CheckSecurity(const Options& options) {
  if (options.tls.has_value() &&
      options.tls->certificate_chain.empty() != options.tls->private_key.empty()) {
    return absl::InvalidArgumentError(
        "client options: tls has one of certificate_chain and private_key; give both or neither");
  }
  // gRPC would abort on what no header may hold.
  const bool is_header = std::all_of(options.token.begin(), options.token.end(),
                                     [](char c) { return c > ' ' && c < '\x7F'; });
  if (!is_header) {
    return absl::InvalidArgumentError(
        "client options: the token has characters that no header holds; give it without spaces "
        "and line ends");
  }
  if (!options.token.empty() && !options.tls.has_value() && !IsThisMachine(options.target)) {
    return absl::InvalidArgumentError(absl::StrCat("client options: a token for ", options.target,
                                                   " would travel in the clear; give tls, too"));
  }
  return absl::OkStatus();
}

absl::Status CheckAppend(const AppendArgs& args) {
  if (args.n > kTokensMax || args.pos > kTokensMax - args.n) {
    return absl::InvalidArgumentError(absl::StrCat("Append: pos ", args.pos, " and n ", args.n,
                                                   " pass ", kTokensMax,
                                                   " tokens, which no sequence has; send positions "
                                                   "of the sequence"));
  }
  const uint64_t rows = args.layers_count * args.n;  // below 2^64
  if (args.layers_count == 0 || args.k.size() != args.v.size() ||
      (rows == 0 ? !args.k.empty() : args.k.empty() || args.k.size() % rows != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Append: k holds ", args.k.size(), " and v ", args.v.size(), " elements for ",
                     args.layers_count, " layers x ", args.n,
                     " tokens; both must hold layers_count x n x kv_heads x head_dim"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::MeasureKvErrorResponse> Measure(Core& core,
                                                   const v1::MeasureKvErrorRequest& request) {
  v1::MeasureKvErrorResponse response;
  absl::Status status = core.Try("MeasureKvError", core.options().timeout_ms, [&](auto& context) {
    return core.stub().MeasureKvError(&context, request, &response);
  });
  if (!status.ok()) return status;
  return response;
}

}  // namespace

Sequence::Sequence(std::shared_ptr<Core> core, const Handle& handle, uint64_t ttl_ms)
    : core_(std::move(core)), handle_(handle) {
  core_->AddLease(handle_, ttl_ms);
}

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  std::swap(core_, other.core_);
  std::swap(handle_, other.handle_);
  return *this;
}

Sequence::~Sequence() {
  if (core_ == nullptr) return;
  core_->DropLease(handle_);
  const auto request = Naming<v1::FreeSequencesRequest>({&handle_, 1});
  v1::FreeSequencesResponse response;
  grpc::ClientContext context;
  core_->Prepare(&context);
  context.set_deadline(Clock::now() + milliseconds(kFreeInDestructorMs));
  (void)core_->stub().FreeSequences(&context, request, &response);  // else the lease frees it
}

absl::Status Sequence::Free() {
  if (core_ == nullptr) return absl::FailedPreconditionError("this sequence was given up already");
  const std::shared_ptr<Core> core = core_;
  const auto request = Naming<v1::FreeSequencesRequest>({&handle_, 1});
  v1::FreeSequencesResponse response;
  absl::Status status = core->Try("FreeSequences", core->options().timeout_ms, [&](auto& context) {
    return core->stub().FreeSequences(&context, request, &response);
  });
  if (!status.ok()) return status;
  Release();
  return response.item_errors().empty() ? absl::OkStatus()
                                        : ToStatus(response.item_errors(0).error());
}

Handle Sequence::Release() {
  if (core_ != nullptr) core_->DropLease(handle_);
  core_.reset();
  return handle_;
}

Client::Client(std::shared_ptr<Core> core) : core_(std::move(core)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const Options& options) {
  if (options.target.empty() || options.timeout_ms < 1 || options.append_timeout_ms < 1 ||
      options.retries_max < 0 || options.backoff_ms_min < 1 ||
      options.backoff_ms_max < options.backoff_ms_min || options.append_chunk_bytes < 1 ||
      options.shared_memory_bytes < 1 || options.shared_memory_spin_us < 0) {
    return absl::InvalidArgumentError(
        "client options: target must name a server, and times, sizes and counts be positive "
        "(retries_max may be 0), backoff_ms_min no more than backoff_ms_max");
  }
  if (absl::Status status = CheckSecurity(options); !status.ok()) return status;
  return std::unique_ptr<Client>(new Client(std::make_shared<Core>(options)));
}

absl::StatusOr<ServerInfo> Client::GetServerInfo() {
  v1::GetServerInfoResponse response;
  absl::Status status = core_->Try(
      "GetServerInfo", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().GetServerInfo(&context, {}, &response); });
  if (!status.ok()) return status;
  return FromProto(response);
}

absl::StatusOr<PrecisionPlan> Client::PlanPrecision(const PlanArgs& args) {
  v1::PlanPrecisionRequest request;
  if (args.hf_config_json.empty()) {
    request.set_model(args.model);
  } else {
    request.set_hf_config_json(args.hf_config_json);
  }
  request.set_batch(args.batch);
  request.set_tokens(args.tokens);
  request.set_other_bytes(args.other_bytes);
  request.set_rpc_us(args.rpc_us);
  v1::PlanPrecisionResponse response;
  absl::Status status = core_->Try(
      "PlanPrecision", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().PlanPrecision(&context, request, &response); });
  if (!status.ok()) return status;
  return FromProto(response);
}

std::vector<Sequence> Client::Own(const std::vector<Handle>& handles, uint64_t ttl_ms) {
  std::vector<Sequence> sequences;
  sequences.reserve(handles.size());
  for (const Handle& handle : handles) sequences.emplace_back(core_, handle, ttl_ms);
  return sequences;
}

absl::StatusOr<std::vector<Sequence>> Client::CreateSequences(const CreateArgs& args) {
  v1::CreateSequencesRequest request;
  request.set_model(args.model);
  request.set_count(args.count);
  request.set_expected_tokens(args.expected_tokens);
  request.set_ttl_ms(args.ttl_ms);
  v1::CreateSequencesResponse response;
  absl::Status status = core_->Try(
      "CreateSequences", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().CreateSequences(&context, request, &response); });
  if (!status.ok()) return status;
  return Own(Handles(response.handles()), response.ttl_ms());
}

absl::StatusOr<std::vector<Sequence>> Client::ForkSequences(const Handle& parent,
                                                            const ForkArgs& args) {
  uint64_t ttl_ms = args.ttl_ms;
  if (ttl_ms == 0) {  // the reply does not name the lease that the children inherit
    absl::StatusOr<StatReply> stat = StatSequences({&parent, 1});
    if (!stat.ok()) return stat.status();
    if (!stat->item_errors.empty()) return stat->item_errors[0].status;
    ttl_ms = stat->sequences.empty() ? 0 : stat->sequences[0].ttl_ms;
  }
  v1::ForkSequencesRequest request;
  ToProto(parent, request.mutable_parent());
  request.set_count(args.count);
  request.set_expected_tokens(args.expected_tokens);
  request.set_ttl_ms(args.ttl_ms);
  v1::ForkSequencesResponse response;
  absl::Status status = core_->Try(
      "ForkSequences", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().ForkSequences(&context, request, &response); });
  if (!status.ok()) return status;
  return Own(Handles(response.handles()), ttl_ms);
}

absl::Status Client::Append(const AppendArgs& args) {
  if (absl::Status status = CheckAppend(args); !status.ok()) return status;
  const Clock::time_point deadline =
      Clock::now() + milliseconds(core_->options().append_timeout_ms);
  Retry retry(core_->options(), deadline);
  AppendProgress progress(args, core_->options().append_chunk_bytes);
  for (;;) {
    const Outcome outcome = TryAppend(*core_, deadline, &progress);
    if (outcome.status.ok()) return absl::OkStatus();
    const std::optional<milliseconds> delay = retry.Next(outcome.status, outcome.pushback_ms);
    if (!delay.has_value() || !core_->Wait(*delay)) return core_->Explain("Append", outcome.status);
    absl::StatusOr<StatReply> stat = StatSequences({&args.handle, 1});
    if (!stat.ok()) return stat.status();
    if (!stat->item_errors.empty()) return stat->item_errors[0].status;
    if (!stat->sequences.empty() && progress.Update(stat->sequences[0].seq_lens)) retry.Reset();
    if (args.n > 0 && progress.done()) return absl::OkStatus();
  }
}

absl::StatusOr<SharedRows> Client::MakeRows(size_t elements) {
  if (elements == 0) return absl::InvalidArgumentError("MakeRows: elements is 0; ask for some");
  const auto session = core_->Shared(elements * sizeof(uint16_t));
  if (!session.ok()) return core_->Explain("MakeRows", session.status());
  if (*session != nullptr) return SharedSession::MakeRows(*session, elements);
  auto memory = std::make_shared<std::vector<uint16_t>>(elements);
  const absl::Span<uint16_t> span = absl::MakeSpan(*memory);
  return SharedRows(std::move(memory), span);
}

absl::StatusOr<DecodeReply> Client::Decode(const DecodeArgs& args) {
  const Clock::time_point deadline = Clock::now() + milliseconds(core_->options().timeout_ms);
  Retry retry(core_->options(), deadline);
  DecodeTry attempt(args);
  for (;;) {
    const Outcome outcome = attempt.Run(*core_, deadline);
    if (outcome.status.ok()) return attempt.TakeReply();
    const std::optional<milliseconds> delay = retry.Next(outcome.status, outcome.pushback_ms);
    if (!delay.has_value() || !core_->Wait(*delay)) return core_->Explain("Decode", outcome.status);
  }
}

TransportState Client::transport() { return core_->transport(); }

absl::StatusOr<std::unique_ptr<DecodeStream>> Client::OpenDecodeStream(int32_t in_flight_max) {
  if (in_flight_max < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("OpenDecodeStream: in_flight_max is ", in_flight_max, ", at least 1 allowed"));
  }
  return std::make_unique<DecodeStream>(core_, in_flight_max);
}

absl::StatusOr<std::vector<ItemError>> Client::TruncateSequences(
    absl::Span<const Handle> handles, absl::Span<const uint64_t> seq_lens) {
  auto request = Naming<v1::TruncateSequencesRequest>(handles);
  request.mutable_seq_lens()->Add(seq_lens.begin(), seq_lens.end());
  v1::TruncateSequencesResponse response;
  absl::Status status = core_->Try(
      "TruncateSequences", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().TruncateSequences(&context, request, &response); });
  if (!status.ok()) return status;
  return ItemErrors(response.item_errors());
}

absl::StatusOr<std::vector<ItemError>> Client::FreeSequences(absl::Span<const Handle> handles) {
  const auto request = Naming<v1::FreeSequencesRequest>(handles);
  v1::FreeSequencesResponse response;
  absl::Status status = core_->Try(
      "FreeSequences", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().FreeSequences(&context, request, &response); });
  if (!status.ok()) return status;
  return ItemErrors(response.item_errors());
}

absl::StatusOr<std::vector<ItemError>> Client::FreeSequences(std::vector<Sequence> sequences) {
  std::vector<Handle> handles;
  handles.reserve(sequences.size());
  for (Sequence& sequence : sequences) handles.push_back(sequence.Release());
  std::vector<ItemError> errors;
  for (size_t begin = 0; begin < handles.size(); begin += kHandlesMax) {
    absl::StatusOr<std::vector<ItemError>> some =
        FreeSequences(absl::MakeConstSpan(handles).subspan(begin, kHandlesMax));
    if (!some.ok()) return some.status();  // their leases free the rest
    for (ItemError& error : *some) {
      error.index += static_cast<uint32_t>(begin);
      errors.push_back(std::move(error));
    }
  }
  return errors;
}

absl::StatusOr<StatReply> Client::StatSequences(absl::Span<const Handle> handles) {
  const auto request = Naming<v1::StatSequencesRequest>(handles);
  v1::StatSequencesResponse response;
  absl::Status status = core_->Try(
      "StatSequences", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().StatSequences(&context, request, &response); });
  if (!status.ok()) return status;
  StatReply reply;
  reply.sequences.reserve(response.sequences_size());
  for (const v1::SequenceInfo& info : response.sequences()) {
    reply.sequences.push_back(FromProto(info));
  }
  reply.item_errors = ItemErrors(response.item_errors());
  return reply;
}

absl::StatusOr<std::vector<ItemError>> Client::RenewSequences(absl::Span<const Handle> handles) {
  const auto request = Naming<v1::RenewSequencesRequest>(handles);
  v1::RenewSequencesResponse response;
  absl::Status status = core_->Try(
      "RenewSequences", core_->options().timeout_ms,
      [&](auto& context) { return core_->stub().RenewSequences(&context, request, &response); });
  if (!status.ok()) return status;
  return ItemErrors(response.item_errors());
}

absl::StatusOr<Sequence> Client::AdoptSequence(const Handle& handle) {
  absl::StatusOr<StatReply> stat = StatSequences({&handle, 1});
  if (!stat.ok()) return stat.status();
  if (!stat->item_errors.empty()) return stat->item_errors[0].status;
  if (stat->sequences.empty()) return absl::InternalError("StatSequences: no answer for a handle");
  return Sequence(core_, handle, stat->sequences[0].ttl_ms);
}

absl::StatusOr<KvError> Client::MeasureKvError(uint32_t kv_heads, uint32_t head_dim,
                                               absl::Span<const uint16_t> k,
                                               absl::Span<const uint16_t> v) {
  const auto response = Measure(*core_, ToProto(kv_heads, head_dim, k, v));
  if (!response.ok()) return response.status();
  return FromProto(*response);
}

absl::StatusOr<Accuracy> Client::MeasureAccuracy(const MeasureArgs& args) {
  const auto response = Measure(*core_, ToProto(args));
  if (!response.ok()) return response.status();
  if (!response->has_accuracy()) {
    return absl::UnimplementedError(
        "MeasureKvError: the server took no queries; it is older than this client, update it");
  }
  return FromProto(response->accuracy());
}

absl::StatusOr<std::vector<SequenceInfo>> Client::ListSequences(const std::string& model,
                                                                size_t sequences_max) {
  std::vector<SequenceInfo> sequences;
  v1::ListSequencesRequest request;
  request.set_model(model);
  request.set_page_size(kListPageSize);
  while (sequences.size() < sequences_max) {
    v1::ListSequencesResponse response;
    absl::Status status = core_->Try(
        "ListSequences", core_->options().timeout_ms,
        [&](auto& context) { return core_->stub().ListSequences(&context, request, &response); });
    if (!status.ok()) return status;
    for (const v1::SequenceInfo& info : response.sequences()) {
      if (sequences.size() < sequences_max) sequences.push_back(FromProto(info));
    }
    if (response.next_page_token().empty() || response.next_page_token() == request.page_token()) {
      break;
    }
    request.set_page_token(response.next_page_token());
  }
  return sequences;
}

}  // namespace fp8kvd::client
