#include "server/rpc/server.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/alarm.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_builder.h"

#include "config/base/check.h"

namespace fp8kvd::rpc {
namespace {

// How long clients that call in a loop are told that we drain, rather than find the port closed.
constexpr std::chrono::milliseconds kNotice(200);
// Until connections are cut: replies leave the socket's buffer.
constexpr std::chrono::milliseconds kLastWrites(50);

void SetLimits(const config::ServerOptions& options, grpc::ServerBuilder* builder) {
  const auto set = [builder](const char* argument, int value) {
    builder->AddChannelArgument(argument, value);
  };
  const auto message_bytes = static_cast<int>(options.message_bytes_max);
  builder->SetMaxReceiveMessageSize(message_bytes);
  builder->SetMaxSendMessageSize(-1);  // requests.cc bounds replies
  // Else whoever reaches the port, with a token or without, fills the memory with connections.
  grpc::ResourceQuota quota("fp8kvd");
  builder->SetResourceQuota(quota.Resize(static_cast<size_t>(options.transport_bytes_max)));
  // gRPC inflates a message whole before it looks at its size, a thousand times what was sent. Rows
  // do not compress, so nobody loses by it: a compressed message ends its call with UNIMPLEMENTED.
  set(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
  set(GRPC_ARG_ALLOW_REUSEPORT, 0);  // else a second daemon takes half of the connections
  set(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.streams_per_connection_max);
  set(GRPC_ARG_MAX_METADATA_SIZE, options.metadata_bytes_max);
  // Dead peers are found; peers that ask for life more often than a tenth of our own pace are cut.
  set(GRPC_ARG_KEEPALIVE_TIME_MS, options.keepalive_ms);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, options.keepalive_ms);
  set(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
      std::max(1000, options.keepalive_ms / 10));
  set(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, options.handshake_ms_max);
  set(GRPC_ARG_MAX_CONNECTION_IDLE_MS, options.connection_idle_ms_max);
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);  // a tensor comes in few slices
}

// Runs a function on a poller's thread, and deletes itself.
class Errand final : public Posted {
 public:
  static void Send(Poller* poller, std::function<void()> function) {
    poller->Post(new Errand(std::move(function)));
  }
  void OnPosted() override {
    function_();
    delete this;
  }

 private:
  explicit Errand(std::function<void()> function) : function_(std::move(function)) {}
  const std::function<void()> function_;
};

}  // namespace

// Sweeps the calls of one poller, on its thread, every so often.
class Server::Sweeper final : private Event {
 public:
  Sweeper(Services* services, Poller* poller, int64_t every_ms)
      : services_(services), poller_(poller), every_ms_(every_ms) {}

  // On the poller's thread, or before it runs.
  void Start() {
    const gpr_timespec wait = gpr_time_from_millis(every_ms_, GPR_TIMESPAN);
    alarm_.Set(poller_->queue(), gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), wait),
               static_cast<Event*>(this));
  }
  // On the poller's thread, before its queue is shut down.
  void Stop() {
    is_stopped_ = true;
    alarm_.Cancel();
  }

 private:
  void Ready(bool) override {
    if (is_stopped_) return;
    services_->Sweep(poller_);
    Start();
  }

  Services* const services_;
  Poller* const poller_;
  const int64_t every_ms_;
  bool is_stopped_ = false;
  grpc::Alarm alarm_;
};

Server::Server(Planner planner, int32_t tenants, ops::Metrics* metrics)
    : planner_(std::move(planner)), services_(metrics), planning_(tenants), measuring_(tenants) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const config::ServerOptions& options,
                                                      const translate::Catalog* catalog,
                                                      engine::Fleet* fleet,
                                                      const engine::Clock* clock, Planner planner,
                                                      ops::Metrics* metrics, Locks locks,
                                                      shm::TicketBook* tickets) {
  std::unique_ptr<Server> self(new Server(std::move(planner), locks.tenants, metrics));
  Parts& parts = self->parts_;
  parts.catalog = catalog;
  parts.fleet = fleet;
  parts.clock = clock;
  self->copiers_ = std::make_unique<Copiers>(options.poller_threads);
  parts.copiers = self->copiers_.get();
  parts.planning = &self->planning_;
  parts.measuring = &self->measuring_;
  parts.planner = &self->planner_;
  parts.tokens = locks.tokens;
  parts.tickets = tickets;
  parts.calls_max = options.streams_max;
  parts.calls_per_tenant_max = options.streams_max / locks.tenants;
  parts.stream_inflight_max = options.stream_inflight_max;

  self->credentials_ = std::move(locks.credentials);
  grpc::ServerBuilder builder;
  SetLimits(options, &builder);
  for (grpc::Service* service : self->services_.grpc_services()) builder.RegisterService(service);
  builder.AddListeningPort(options.listen_address, self->credentials_, &self->port_);
  for (int32_t i = 0; i < options.poller_threads; ++i) {
    self->pollers_.push_back(std::make_unique<Poller>(builder.AddCompletionQueue(), fleet));
  }
  self->server_ = builder.BuildAndStart();
  if (self->server_ == nullptr || self->port_ == 0) {
    for (const std::unique_ptr<Poller>& poller : self->pollers_) poller->queue()->Shutdown();
    for (const std::unique_ptr<Poller>& poller : self->pollers_) poller->Run();
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", options.listen_address,
        ": it is taken by another process, or not an address of this machine; stop that "
        "process or set listen_address (port 0 takes a free one)"));
  }
  for (const std::unique_ptr<Poller>& poller : self->pollers_) {
    self->services_.Listen(&parts, poller.get());
    self->sweepers_.push_back(std::make_unique<Sweeper>(
        &self->services_, poller.get(), options.reader_stall_ms_max / Call::kSweeps));
    self->sweepers_.back()->Start();
    self->threads_.emplace_back([raw = poller.get()] { raw->Run(); });
  }
  return self;
}

Server::~Server() { FP8KVD_CHECK(threads_.empty()); }

void Server::Drain() {
  parts_.draining = true;
  for (const std::unique_ptr<Poller>& poller : pollers_) {
    Errand::Send(poller.get(), [this, raw = poller.get()] { services_.Drain(raw); });
  }
}

void Server::Shutdown(std::chrono::milliseconds patience) {
  // gRPC's own graceful shutdown waits for idle connections too, until their clients happen to
  // look, and what arrives meanwhile is cut. So the calls are waited for here, while new ones are
  // still told that we drain.
  const auto begin = std::chrono::steady_clock::now();
  const auto notice = std::min<std::chrono::milliseconds>(patience / 4, kNotice);
  for (;;) {
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= patience || (waited >= notice && parts_.calls_open == 0)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  server_->Shutdown(std::chrono::system_clock::now() + kLastWrites);
  // What is cut now may still be in the engine, which ends what waits and answers what runs: its
  // answer finds its poller. (Whoever stops the engine afterwards waits for the same.)
  while (parts_.calls_open != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  parts_.stopping = true;
  // On the pollers' own threads, after whatever they are doing now: nothing listens afterwards.
  for (size_t i = 0; i < pollers_.size(); ++i) {
    Errand::Send(pollers_[i].get(), [poller = pollers_[i].get(), sweeper = sweepers_[i].get()] {
      sweeper->Stop();
      poller->Close();
    });
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace fp8kvd::rpc
