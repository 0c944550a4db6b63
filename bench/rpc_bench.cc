// What the daemon's server costs over gRPC itself. Two servers, each a process of its own with the
// same polling threads: the daemon's (parse, range check, digest, plan, staging, replies of full
// size; the device is NullBackend) and a raw echo (ByteBuffer in, a prepared ByteBuffer of the
// reply's size out). One client, the same code and the same bytes to both, in blocks that take
// turns, so that both see the same machine. Prints one JSON object.
//   rpc_bench [--smoke] [--uploads] [--target=HOST:PORT]
// --smoke: few calls, to see that it runs. --uploads: those alone. --target: a running daemon in
// place of the first server, with one model of 64/8 heads, d128 (bench/daemon_gpu.py starts one on
// a GPU).
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/grpcpp.h"

#include "bench/null_backend.h"
#include "bench/rpc_client.h"
#include "bench/rpc_echo.h"
#include "config/base/check.h"
#include "fp8kvd/v1/kv.grpc.pb.h"
#include "server/engine/append_step.h"
#include "server/engine/engine.h"
#include "server/malloc_options.h"
#include "server/rpc/server.h"

namespace fp8kvd::bench {
namespace {

constexpr int kPollers = 1;

struct Sizes {
  int blocks = 20;
  int calls = 200;         // of a block
  int messages = 2000;     // of a stream's block
  int chunks = 256;        // of an upload's block
  int beside_calls = 400;  // decodes beside an upload of 1 GB
  int beside_chunks = 1024;
};

ModelGeometry Geometry() {
  ModelGeometry geometry;
  geometry.name = "bench";
  geometry.layers = 1;
  geometry.q_heads = kQHeads;
  geometry.kv_heads = kKvHeads;
  geometry.head_dim = kHeadDim;
  geometry.sm_scale = 0.088F;
  geometry.layer.push_back({});
  geometry.groups.push_back({.kv_heads = kKvHeads,
                             .head_dim = kHeadDim,
                             .window = 0,
                             .precision = Precision::kFp8Kv,
                             .layers = {0}});
  return geometry;
}

// A child that serves until its stop pipe closes.
struct Child {
  pid_t pid = -1;
  int stop = -1;
  int port = 0;
};

template <typename Serve>
Child Spawn(Serve serve) {
  int port_pipe[2];
  int stop_pipe[2];
  FP8KVD_CHECK(pipe(port_pipe) == 0 && pipe(stop_pipe) == 0);
  const pid_t pid = fork();
  FP8KVD_CHECK(pid >= 0);
  if (pid == 0) {
    close(stop_pipe[1]);
    serve([&](int port) {
      FP8KVD_CHECK(write(port_pipe[1], &port, sizeof(port)) == sizeof(port));
      char byte = 0;
      while (read(stop_pipe[0], &byte, 1) > 0) {
      }
    });
    _exit(0);
  }
  close(stop_pipe[0]);
  Child child{.pid = pid, .stop = stop_pipe[1], .port = 0};
  FP8KVD_CHECK(read(port_pipe[0], &child.port, sizeof(child.port)) == sizeof(child.port));
  return child;
}

template <typename Until>
void ServeDaemon(Until until_stopped) {
  TuneMalloc();
  NullBackend backend;
  const engine::SteadyClock clock;
  const config::EngineOptions engine_options;
  config::CacheOptions cache_options;
  cache_options.seqs_max = 256;
  cache_options.seq_len_max = 1 << 20;
  const ModelGeometry geometry = Geometry();
  auto engine =
      engine::Engine::Start(engine_options, cache_options,
                            {{.geometry = geometry, .group_pages = {100000}}}, 1, &backend, &clock);
  FP8KVD_CHECK(engine.ok());
  translate::Catalog catalog;
  catalog.slot_bytes_max = (*engine)->staging().slot_bytes_max();
  catalog.streams_rows = true;  // as for a GPU
  catalog.seqs_max = cache_options.seqs_max;
  catalog.seq_len_max = cache_options.seq_len_max;
  catalog.lease_ttl_ms_max = cache_options.lease_ttl_ms_max;
  catalog.models.push_back(
      {.geometry = geometry,
       .precision_reason = "",
       .group_page_bytes = {0},
       .slice_tokens = {engine::AppendSliceTokens(engine_options, cache_options, geometry, 0, 1)}});
  ops::Metrics metrics;
  config::ServerOptions server_options;
  server_options.listen_address = "127.0.0.1:0";
  server_options.poller_threads = kPollers;
  std::thread engine_thread([&] { FP8KVD_CHECK((*engine)->Run().ok()); });
  engine::Fleet fleet({engine->get()});
  auto server = rpc::Server::Start(server_options, &catalog, &fleet, &clock, {}, &metrics);
  FP8KVD_CHECK(server.ok());
  until_stopped((*server)->port());
  (*engine)->Drain();
  (*server)->Drain();
  (*server)->Shutdown(std::chrono::seconds(5));
  engine_thread.join();
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

void PrintPair(const char* name, const char* unit, double echo, double daemon, double target) {
  std::printf(
      "  \"%s\": {\"unit\": \"%s\", \"echo\": %.1f, \"daemon\": %.1f, \"ratio\": %.3f, "
      "\"target\": %.2f},\n",
      name, unit, echo, daemon, daemon / echo, target);
  std::fflush(stdout);
}

class Bench {
 public:
  Bench(const Sizes& sizes, Target echo, Target daemon)
      : sizes_(sizes), targets_{std::move(echo), std::move(daemon)} {}

  void UnaryAndBidi(int items) {
    std::vector<double> us[2];
    std::vector<double> rate[2];
    for (int block = 0; block < sizes_.blocks; ++block) {
      for (int i : {block % 2, 1 - block % 2}) {
        const auto handles = Create(daemon(), items);
        Client client(targets_[i]);
        client.Unary(Steps(handles, sizes_.calls), &us[i]);
        Free(daemon(), handles);
        const auto stream_handles = Create(daemon(), items);
        rate[i].push_back(
            client.Bidi(Steps(stream_handles, sizes_.messages / items), /*inflight=*/16));
        Free(daemon(), stream_handles);
      }
    }
    const std::string suffix = std::to_string(items) + (items == 1 ? "_item" : "_items");
    PrintPair(("unary_p50_" + suffix).c_str(), "us", Quantile(us[0], 0.5), Quantile(us[1], 0.5),
              1.25);
    PrintPair(("unary_p99_" + suffix).c_str(), "us", Quantile(us[0], 0.99), Quantile(us[1], 0.99),
              0);
    PrintPair(("bidi16_" + suffix).c_str(), "messages/s", Quantile(rate[0], 0.5),
              Quantile(rate[1], 0.5), 0.85);
  }

  // A step of one sequence of 1,024 tokens at a time.
  void BidiOneByOne() {
    constexpr int kPromptChunks = 1024 / kChunkTokens;
    std::vector<double> us[2];
    for (int block = 0; block < sizes_.blocks; ++block) {
      for (int i : {block % 2, 1 - block % 2}) {
        const auto handles = Create(daemon(), 1);
        Client(targets_[1]).Upload(Chunks(handles[0], kPromptChunks));
        Client client(targets_[i]);
        client.BidiOneByOne(Steps(handles, sizes_.calls, 1024), &us[i]);
        Free(daemon(), handles);
      }
    }
    PrintPair("bidi1_p50_kv1024", "us", Quantile(us[0], 0.5), Quantile(us[1], 0.5), 0);
    PrintPair("bidi1_p99_kv1024", "us", Quantile(us[0], 0.99), Quantile(us[1], 0.99), 0);
  }

  // Steps of 128 sequences over one stream: bytes of messages and replies per second.
  void BidiBytes() {
    constexpr int kItems = 128;
    constexpr double kBytes = kItems * (2.0 * kQHeads + 2.0 * kKvHeads) * kHeadDim * 2;
    std::vector<double> rate[2];
    for (int block = 0; block < sizes_.blocks / 4; ++block) {
      for (int i : {block % 2, 1 - block % 2}) {
        const auto handles = Create(daemon(), kItems);
        Client client(targets_[i]);
        rate[i].push_back(client.Bidi(Steps(handles, sizes_.calls / 4), /*inflight=*/4) * kBytes /
                          1e6);
        Free(daemon(), handles);
      }
    }
    PrintPair("bidi4_128_items", "MB/s", Quantile(rate[0], 0.5), Quantile(rate[1], 0.5), 0.8);
  }

  // Each upload over a connection of its own: what one has of the machine, it keeps for its life.
  void Upload() {
    std::vector<double> rate[2];
    for (int block = 0; block < sizes_.blocks / 2; ++block) {
      const auto handles = Create(daemon(), 1);
      const auto chunks = Chunks(handles[0], sizes_.chunks);
      for (int i : {block % 2, 1 - block % 2}) {
        const Target fresh = Connect(targets_[i].name, targets_[i].address);
        rate[i].push_back(Client(fresh).Upload(chunks) / 1e6);
      }
      Free(daemon(), handles);
    }
    PrintPair("upload_1mib_chunks", "MB/s", Quantile(rate[0], 0.5), Quantile(rate[1], 0.5), 0.8);
  }

  void DecodeBesideUpload() {
    std::vector<double> us[2];
    for (int round = 0; round < 2; ++round) {
      for (int i : {round % 2, 1 - round % 2}) {
        const auto handles = Create(daemon(), 2);
        const auto chunks = Chunks(handles[1], sizes_.beside_chunks);
        std::atomic<bool> over{false};
        std::thread uploader([&] {
          Client(targets_[i]).Upload(chunks);
          over = true;
        });
        const auto steps = Steps({handles[0]}, sizes_.beside_calls);
        Client client(targets_[i]);
        for (size_t step = 0; step < steps.size() && !over; ++step) {
          client.Unary({steps[step]}, &us[i]);
        }
        uploader.join();
        Free(daemon(), handles);
      }
    }
    PrintPair("decode_p50_beside_upload", "us", Quantile(us[0], 0.5), Quantile(us[1], 0.5), 0);
    PrintPair("decode_p99_beside_upload", "us", Quantile(us[0], 0.99), Quantile(us[1], 0.99), 1.5);
  }

  void Threads(pid_t daemon_pid) {
    int threads[2] = {};
    Client client(targets_[1]);
    for (int i : {0, 1}) {
      const int streams = i == 0 ? 1 : 1000;
      std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
      std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> open;
      for (int s = 0; s < streams; ++s) {
        contexts.push_back(std::make_unique<grpc::ClientContext>());
        open.push_back(client.Open(contexts.back().get()));
      }
      threads[i] = ThreadsOf(daemon_pid);
      for (const auto& stream : open) client.Close(stream.get());
    }
    std::printf("  \"threads_1_stream\": %d,\n  \"threads_1000_streams\": %d\n}\n", threads[0],
                threads[1]);
  }

 private:
  v1::DecodeAttention::Stub* daemon() { return targets_[1].stub.get(); }

  static int ThreadsOf(pid_t pid) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    std::string word;
    while (status >> word) {
      if (word == "Threads:") {
        int threads = 0;
        status >> threads;
        return threads;
      }
    }
    return 0;
  }

  const Sizes sizes_;
  const Target targets_[2];
};

void Stop(const Child& child) {
  close(child.stop);
  int status = 0;
  waitpid(child.pid, &status, 0);
  FP8KVD_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int Main(bool smoke, bool uploads, const std::string& target) {
  // Before this process touches gRPC: a fork after that is not supported.
  const Child echo = Spawn([](auto until) { ServeEcho(kPollers, until); });
  const bool is_ours = target.empty();
  Child daemon;
  if (is_ours) daemon = Spawn([](auto until) { ServeDaemon(until); });
  const std::string address = is_ours ? "127.0.0.1:" + std::to_string(daemon.port) : target;
  TuneMalloc();
  Sizes sizes;
  if (smoke) sizes = {2, 10, 40, 4, 5, 16};
  std::printf("{\n  \"cores\": %u,\n  \"pollers\": %d,\n  \"shape\": \"%d/%d heads, d%d\",\n",
              std::thread::hardware_concurrency(), kPollers, kQHeads, kKvHeads, kHeadDim);
  {
    Bench bench(sizes, Connect("echo", "127.0.0.1:" + std::to_string(echo.port)),
                Connect("daemon", address));
    bench.Upload();
    if (!uploads) {
      bench.UnaryAndBidi(1);
      bench.UnaryAndBidi(8);
      bench.DecodeBesideUpload();
      bench.BidiOneByOne();
    }
    if (!uploads && !smoke) bench.BidiBytes();
    if (is_ours) {
      bench.Threads(daemon.pid);
    } else {
      std::printf("  \"target\": \"%s\"\n}\n", target.c_str());
    }
  }
  if (is_ours) Stop(daemon);
  Stop(echo);
  return 0;
}

}  // namespace
}  // namespace fp8kvd::bench

int main(int argc, char** argv) {
  bool smoke = false;
  bool uploads = false;
  std::string target;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--smoke") == 0) {
      smoke = true;
    } else if (std::strcmp(argv[i], "--uploads") == 0) {
      uploads = true;
    } else if (std::strncmp(argv[i], "--target=", 9) == 0) {
      target = argv[i] + 9;
    } else {
      std::fputs("usage: rpc_bench [--smoke] [--uploads] [--target=HOST:PORT]\n", stderr);
      return 2;
    }
  }
  return fp8kvd::bench::Main(smoke, uploads, target);
}
