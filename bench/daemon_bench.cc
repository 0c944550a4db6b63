// bench/daemon_bench.cc: a load of real clients on a running daemon.
//   daemon_bench TARGET --clients=N --processes=N --batch=N --in_flight=N --seq_len=N --prompts=N
//                       --layers=N --steps=N --append_tokens=N --in_place=1 --waits=1
//                       --transport=grpc|shared_memory
// The clients are threads, spread over `processes`, with a connection each. A client has in_flight
// groups of `batch` sequences of seq_len tokens. A step of a group decodes every layer of the
// model (or its first `layers`, which saves room and uploads), one after the other, each with a
// token appended, as a serving engine does; its groups overlap. Each sequence has pages of its own,
// which its process sends through shared memory first. With prompts > 0 they are forks of so many:
// quicker to make, but rows of one prompt in a launch are read from the device's memory once.
// Prints one JSON object; batch_items_mean is the mean number of items in the launches that served
// the calls, by call; append_gbps is what the processes together sent meanwhile of prompts of
// append_tokens tokens, a layer a call, before the decodes (0: nobody did). With --waits=1 it says
// "filled" on stderr when the sequences have their tokens and "decoded" behind the last decode, and
// goes on when a line comes.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bench/daemon_rows.h"
#include "client/cc/client.h"
#include "client/cc/decode_stream.h"
#include "server/malloc_options.h"

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
  int64_t processes = 1;
  int64_t batch = 1;
  int64_t in_flight = 1;
  int64_t seq_len = 1024;
  int64_t prompts = 0;  // 0: each sequence has its own
  int64_t layers = 0;   // 0: all
  int64_t steps = 50;
  int64_t append_tokens = 0;
  int64_t in_place = 0;  // 1: rows lie in the session from the start (Client::MakeRows)
  int64_t waits = 0;     // 1: for a line, before anything is measured and after it
  Transport transport = Transport::kGrpc;
};

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "daemon_bench: %s\n", why.c_str());
  std::_Exit(1);
}
template <class T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(std::string(value.status().message()));
  return *std::move(value);
}
void Must(const absl::Status& status) {
  if (!status.ok()) Fail(std::string(status.message()));
}
void Must(bool is_right) {
  if (!is_right) Fail("another of its processes ended");
}

// Between the processes: plain values in order.
class Pipe {
 public:
  Pipe() { Must(pipe(ends_) == 0); }
  void Write(const void* bytes, size_t size) const {
    for (const char* at = static_cast<const char*>(bytes); size > 0;) {
      const ssize_t some = write(ends_[1], at, size);
      Must(some > 0);
      at += some;
      size -= static_cast<size_t>(some);
    }
  }
  void Read(void* bytes, size_t size) const {
    for (char* at = static_cast<char*>(bytes); size > 0;) {
      const ssize_t some = read(ends_[0], at, size);
      Must(some > 0);
      at += some;
      size -= static_cast<size_t>(some);
    }
  }
  template <typename T>
  void Put(const T& value) const {
    Write(&value, sizeof(value));
  }
  template <typename T>
  T Get() const {
    T value;
    Read(&value, sizeof(value));
    return value;
  }
  void CloseWriting() { close(ends_[1]); }
  void CloseReading() { close(ends_[0]); }

 private:
  int ends_[2];
};

// Rows of a load, in memory of ours or in place.
class LoadRows {
 public:
  LoadRows(Client& client, const Load& load, size_t elements, uint32_t seed)
      : own_(Rows(elements, seed)), span_(own_) {
    if (load.in_place == 0 || elements == 0) return;
    in_place_ = Must(client.MakeRows(elements));
    std::copy(own_.begin(), own_.end(), in_place_->elements().begin());
    span_ = in_place_->elements();
    own_ = {};
  }
  absl::Span<const uint16_t> span() const { return span_; }

 private:
  std::vector<uint16_t> own_;  // its elements stay where they are when it is moved
  std::optional<fp8kvd::client::SharedRows> in_place_;
  absl::Span<const uint16_t> span_;
};

// Rows for AppendLayers: of so many tokens at a time.
constexpr int64_t kPromptTokens = 8192;
LoadRows PromptRows(Client& client, const Load& load, const ModelInfo& model, int64_t tokens,
                    uint32_t seed) {
  const int64_t row = int64_t{model.kv_heads} * model.head_dim;
  return {client, load, static_cast<size_t>(std::min(kPromptTokens, tokens) * row), seed};
}

