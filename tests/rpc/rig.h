// tests/rpc/rig.h: the whole server in the test's process: engine on FakeBackend, pollers, a
// loopback port, and a client. Its end checks that nothing was lost: staging slots, pages,
// complaints of the device.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"

#include "config/base/check.h"
#include "fp8kvd/v1/kv.grpc.pb.h"
#include "server/engine/admission.h"
#include "server/engine/append_step.h"
#include "server/engine/engine.h"
#include "server/rpc/server.h"
#include "server/shm/server.h"
#include "tests/support/engine_calls.h"
#include "tests/support/fake_backend.h"

namespace fp8kvd::testing {

// Fences do not pass while the gate is closed: launches stay in flight for as long as a test wants,
// or until the device fails.
class GatedBackend final : public FakeBackend {
 public:
  // Pollers take turns, as they do beside a GPU; e2e has the CPU, where they do not.
  GatedBackend() : FakeBackend(/*returns_at_once=*/true) { SetRecording(false); }
  void Close() { is_closed_ = true; }
  void Open() { is_closed_ = false; }
  // The device fails, and with it whatever is in flight.
  void Break() { is_broken_ = true; }
  // Rows of K and V with a value that no device may see.
  int64_t nonfinite_rows() const { return nonfinite_rows_; }
  int64_t decodes() const { return decodes_; }  // launches handed over so far
  absl::Status Append(const kernels::AppendParams& params) override {
    for (int32_t i = 0; i < params.rows_count; ++i) {
      const kernels::AppendRow& row = params.rows[i];
      const int64_t count = int64_t{row.n} * row.kv_heads * params.head_dim;
      const auto is_bad = [](uint16_t bits) { return (bits & 0x7F80) == 0x7F80; };
      if (std::any_of(row.k, row.k + count, is_bad) || std::any_of(row.v, row.v + count, is_bad)) {
        ++nonfinite_rows_;
      }
    }
    return FakeBackend::Append(params);
  }
  absl::Status Decode(const kernels::DecodeParams& params) override {
    ++decodes_;
    return FakeBackend::Decode(params);
  }
  absl::StatusOr<bool> Passed(kernels::FenceId fence) override {
    if (is_broken_) return absl::InternalError("the fence broke");
    if (is_closed_) return false;
    return FakeBackend::Passed(fence);
  }

 private:
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> is_broken_{false};
  std::atomic<int64_t> decodes_{0};
  std::atomic<int64_t> nonfinite_rows_{0};
};

struct ServerRigOptions {
  ServerRigOptions() {
    server.listen_address = "127.0.0.1:0";
    server.message_bytes_max = 1 << 20;
    server.streams_max = 4096;
    server.stream_inflight_max = 8;
    engine.queue_items_max = 4096;
    engine.batch_rows_max = 64;
    engine.append_slice_bytes_max = 1024;
    engine.staging_bytes = int64_t{16} << 20;
    engine.staging_slots = 256;
    cache.seqs_max = 512;
    cache.seq_len_max = 4096;
    cache.reclaim_slack_tokens = 16;
    cache.poison_freed_pages = true;
    models.push_back(ModelSpec{.name = "m", .pages = 256});
  }

  config::ServerOptions server;
  // Its own socket, where a test gives one.
  config::SharedMemoryOptions shared_memory;
  config::EngineOptions engine;
  config::CacheOptions cache;
  std::vector<ModelSpec> models;
  std::vector<config::TenantOptions> tenants;  // empty: one that nobody is told from
  rpc::Locks locks;
  // On the helper thread, when somebody plans with a model; nothing: no live load.
  std::function<std::optional<config::LiveVerdict>(int32_t model)> live;
  int32_t devices = 1;
};

class ServerRig {
 public:
  explicit ServerRig(ServerRigOptions options = {}) : options_(std::move(options)) {
    std::vector<engine::ModelSetup> models;
    for (const ModelSpec& spec : options_.models) models.push_back(MakeModel(spec));
    StartEngines(models);
    FillCatalog(models);
    engine_thread_ = std::thread([this] { engine_status = engine->Run(); });
    for (const auto& other : more_engines) {
      more_threads_.emplace_back([raw = other.get()] { (void)raw->Run(); });
    }
    rpc::Planner planner;
    for (const ModelSpec& spec : options_.models) {
      config::ModelOptions model;
      model.name = spec.name;
      model.layers = 2;
      model.q_heads = 16;
      model.kv_heads = 2;
      model.head_dim = 128;
      planner.models.push_back(model);
    }
    if (options_.live) planner.live = options_.live;
    const bool has_shm = !options_.shared_memory.shm_socket.empty();
    if (has_shm) {
      shm = std::make_unique<shm::Server>(options_.shared_memory, &catalog, fleet.get(), &clock_,
                                          &metrics);
    }
    auto server_started =
        rpc::Server::Start(options_.server, &catalog, fleet.get(), &clock_, std::move(planner),
                           &metrics, options_.locks, has_shm ? shm->tickets() : nullptr);
    FP8KVD_CHECK(server_started.ok());
    server = *std::move(server_started);
    if (has_shm) FP8KVD_CHECK(shm->Listen(server->port()).ok());
    stub = v1::DecodeAttention::NewStub(Channel());
  }

