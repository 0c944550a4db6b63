// Many clients at the smallest cost: what a running daemon makes of them, not what they take. One
// thread with one completion queue has `clients` connections, a stream on each, and one request
// under way on each: a step of one sequence of its own, a layer after the other.
//   crowd_bench TARGET --clients=N --seq_len=N --steps=N
// The model is the daemon's first, of 64/8 heads, d128. Prints one JSON object; batch_items_mean as
// in daemon_bench.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/rpc_client.h"
#include "server/malloc_options.h"

namespace fp8kvd::bench {
namespace {

struct Load {
  int64_t clients = 64;
  int64_t seq_len = 1024;
  int64_t steps = 50;
};

// seq_len tokens in every layer; forks of it share them.
v1::Handle MakePrompt(const Target& target, const Load& load, int layers) {
  const v1::Handle handle = Create(target.stub.get(), 1)[0];
  for (int layer = 0; layer < layers; ++layer) {
    v1::AppendRequest request;
    *request.mutable_handle() = handle;
    request.set_layer(layer);
    request.set_n(kChunkTokens);
    request.set_k(std::string(kChunkBytes / 2, '\x3F'));
    request.set_v(std::string(kChunkBytes / 2, '\x3E'));
    std::vector<grpc::ByteBuffer> chunks;
    for (int64_t pos = 0; pos < load.seq_len; pos += kChunkTokens) {
      request.set_pos(pos);
      chunks.push_back(ToBytes(request));
    }
    Client(target).Upload(chunks);
  }
  return handle;
}

class OneOfMany {
 public:
  OneOfMany(const std::string& target, const v1::Handle& prompt, grpc::CompletionQueue* queue)
      : channel_(Dial(target)), stub_(channel_) {
    grpc::ClientContext context;
    v1::ForkSequencesRequest fork;
    *fork.mutable_parent() = prompt;
    fork.set_count(1);
    v1::ForkSequencesResponse forked;
    FP8KVD_CHECK(
        v1::DecodeAttention::NewStub(channel_)->ForkSequences(&context, fork, &forked).ok());
    *request_.add_handles() = forked.handles(0);
    request_.set_q(std::string(kQHeads * kHeadDim * 2, '\x3F'));
    request_.set_k(std::string(kKvHeads * kHeadDim * 2, '\x3E'));
    request_.set_v(std::string(kKvHeads * kHeadDim * 2, '\x3D'));
    request_.add_positions(0);
    stream_ = stub_.PrepareCall(&context_, "/fp8kvd.v1.DecodeAttention/DecodeStream", queue);
    stream_->StartCall(nullptr);
  }

  void Send(int64_t pos, int64_t layer) {
    request_.set_layer(layer);
    request_.set_positions(0, pos);
    request_.set_request_id(++calls);
    begin_ = SteadyTime::now();
    stream_->Write(ToBytes(request_), nullptr);
    stream_->Read(&reply_, this);
  }
  // Whether the request ended; else what came was something else.
  double Took() const {
    return std::chrono::duration<double, std::micro>(SteadyTime::now() - begin_).count();
  }
  int BatchItems() {
    std::vector<grpc::Slice> slices;
    FP8KVD_CHECK(reply_.Dump(&slices).ok());
    std::string bytes;
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    v1::DecodeResponse response;
    FP8KVD_CHECK(response.ParseFromString(bytes) && response.item_errors().empty() &&
                 !response.has_error());
    return static_cast<int>(response.timings().batch_items());
  }
  void Cancel() { context_.TryCancel(); }

  int64_t calls = 0;

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  v1::DecodeRequest request_;
  grpc::ByteBuffer reply_;
  SteadyTime::time_point begin_;
};

int Run(const std::string& address, const Load& load) {
  TuneMalloc();
  const Target target = Connect("daemon", address);
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  FP8KVD_CHECK(target.stub->GetServerInfo(&context, {}, &info).ok());
  const auto layers = static_cast<int>(info.models(0).layers());
  const v1::Handle prompt = MakePrompt(target, load, layers);
  grpc::CompletionQueue queue;
  std::vector<std::unique_ptr<OneOfMany>> crowd;
  void* tag = nullptr;
  bool ok = false;
  for (int64_t i = 0; i < load.clients; ++i) {
    crowd.push_back(std::make_unique<OneOfMany>(address, prompt, &queue));
    FP8KVD_CHECK(queue.Next(&tag, &ok) && ok);
  }
  std::vector<double> us;
  int64_t samples = 0;
  double items = 0;
  const int64_t calls = load.steps * layers;
  const auto begin = SteadyTime::now();
  for (const auto& one : crowd) one->Send(load.seq_len, 0);
  for (int64_t left = load.clients; left > 0;) {
    FP8KVD_CHECK(queue.Next(&tag, &ok) && ok);
    if (tag == nullptr) continue;  // a write has left
    auto* const one = static_cast<OneOfMany*>(tag);
    us.push_back(one->Took());
    if (us.size() % 8 == 0) {  // to parse them all would double this thread's work
      items += one->BatchItems();
      ++samples;
    }
    if (one->calls == calls) {
      --left;
    } else {
      one->Send(load.seq_len + one->calls / layers, one->calls % layers);
    }
  }
  const std::chrono::duration<double> wall = SteadyTime::now() - begin;
  for (const auto& one : crowd) one->Cancel();
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  std::sort(us.begin(), us.end());
  const auto count = static_cast<double>(us.size());
  std::printf(
      "{\"clients\": %lld, \"seq_len\": %lld, \"calls\": %.0f, \"wall_s\": %.3f, "
      "\"calls_per_s\": %.1f, \"us_p50\": %.1f, \"us_p99\": %.1f, \"batch_items_mean\": %.2f}\n",
      static_cast<long long>(load.clients), static_cast<long long>(load.seq_len), count,
      wall.count(), count / wall.count(), us[us.size() / 2], us[us.size() * 99 / 100],
      items / static_cast<double>(samples));
  return 0;
}

}  // namespace
}  // namespace fp8kvd::bench

int main(int argc, char** argv) {
  fp8kvd::bench::Load load;
  for (int i = 2; i < argc; ++i) {
    const struct {
      const char* name;
      int64_t* value;
    } flags[] = {
        {"--clients=", &load.clients}, {"--seq_len=", &load.seq_len}, {"--steps=", &load.steps}};
    bool is_known = false;
    for (const auto& flag : flags) {
      const size_t length = std::strlen(flag.name);
      if (std::strncmp(argv[i], flag.name, length) != 0) continue;
      *flag.value = std::strtoll(argv[i] + length, nullptr, 10);
      is_known = *flag.value >= 1;
    }
    if (!is_known) argc = 0;  // the usage
  }
  if (argc < 2) {
    std::fputs("usage: crowd_bench TARGET [--clients=N] [--seq_len=N] [--steps=N]\n", stderr);
    return 2;
  }
  return fp8kvd::bench::Run(argv[1], load);
}