// model: as a load sees it, with the layers that it uses.
void AppendLayers(Client& client, const ModelInfo& model, const Handle& handle, int64_t tokens,
                  absl::Span<const uint16_t> prompt) {
  const auto row = static_cast<size_t>(model.kv_heads) * model.head_dim;
  for (int64_t pos = 0; pos < tokens; pos += kPromptTokens) {
    const int64_t n = std::min(kPromptTokens, tokens - pos);
    const auto rows = prompt.first(static_cast<size_t>(n) * row);
    for (uint32_t layer = 0; layer < model.layers; ++layer) {
      Must(client.Append({.model = model.name,
                          .handle = handle,
                          .layer = layer,
                          .pos = static_cast<uint64_t>(pos),
                          .n = static_cast<size_t>(n),
                          .k = rows,
                          .v = rows}));
    }
  }
}

struct Times {
  std::vector<double> call_us;
  double items = 0;  // of the launches that served them
};

// Sequences that are decoded together, one layer after the other.
class Group {
 public:
  Group(Client& client, const ModelInfo& model, const Load& load,
        const std::vector<Handle>& prompts, int64_t index)
      : model_(model), load_(load) {
    if (prompts.empty()) {
      sequences_ = Must(client.CreateSequences(
          {.model = model.name,
           .count = static_cast<uint32_t>(load.batch),
           .expected_tokens = static_cast<uint64_t>(load.seq_len + load.steps)}));
    }
    for (int64_t i = 0; i < load.batch && !prompts.empty(); ++i) {
      auto forks =
          Must(client.ForkSequences(prompts[(index * load.batch + i) % prompts.size()], {}));
      sequences_.push_back(std::move(forks[0]));
    }
    for (const Sequence& sequence : sequences_) handles_.push_back(sequence.handle());
    const auto dims = static_cast<size_t>(model.head_dim) * handles_.size();
    q_.emplace(client, load, dims * model.q_heads, static_cast<uint32_t>(index));
    kv_.emplace(client, load, dims * model.kv_heads, static_cast<uint32_t>(index) + 99);
  }

  // Sequences of their own get what prompts would have given them.
  void Fill(Client& client, absl::Span<const uint16_t> prompt) const {
    for (const Handle& handle : handles_) {
      AppendLayers(client, model_, handle, load_.seq_len, prompt);
    }
  }
  bool is_over() const { return call_ == load_.steps * model_.layers; }
  bool is_under_way() const { return is_under_way_; }
  void Send(fp8kvd::client::DecodeStream& stream, uint64_t id) {
    positions_.assign(handles_.size(),
                      static_cast<uint64_t>(load_.seq_len + call_ / model_.layers));
    begin_ = Clock::now();
    is_under_way_ = true;
    Must(stream.Send(id, {.model = model_.name,
                          .layer = static_cast<uint32_t>(call_ % model_.layers),
                          .handles = handles_,
                          .positions = positions_,
                          .q = q_->span(),
                          .k = kv_->span(),
                          .v = kv_->span()}));
  }
  void Take(const fp8kvd::client::StreamReply& reply, Times* times) {
    Must(reply.status);
    if (!reply.reply.item_errors.empty()) Must(reply.reply.item_errors[0].status);
    times->call_us.push_back(
        std::chrono::duration<double, std::micro>(Clock::now() - begin_).count());
    times->items += reply.reply.batch_items;
    is_under_way_ = false;
    ++call_;
  }

 private:
  const ModelInfo& model_;
  const Load& load_;
  std::vector<Sequence> sequences_;
  std::vector<Handle> handles_;
  std::vector<uint64_t> positions_;
  std::optional<LoadRows> q_, kv_;
  int64_t call_ = 0;
  bool is_under_way_ = false;
  Clock::time_point begin_;
};

struct Worker {
  std::unique_ptr<Client> client;
  std::vector<Group> groups;
  Times times;

  void Run(const Load& load) {
    auto stream = Must(client->OpenDecodeStream(static_cast<int32_t>(load.in_flight)));
    size_t left = groups.size();
    for (size_t i = 0; i < groups.size(); ++i) groups[i].Send(*stream, i);
    while (left > 0) {
      const auto reply = Must(stream->Receive());
      Group& group = groups[reply.request_id];
      group.Take(reply, &times);
      if (group.is_over()) {
        --left;
      } else {
        group.Send(*stream, reply.request_id);
      }
    }
  }
};

void ForEach(std::vector<Worker>& workers, const std::function<void(Worker&)>& function) {
  std::vector<std::thread> threads;
  threads.reserve(workers.size());
  for (Worker& worker : workers) threads.emplace_back([&] { function(worker); });
  for (std::thread& thread : threads) thread.join();
}

