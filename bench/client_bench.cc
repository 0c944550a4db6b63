// What one decode call costs a C++ client: the floor of bench/py_overhead.py, which starts it.
//   client_bench TARGET MODEL CALLS     attend only, one sequence of 64 tokens, one call at a time
// Prints the microseconds of each call, one a line.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "client/cc/client.h"

namespace {

using fp8kvd::client::Client;

constexpr uint64_t kTokens = 64;

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "client_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

int Run(Client& client, const std::string& model_name, int64_t calls) {
  auto info = client.GetServerInfo();
  if (!info.ok()) return Fail(info.status());
  for (const auto& model : info->models) {
    if (model.name != model_name) continue;
    auto seqs = client.CreateSequences({.model = model_name, .expected_tokens = kTokens});
    if (!seqs.ok()) return Fail(seqs.status());
    const fp8kvd::client::Handle handle = seqs->front().handle();
    const std::vector<uint16_t> kv(kTokens * model.kv_heads * model.head_dim, 0x3F80);
    const std::vector<uint16_t> q(size_t{1} * model.q_heads * model.head_dim, 0x3F80);
    const absl::Status appended =
        client.Append({.model = model_name, .handle = handle, .n = kTokens, .k = kv, .v = kv});
    if (!appended.ok()) return Fail(appended);
    const uint64_t position = kTokens - 1;
    for (int64_t call = 0; call < calls; ++call) {
      const auto start = std::chrono::steady_clock::now();
      const auto reply = client.Decode(
          {.model = model_name, .handles = {&handle, 1}, .positions = {&position, 1}, .q = q});
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - start;
      if (!reply.ok()) return Fail(reply.status());
      std::printf("%.2f\n", took.count());
    }
    return 0;
  }
  return Fail(absl::NotFoundError("the daemon has no model " + model_name));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: client_bench TARGET MODEL CALLS\n", stderr);
    return 2;
  }
  auto client = Client::Connect({.target = argv[1], .transport = fp8kvd::client::Transport::kGrpc});
  if (!client.ok()) return Fail(client.status());
  return Run(**client, argv[2], std::strtoll(argv[3], nullptr, 10));
}
