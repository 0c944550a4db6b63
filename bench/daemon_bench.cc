// bench/daemon_bench.cc: a load of real clients on a running daemon.
//   daemon_bench TARGET --clients=N --batch=N --seq_len=N --prompts=N --steps=N
//                       --transport=grpc|shared_memory
// Each client is a thread with a connection of its own and `batch` sequences of seq_len tokens. A
// step decodes every layer of the model, one after the other, each with a token appended, as a
// serving engine does. The sequences are forks of `prompts` prompts, which are sent once: what they
// share is the room, not the reading. Prints one JSON object; batch_items_mean is the mean number
// of items in the launches that served the calls, by call; append_gbps is what one thread sent of
// the prompts, 4 MiB a call, each answered before the next.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "bench/daemon_rows.h"
#include "client/cc/client.h"
#include "client/cc/decode_stream.h"

namespace {

using fp8kvd::bench::Rows;
using fp8kvd::client::Client;
using fp8kvd::client::Handle;
using fp8kvd::client::ModelInfo;
using fp8kvd::client::Sequence;
using fp8kvd::client::Transport;
using Clock = std::chrono::steady_clock;

struct Load {
  int64_t clients = 1;
  int64_t batch = 1;
  int64_t seq_len = 1024;
  int64_t prompts = 1;
  int64_t steps = 50;
  Transport transport = Transport::kGrpc;
};

template <class T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "daemon_bench: %s\n", std::string(value.status().message()).c_str());
  std::exit(1);  // NOLINT(concurrency-mt-unsafe): nothing of ours runs at exit
}
void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "daemon_bench: %s\n", std::string(status.message()).c_str());
  std::exit(1);  // NOLINT(concurrency-mt-unsafe): nothing of ours runs at exit
}

class Prompts {
 public:
  Prompts(Client& client, const ModelInfo& model, const Load& load) {
    constexpr int64_t kTokens = 1024;
    const auto row = static_cast<size_t>(model.kv_heads) * model.head_dim;
    sequences_ = Must(client.CreateSequences(
        {.model = model.name, .count = static_cast<uint32_t>(load.prompts), .expected_tokens = 0}));
    for (size_t i = 0; i < sequences_.size(); ++i) {
      for (int64_t pos = 0; pos < load.seq_len; pos += kTokens) {
        const int64_t n = std::min(kTokens, load.seq_len - pos);
        const auto rows = Rows(n * row, static_cast<uint32_t>(i * 7919 + pos));
        for (uint32_t layer = 0; layer < model.layers; ++layer) {
          const Clock::time_point begin = Clock::now();
          Must(client.Append({.model = model.name,
                              .handle = sequences_[i].handle(),
                              .layer = layer,
                              .pos = static_cast<uint64_t>(pos),
                              .n = static_cast<size_t>(n),
                              .k = rows,
                              .v = rows}));
          append_s_ += std::chrono::duration<double>(Clock::now() - begin).count();
          append_bytes_ += 2.0 * 2 * static_cast<double>(rows.size());
        }
      }
    }
  }
  const Handle& at(int64_t i) const { return sequences_[i % sequences_.size()].handle(); }
  double append_gbps() const { return append_bytes_ / append_s_ / 1e9; }

 private:
  double append_s_ = 0;
  double append_bytes_ = 0;
  std::vector<Sequence> sequences_;
};

struct Times {
  std::vector<double> call_us;
  double items = 0;  // of the launches that served them
};

