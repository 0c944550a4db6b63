#include "client/cc/core.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"

#include "client/cc/convert.h"

namespace fp8kvd::client {
namespace {

using std::chrono::milliseconds;

// A reply may be larger than any request: fp32 out is twice the bytes of q.
constexpr int kReplyBytesMax = 256 << 20;
// A peer that is gone without a word shows after both of these; the daemon allows pings so far
// apart.
constexpr int kKeepaliveMs = 20'000;
constexpr int kKeepaliveTimeoutMs = 10'000;
// Between attempts to connect; and how long one may take, which gRPC calls its least backoff.
constexpr int kReconnectMsMin = 100;
constexpr int kReconnectMsMax = 2'000;
constexpr int kConnectTimeoutMs = 5'000;
// Handles in one renewal, the least items_max that a server may have.
constexpr size_t kRenewItems = 256;
// A renewal has no caller who would wait longer, and what is due meanwhile waits for it. A
// busy machine answers within the shorter one.
constexpr milliseconds kRenewPatienceMax(5'000);
constexpr milliseconds kRenewPatienceMin(250);
constexpr int kBackoffDoublingsMax = 20;
// An attempt to open a session of shared memory; and how long gRPC serves after one that failed.
constexpr int64_t kOpenSharedMs = 2'000;
constexpr int64_t kSharedRetryMs = 10'000;

std::shared_ptr<grpc::ChannelCredentials> MakeCredentials(const Options& options) {
  if (!options.tls.has_value()) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials({.pem_root_certs = options.tls->root_certificates,
                               .pem_private_key = options.tls->private_key,
                               .pem_cert_chain = options.tls->certificate_chain});
}

std::shared_ptr<grpc::Channel> MakeChannel(const Options& options) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(kReplyBytesMax);
  args.SetMaxSendMessageSize(-1);  // the server's limit decides, with a message of its own
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // each client has its own connection
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMsMin);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMsMax);
  return grpc::CreateCustomChannel(options.target, MakeCredentials(options), args);
}

}  // namespace

std::optional<int64_t> RetryAdviceMs(const grpc::Status& status,
                                     const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("grpc-retry-pushback-ms");
  if (found == trailers.end()) return RetryInfoMs(status.error_details());
  int64_t delay_ms = -1;
  const std::string text(found->second.data(), found->second.size());
  return absl::SimpleAtoi(text, &delay_ms) ? delay_ms : -1;
}

Retry::Retry(const Options& options, Clock::time_point deadline)
    : options_(options), deadline_(deadline), random_(std::random_device{}()) {}

std::optional<milliseconds> Retry::Next(const grpc::Status& status,
                                        const grpc::ClientContext& context) {
  return Next(ToStatus(status), RetryAdviceMs(status, context));
}

std::optional<milliseconds> Retry::Next(const absl::Status& status,
                                        std::optional<int64_t> pushback_ms) {
  const bool retryable =
      absl::IsUnavailable(status) || (absl::IsResourceExhausted(status) && pushback_ms.has_value());
  if (!retryable || pushback_ms.value_or(0) < 0 || tries_ >= options_.retries_max) {
    return std::nullopt;
  }
  const int64_t backoff_ms = std::min(
      options_.backoff_ms_max, options_.backoff_ms_min << std::min(tries_, kBackoffDoublingsMax));
  ++tries_;
  std::uniform_int_distribution<int64_t> spread(backoff_ms / 2, backoff_ms);
  const milliseconds delay(pushback_ms.has_value() ? *pushback_ms : spread(random_));
  if (Clock::now() + delay >= deadline_) return std::nullopt;
  return delay;
}

Core::Core(Options options)
    : options_(std::move(options)),
      channel_(MakeChannel(options_)),
      stub_(v1::DecodeAttention::NewStub(channel_)),
      renewer_([this] { RenewLoop(); }) {}

Core::~Core() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    closing_ = true;
  }
  changed_.notify_all();
  renewer_.join();
}

void Core::Prepare(grpc::ClientContext* context) const {
  if (!options_.token.empty()) context->AddMetadata("authorization", "Bearer " + options_.token);
}

absl::Status Core::Try(const char* name, int64_t timeout_ms,
                       const std::function<grpc::Status(grpc::ClientContext&)>& attempt) {
  const Clock::time_point deadline = Clock::now() + milliseconds(timeout_ms);
  Retry retry(options_, deadline);
  for (;;) {
    grpc::ClientContext context;
    Prepare(&context);
    context.set_deadline(deadline);
    const grpc::Status status = attempt(context);
    if (status.ok()) return absl::OkStatus();
    const std::optional<milliseconds> delay = retry.Next(status, context);
    if (!delay.has_value() || !Wait(*delay)) return Explain(name, status);
  }
}

absl::Status Core::Explain(const char* name, const grpc::Status& status) {
  return Explain(name, ToStatus(status));
}

absl::Status Core::Explain(const char* name, const absl::Status& plain) {
  const bool connected = channel_->GetState(false) == GRPC_CHANNEL_READY;
  if (plain.code() == absl::StatusCode::kUnavailable && !connected) {
    return absl::UnavailableError(absl::StrCat("cannot reach ", options_.target, " for ", name,
                                               ": ", plain.message(),
                                               "; check that fp8kvd runs there and the address"));
  }
  return absl::Status(plain.code(),
                      absl::StrCat(name, " at ", options_.target, ": ", plain.message()));
}