ModelInfo ModelOf(Client& client, const Load& load) {
  ModelInfo model = Must(client.GetServerInfo()).models.front();
  if (load.layers > 0) model.layers = std::min(model.layers, static_cast<uint32_t>(load.layers));
  return model;
}

void Fill(const std::string& target, const Load& load, const ModelInfo& model, Worker& worker) {
  // Room for the rows; as many sessions as clients must fit a tenant's bytes.
  const auto client = Must(Client::Connect({.target = target,
                                            .transport = Transport::kSharedMemory,
                                            .shared_memory_bytes = int64_t{24} << 20}));
  Load in_place = load;
  in_place.in_place = 1;
  const LoadRows rows = PromptRows(*client, in_place, model, load.seq_len, /*seed=*/7919);
  for (const Group& group : worker.groups) group.Fill(*client, rows.span());
}

// One of the processes. It says when it has got somewhere and goes on when it is told.
void RunProcess(const std::string& target, const Load& load, int64_t index, const Pipe& orders,
                const Pipe& reports) {
  const auto handles = orders.Get<int64_t>();
  std::vector<Handle> prompts(handles);
  orders.Read(prompts.data(), prompts.size() * sizeof(Handle));
  std::vector<Worker> workers(load.clients / load.processes);
  for (Worker& worker : workers) {
    worker.client = Must(Client::Connect({.target = target, .transport = load.transport}));
  }
  const ModelInfo model = ModelOf(*workers[0].client, load);
  for (size_t i = 0; i < workers.size(); ++i) {
    const auto client = index * static_cast<int64_t>(workers.size()) + static_cast<int64_t>(i);
    for (int64_t group = 0; group < load.in_flight; ++group) {
      workers[i].groups.emplace_back(*workers[i].client, model, load, prompts,
                                     client * load.in_flight + group);
    }
  }
  if (handles == 0) ForEach(workers, [&](Worker& worker) { Fill(target, load, model, worker); });
  std::vector<Sequence> mine;
  mine.reserve(workers.size());
  for (const Worker& worker : workers) {
    mine.push_back(std::move(
        Must(worker.client->CreateSequences({.model = model.name, .expected_tokens = 0}))[0]));
  }
  std::vector<LoadRows> prompt;
  prompt.reserve(workers.size());
  for (const Worker& worker : workers) {
    prompt.push_back(
        PromptRows(*worker.client, load, model, load.append_tokens, static_cast<uint32_t>(index)));
  }
  reports.Put('r');
  orders.Get<char>();
  if (load.append_tokens > 0) {
    ForEach(workers, [&](Worker& worker) {
      const auto at = static_cast<size_t>(&worker - workers.data());
      AppendLayers(*worker.client, model, mine[at].handle(), load.append_tokens, prompt[at].span());
    });
  }
  mine.clear();
  prompt.clear();
  reports.Put('a');
  orders.Get<char>();
  ForEach(workers, [&](Worker& worker) { worker.Run(load); });
  reports.Put('d');
  for (const Worker& worker : workers) {
    reports.Put(worker.times.items);
    reports.Put(static_cast<int64_t>(worker.times.call_us.size()));
    reports.Write(worker.times.call_us.data(), worker.times.call_us.size() * sizeof(double));
  }
}

struct Process {
  Pipe orders;
  Pipe reports;
  pid_t pid = -1;
};