void RunClient(const std::string& target, const ModelInfo& model, const Load& load,
               const Prompts& prompts, int64_t index, const std::atomic<bool>& go, Times* times) {
  auto client = Must(Client::Connect({.target = target, .transport = load.transport}));
  std::vector<Sequence> sequences;
  std::vector<Handle> handles;
  for (int64_t i = 0; i < load.batch; ++i) {
    auto forks = Must(client->ForkSequences(prompts.at(index * load.batch + i), {}));
    handles.push_back(forks[0].handle());
    sequences.push_back(std::move(forks[0]));
  }
  const auto dims = static_cast<size_t>(model.head_dim) * handles.size();
  const std::vector<uint16_t> q = Rows(dims * model.q_heads, static_cast<uint32_t>(index));
  const std::vector<uint16_t> kv = Rows(dims * model.kv_heads, static_cast<uint32_t>(index) + 99);
  auto stream = Must(client->OpenDecodeStream(1));
  while (!go) std::this_thread::yield();
  uint64_t id = 0;
  for (int64_t step = 0; step < load.steps; ++step) {
    const std::vector<uint64_t> positions(handles.size(),
                                          static_cast<uint64_t>(load.seq_len + step));
    for (uint32_t layer = 0; layer < model.layers; ++layer) {
      const Clock::time_point begin = Clock::now();
      Must(stream->Send(++id, {.model = model.name,
                               .layer = layer,
                               .handles = handles,
                               .positions = positions,
                               .q = q,
                               .k = kv,
                               .v = kv}));
      const auto reply = Must(stream->Receive());
      Must(reply.status);
      if (!reply.reply.item_errors.empty()) Must(reply.reply.item_errors[0].status);
      times->call_us.push_back(
          std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
      times->items += reply.reply.batch_items;
    }
  }
}

int Run(const std::string& target, const Load& load) {
  auto client = Must(Client::Connect({.target = target, .transport = load.transport}));
  const ModelInfo model = Must(client->GetServerInfo()).models.front();
  const Prompts prompts(*client, model, load);
  std::vector<Times> times(load.clients);
  std::vector<std::thread> threads;
  std::atomic<bool> go{false};
  for (int64_t i = 0; i < load.clients; ++i) {
    threads.emplace_back([&, i] { RunClient(target, model, load, prompts, i, go, &times[i]); });
  }
  std::this_thread::sleep_for(std::chrono::seconds(1));  // until all have their sequences
  const Clock::time_point begin = Clock::now();
  go = true;
  for (std::thread& thread : threads) thread.join();
  const double wall_s = std::chrono::duration<double>(Clock::now() - begin).count();
  std::vector<double> all;
  double items = 0;
  for (const Times& of_client : times) {
    all.insert(all.end(), of_client.call_us.begin(), of_client.call_us.end());
    items += of_client.items;
  }
  std::sort(all.begin(), all.end());
  const auto calls = static_cast<double>(all.size());
  std::printf(
      "{\"clients\": %lld, \"batch\": %lld, \"seq_len\": %lld, \"layers\": %u, \"calls\": %.0f, "
      "\"wall_s\": %.3f, \"calls_per_s\": %.1f, \"us_p50\": %.1f, \"us_p99\": %.1f, "
      "\"batch_items_mean\": %.2f, \"append_gbps\": %.2f, \"transport\": \"%s\"}\n",
      static_cast<long long>(load.clients), static_cast<long long>(load.batch),
      static_cast<long long>(load.seq_len), model.layers, calls, wall_s, calls / wall_s,
      all[all.size() / 2], all[all.size() * 99 / 100], items / calls, prompts.append_gbps(),
      load.transport == Transport::kGrpc ? "grpc" : "shared_memory");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Load load;
  for (int i = 2; i < argc; ++i) {
    const struct {
      const char* name;
      int64_t* value;
    } flags[] = {{"--clients=", &load.clients},
                 {"--batch=", &load.batch},
                 {"--seq_len=", &load.seq_len},
                 {"--prompts=", &load.prompts},
                 {"--steps=", &load.steps}};
    const std::string argument = argv[i];
    if (argument == "--transport=shared_memory") load.transport = Transport::kSharedMemory;
    bool is_known = argument == "--transport=shared_memory" || argument == "--transport=grpc";
    for (const auto& flag : flags) {
      const size_t length = std::strlen(flag.name);
      if (std::strncmp(argv[i], flag.name, length) != 0) continue;
      *flag.value = std::strtoll(argv[i] + length, nullptr, 10);
      is_known = *flag.value >= 1;
    }
    if (!is_known) argc = 0;  // the usage
  }
  if (argc < 2) {
    std::fputs(
        "usage: daemon_bench TARGET [--clients=N] [--batch=N] [--seq_len=N] [--prompts=N] "
        "[--steps=N] [--transport=grpc|shared_memory]\n",
        stderr);
    return 2;
  }
  return Run(argv[1], load);
}