absl::StatusOr<std::shared_ptr<SharedSession>> Core::Shared(uint64_t bytes) {
  if (options_.transport == Transport::kGrpc) return nullptr;
  const std::lock_guard<std::mutex> lock(shared_mu_);
  if (shared_ != nullptr && shared_->is_broken()) {
    shared_.reset();
    shared_next_ = {};  // the server may be there again
  }
  if (shared_ == nullptr && Clock::now() >= shared_next_) {
    absl::StatusOr<std::shared_ptr<SharedSession>> opened = OpenShared();
    shared_status_ = opened.status();
    if (opened.ok()) shared_ = *std::move(opened);
    shared_next_ = Clock::now() + milliseconds(kSharedRetryMs);
  }
  if (shared_ != nullptr && bytes <= shared_->bytes_max()) return shared_;
  if (options_.transport == Transport::kAuto) return nullptr;
  if (shared_ != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the request and its reply take ", bytes, " bytes, the session has ", shared_->bytes_max(),
        ", and the client is to use nothing else; send less at once, or more shared_memory_bytes"));
  }
  shared_next_ = {};
  return absl::UnavailableError(absl::StrCat(
      "no shared memory, and the client is to use nothing else: ", shared_status_.message()));
}

absl::StatusOr<std::shared_ptr<SharedSession>> Core::OpenShared() {
  v1::OpenSharedMemoryRequest request;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> *request.mutable_host_id();
  if (request.host_id().empty()) return absl::UnavailableError("this host has no boot_id");
  v1::OpenSharedMemoryResponse response;
  grpc::ClientContext context;
  Prepare(&context);
  context.set_deadline(Clock::now() + milliseconds(std::min(kOpenSharedMs, options_.timeout_ms)));
  const grpc::Status status = stub_->OpenSharedMemory(&context, request, &response);
  if (!status.ok()) return ToStatus(status);
  return SharedSession::Open({.unix_socket = response.unix_socket(),
                              .ticket = response.ticket(),
                              .memory_bytes = static_cast<uint64_t>(options_.shared_memory_bytes),
                              .spin_us = options_.shared_memory_spin_us});
}

TransportState Core::transport() {
  const std::lock_guard<std::mutex> lock(shared_mu_);
  if (shared_ != nullptr) return {.in_use = Transport::kSharedMemory};
  if (options_.transport == Transport::kGrpc) return {.why_not_shared = "the options say gRPC"};
  if (shared_next_ == Clock::time_point()) return {.why_not_shared = "nothing was sent yet"};
  return {.why_not_shared = std::string(shared_status_.message())};
}

// Without a connection it waits on the channel: one comes about, or fails, only while somebody
// looks for it, and calls that fail at once never do.
bool Core::Wait(milliseconds delay) {
  if (channel_->GetState(false) != GRPC_CHANNEL_READY) {
    channel_->WaitForConnected(Clock::now() + delay);
    const std::lock_guard<std::mutex> lock(mu_);
    return !closing_;
  }
  std::unique_lock<std::mutex> lock(mu_);
  return !changed_.wait_for(lock, delay, [this] { return closing_; });
}

void Core::AddLease(const Handle& handle, uint64_t ttl_ms) {
  const milliseconds period(std::max<uint64_t>(ttl_ms / 3, 1));
  {
    const std::lock_guard<std::mutex> lock(mu_);
    leases_[{handle.home, handle.seq_id}] = {handle, period, LeaseClock::now() + period};
  }
  changed_.notify_all();
}

void Core::DropLease(const Handle& handle) {
  const std::lock_guard<std::mutex> lock(mu_);
  const auto found = leases_.find({handle.home, handle.seq_id});
  if (found != leases_.end() && found->second.handle == handle) leases_.erase(found);
}

void Core::RenewLoop() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!closing_) {
    LeaseClock::time_point due = LeaseClock::now() + std::chrono::hours(1);
    for (const auto& [key, lease] : leases_) due = std::min(due, lease.due);
    if (LeaseClock::now() < due) {
      changed_.wait_until(lock, due);
      continue;
    }
    const std::vector<Handle> handles = TakeDue(LeaseClock::now());
    const milliseconds patience = RenewPatience();
    lock.unlock();
    for (size_t begin = 0; begin < handles.size(); begin += kRenewItems) {
      const size_t end = std::min(begin + kRenewItems, handles.size());
      Renew({handles.begin() + static_cast<int64_t>(begin),
             handles.begin() + static_cast<int64_t>(end)},
            patience);
    }
    lock.lock();
  }
}

// Holds mu_. Takes what is nearly due as well, so that sequences made one by one share a call.
std::vector<Handle> Core::TakeDue(LeaseClock::time_point now) {
  std::vector<Handle> handles;
  for (auto& [key, lease] : leases_) {
    if (lease.due > now + lease.period / 4) continue;
    lease.due = now + lease.period;
    handles.push_back(lease.handle);
  }
  return handles;
}

// The period of the shortest lease: a renewal that hangs must not let any of them end.
milliseconds Core::RenewPatience() const {
  milliseconds shortest = kRenewPatienceMax;
  for (const auto& [key, lease] : leases_) shortest = std::min(shortest, lease.period);
  return std::max(shortest, kRenewPatienceMin);
}

// A renewal that does not arrive is tried again a period later, twice before the lease ends.
void Core::Renew(const std::vector<Handle>& handles, milliseconds patience) {
  v1::RenewSequencesRequest request;
  for (const Handle& handle : handles) ToProto(handle, request.add_handles());
  v1::RenewSequencesResponse response;
  grpc::ClientContext context;
  Prepare(&context);
  context.set_deadline(Clock::now() + patience);
  if (!stub_->RenewSequences(&context, request, &response).ok()) return;
  for (const ItemError& error : ItemErrors(response.item_errors())) {
    const bool gone = error.status.code() == absl::StatusCode::kNotFound;
    if (gone && error.index < handles.size()) DropLease(handles[error.index]);
  }
}

}  // namespace fp8kvd::client