// From the order to all reports of having got there.
double Phase(const std::vector<std::unique_ptr<Process>>& processes) {
  const Clock::time_point begin = Clock::now();
  for (const auto& process : processes) process->orders.Put('g');
  for (const auto& process : processes) process->reports.Get<char>();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void SayAndWait(const char* what) {
  std::fputs(what, stderr);
  while (std::getchar() != '\n' && !std::feof(stdin)) {
  }
}

int Run(const std::string& target, const Load& load) {
  // Before this process touches gRPC: a fork after that is not supported.
  std::vector<std::unique_ptr<Process>> processes;
  for (int64_t i = 0; i < load.processes; ++i) {
    processes.push_back(std::make_unique<Process>());
    Process& process = *processes.back();
    process.pid = fork();
    Must(process.pid >= 0);
    if (process.pid == 0) {
      process.orders.CloseWriting();
      process.reports.CloseReading();
      RunProcess(target, load, i, process.orders, process.reports);
      std::_Exit(0);
    }
    process.orders.CloseReading();
    process.reports.CloseWriting();
  }
  auto client = Must(Client::Connect({.target = target, .transport = load.transport}));
  const ModelInfo model = ModelOf(*client, load);
  std::vector<Sequence> sequences;
  if (load.prompts > 0) {
    sequences = Must(client->CreateSequences(
        {.model = model.name, .count = static_cast<uint32_t>(load.prompts), .expected_tokens = 0}));
  }
  std::vector<Handle> prompts;
  for (const Sequence& sequence : sequences) {
    const LoadRows rows = PromptRows(*client, load, model, load.seq_len,
                                     static_cast<uint32_t>(prompts.size()) * 7919);
    AppendLayers(*client, model, sequence.handle(), load.seq_len, rows.span());
    prompts.push_back(sequence.handle());
  }
  for (const auto& process : processes) {
    process->orders.Put(static_cast<int64_t>(prompts.size()));
    process->orders.Write(prompts.data(), prompts.size() * sizeof(Handle));
  }
  for (const auto& process : processes) process->reports.Get<char>();
  if (load.waits > 0) SayAndWait("filled\n");
  const double append_s = Phase(processes);
  const double wall_s = Phase(processes);
  if (load.waits > 0) SayAndWait("decoded\n");
  std::vector<double> all;
  double items = 0;
  for (const auto& process : processes) {
    for (int64_t i = 0; i < load.clients / load.processes; ++i) {
      items += process->reports.Get<double>();
      std::vector<double> call_us(process->reports.Get<int64_t>());
      process->reports.Read(call_us.data(), call_us.size() * sizeof(double));
      all.insert(all.end(), call_us.begin(), call_us.end());
    }
    waitpid(process->pid, nullptr, 0);
  }
  std::sort(all.begin(), all.end());
  const auto calls = static_cast<double>(all.size());
  const double append_bytes = 4.0 * static_cast<double>(load.clients * load.append_tokens) *
                              model.layers * model.kv_heads * model.head_dim;
  std::printf(
      "{\"clients\": %lld, \"processes\": %lld, \"batch\": %lld, \"in_flight\": %lld, "
      "\"seq_len\": %lld, \"layers\": %u, \"calls\": %.0f, \"wall_s\": %.3f, "
      "\"calls_per_s\": %.1f, \"us_p50\": %.1f, \"us_p99\": %.1f, \"batch_items_mean\": %.2f, "
      "\"append_gbps\": %.2f, \"transport\": \"%s\"}\n",
      static_cast<long long>(load.clients), static_cast<long long>(load.processes),
      static_cast<long long>(load.batch), static_cast<long long>(load.in_flight),
      static_cast<long long>(load.seq_len), model.layers, calls, wall_s, calls / wall_s,
      all[all.size() / 2], all[all.size() * 99 / 100], items / calls, append_bytes / append_s / 1e9,
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
      bool is_optional = false;  // may be 0
    } flags[] = {{"--clients=", &load.clients},
                 {"--processes=", &load.processes},
                 {"--batch=", &load.batch},
                 {"--in_flight=", &load.in_flight},
                 {"--seq_len=", &load.seq_len},
                 {"--prompts=", &load.prompts, true},
                 {"--layers=", &load.layers, true},
                 {"--steps=", &load.steps},
                 {"--append_tokens=", &load.append_tokens, true},
                 {"--in_place=", &load.in_place, true},
                 {"--waits=", &load.waits, true}};
    const std::string argument = argv[i];
    if (argument == "--transport=shared_memory") load.transport = Transport::kSharedMemory;
    bool is_known = argument == "--transport=shared_memory" || argument == "--transport=grpc";
    for (const auto& flag : flags) {
      const size_t length = std::strlen(flag.name);
      if (std::strncmp(argv[i], flag.name, length) != 0) continue;
      *flag.value = std::strtoll(argv[i] + length, nullptr, 10);
      is_known = *flag.value >= (flag.is_optional ? 0 : 1);
    }
    if (!is_known) argc = 0;  // the usage
  }
  if (argc < 2 || load.clients % load.processes != 0) {
    std::fputs(
        "usage: daemon_bench TARGET [--clients=N] [--processes=N, a divisor of clients] "
        "[--batch=N] [--in_flight=N] [--seq_len=N] [--prompts=N] [--layers=N] [--steps=N] "
        "[--append_tokens=N] [--in_place=1] [--waits=1] [--transport=grpc|shared_memory]\n",
        stderr);
    return 2;
  }
  fp8kvd::TuneMalloc();  // as who keeps its buffers
  return Run(argv[1], load);
}