  ~ServerRig() {
    backend.Open();
    for (GatedBackend& other : more_backends) other.Open();
    Stop(std::chrono::milliseconds(200));
    EXPECT_EQ(fleet->stats().staging_slots_used, 0);
    EXPECT_EQ(server->calls_open(), 0);
    for (const std::string& complaint : backend.complaints()) ADD_FAILURE() << complaint;
    for (const GatedBackend& other : more_backends) {
      for (const std::string& complaint : other.complaints()) ADD_FAILURE() << complaint;
    }
    for (const engine::PoolStats& pool : fleet->stats().pools) {
      EXPECT_EQ(pool.pages_used + pool.pages_free, pool.pages_total);
    }
    server.reset();
    EXPECT_TRUE(shm == nullptr || shm->stats().sessions == 0);
  }

  // As the daemon drains.
  void Stop(std::chrono::milliseconds patience = std::chrono::seconds(20)) {
    if (!engine_thread_.joinable()) return;
    fleet->Drain();
    server->Drain();
    if (shm != nullptr) shm->Drain();
    server->Shutdown(patience);
    if (shm != nullptr) shm->Stop(patience);
    engine_thread_.join();
    for (std::thread& thread : more_threads_) thread.join();
  }

  // A connection of its own.
  std::shared_ptr<grpc::Channel> Channel(
      const std::shared_ptr<grpc::ChannelCredentials>& credentials =
          grpc::InsecureChannelCredentials()) const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(server->port()), credentials,
                                     arguments);
  }

  const ModelGeometry& geometry(int32_t model = 0) const { return catalog.models[model].geometry; }

  std::vector<v1::Handle> Create(int count, uint64_t expected_tokens = 0,
                                 const std::string& model = "m") {
    grpc::ClientContext context;
    v1::CreateSequencesRequest request;
    request.set_model(model);
    request.set_count(count);
    request.set_expected_tokens(expected_tokens);
    v1::CreateSequencesResponse response;
    const grpc::Status status = stub->CreateSequences(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return {response.handles().begin(), response.handles().end()};
  }

  // The rows of token ids in one layer, [n, heads, head_dim].
  std::string RowsOf(RowKind kind, const std::vector<uint64_t>& ids, int32_t layer,
                     int32_t model = 0) const {
    const ModelGeometry& g = geometry(model);
    const int32_t heads = kind == RowKind::kQ ? g.q_heads : g.kv_heads;
    std::vector<uint16_t> rows(ids.size() * heads * g.head_dim);
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int32_t h = 0; h < heads; ++h) {
        FillRow(kind, ids[i], layer, h,
                absl::MakeSpan(rows).subspan((i * heads + h) * g.head_dim, g.head_dim));
      }
    }
    return {reinterpret_cast<const char*>(rows.data()), rows.size() * 2};
  }

  v1::AppendRequest Chunk(const v1::Handle& handle, uint64_t pos, const std::vector<uint64_t>& ids,
                          int32_t layer, const std::string& model = "m") const {
    v1::AppendRequest request;
    request.set_model(model);
    *request.mutable_handle() = handle;
    request.set_layer(layer);
    request.set_pos(pos);
    request.set_n(ids.size());
    request.set_k(RowsOf(RowKind::kK, ids, layer));
    request.set_v(RowsOf(RowKind::kV, ids, layer));
    return request;
  }

  grpc::Status Append(const std::vector<v1::AppendRequest>& chunks,
                      v1::AppendResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::AppendResponse ignored;
    auto writer = stub->Append(&context, response == nullptr ? &ignored : response);
    for (const v1::AppendRequest& chunk : chunks) {
      if (!writer->Write(chunk)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }

  // One token for each handle at its position: token ids append, query ids ask (token + 500000).
  v1::DecodeRequest Step(const std::vector<v1::Handle>& handles, uint64_t pos,
                         const std::vector<uint64_t>& ids, int32_t layer = 0) const {
    v1::DecodeRequest request;
    request.set_model("m");
    request.set_layer(layer);
    std::vector<uint64_t> queries;
    for (size_t i = 0; i < handles.size(); ++i) {
      *request.add_handles() = handles[i];
      request.add_positions(pos);
      queries.push_back(ids[i] + 500000);
    }
    request.set_q(RowsOf(RowKind::kQ, queries, layer));
    request.set_k(RowsOf(RowKind::kK, ids, layer));
    request.set_v(RowsOf(RowKind::kV, ids, layer));
    return request;
  }

  grpc::Status Decode(const v1::DecodeRequest& request, v1::DecodeResponse* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return stub->Decode(&context, request, response);
  }

  // Whether row `row` of a reply is the attention of `query` over `history`, on every head.
  bool IsAnswer(const v1::DecodeResponse& response, int32_t row, uint64_t query,
                const std::vector<uint64_t>& history, int32_t layer = 0) const {
    const ModelGeometry& g = geometry();
    for (int32_t h = 0; h < g.q_heads; ++h) {
      uint64_t mark = 0;
      const size_t at = (row * g.q_heads + h) * g.head_dim * 2;
      if (response.out().size() < at + sizeof(mark)) return false;
      std::memcpy(&mark, response.out().data() + at, sizeof(mark));
      if (mark != ExpectedMark(g, layer, h, query, history)) return false;
    }
    return true;
  }

  int64_t PagesUsed() const {
    int64_t used = 0;
    for (const engine::PoolStats& pool : fleet->stats().pools) used += pool.pages_used;
    return used;
  }

  GatedBackend backend;  // of the first device
  std::deque<GatedBackend> more_backends;
  translate::Catalog catalog;
  ops::Metrics metrics;
  std::unique_ptr<engine::Engine> engine;  // of the first device
  std::vector<std::unique_ptr<engine::Engine>> more_engines;
  std::unique_ptr<engine::Fleet> fleet;
  absl::Status engine_status;  // after Stop
  std::unique_ptr<shm::Server> shm;
  std::unique_ptr<rpc::Server> server;
  std::unique_ptr<v1::DecodeAttention::Stub> stub;

 private:
  void StartEngines(const std::vector<engine::ModelSetup>& models) {
    const auto queues = options_.tenants.empty()
                            ? nullptr
                            : std::make_shared<engine::TenantQueues>(options_.tenants);
    std::vector<engine::Engine*> engines;
    for (int32_t i = 0; i < options_.devices; ++i) {
      GatedBackend* const device = i == 0 ? &backend : &more_backends.emplace_back();
      auto started = engine::Engine::Start(options_.engine, options_.cache, models,
                                           /*incarnation=*/7, device, &clock_, options_.tenants,
                                           {.home = static_cast<uint32_t>(i), .queues = queues});
      FP8KVD_CHECK(started.ok());
      engines.push_back(started->get());
      if (i == 0) {
        engine = *std::move(started);
      } else {
        more_engines.push_back(*std::move(started));
      }
    }
    fleet = std::make_unique<engine::Fleet>(std::move(engines), options_.tenants);
  }

  void FillCatalog(const std::vector<engine::ModelSetup>& models) {
    catalog.version = "test";
    catalog.host_id = "this host";
    catalog.incarnation = 7;
    catalog.device_kind = "fake";
    for (int32_t i = 0; i < options_.devices; ++i) {
      catalog.devices.push_back({.name = "fake:" + std::to_string(i), .model = "none"});
    }
    catalog.message_bytes_max = options_.server.message_bytes_max;
    catalog.slot_bytes_max = engine->staging().slot_bytes_max();
    catalog.seqs_max = options_.cache.seqs_max;
    catalog.seq_len_max = options_.cache.seq_len_max;
    catalog.lease_ttl_ms = options_.cache.lease_ttl_ms;
    catalog.lease_ttl_ms_max = options_.cache.lease_ttl_ms_max;
    for (const engine::ModelSetup& setup : models) {
      translate::CatalogModel model;
      model.geometry = setup.geometry;
      for (int32_t layer = 0; layer < setup.geometry.layers; ++layer) {
        model.slice_tokens.push_back(engine::AppendSliceTokens(
            options_.engine, options_.cache, setup.geometry, layer, /*layers_count=*/1));
      }
      model.group_page_bytes.assign(setup.geometry.groups.size(), 4096);
      catalog.models.push_back(std::move(model));
    }
  }

  const ServerRigOptions options_;
  const engine::SteadyClock clock_;
  std::thread engine_thread_;
  std::vector<std::thread> more_threads_;
};

// Turns until the condition holds; false after a bounded number of turns of a millisecond.
template <typename Condition>
bool Eventually(Condition condition, int milliseconds = 30000) {
  for (int i = 0; i < milliseconds; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

inline std::vector<uint64_t> Ids(int n, uint64_t first) {
  std::vector<uint64_t> ids(n);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

}  // namespace fp8kvd::testing
