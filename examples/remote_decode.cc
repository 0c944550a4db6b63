// The attention of an engine's decode steps, done by a daemon.
//   remote_decode 127.0.0.1:50051 [MODEL]     (CMakeLists.txt beside this says how to build it)
//
// A real engine computes q, k and v from the layer's input and goes on with out; here they are made
// up. Every V element is 2, so that every element of out must be 2, too: a weighted mean.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "client/cc/client.h"

namespace {

using fp8kvd::client::Client;
using fp8kvd::client::ModelInfo;

constexpr uint64_t kPromptTokens = 200;
constexpr uint64_t kSteps = 16;
constexpr uint16_t kTwo = 0x4000;  // bf16

// bf16 between 1 and 2, some of them negative.
std::vector<uint16_t> SomeRows(size_t elements, uint32_t seed) {
  std::vector<uint16_t> rows(elements);
  for (uint16_t& bits : rows) {
    seed = seed * 1'664'525U + 1'013'904'223U;
    bits = static_cast<uint16_t>(0x3F80U | ((seed >> 16) & 0x807FU));
  }
  return rows;
}

absl::StatusOr<ModelInfo> Find(Client& client, const std::string& name) {
  auto info = client.GetServerInfo();
  if (!info.ok()) return info.status();
  std::printf("fp8kvd %s on %s\n", info->version.c_str(), info->device_name.c_str());
  for (const ModelInfo& model : info->models) {
    if (name.empty() || model.name == name) return model;
  }
  return absl::NotFoundError("the daemon has no model " + name);
}

absl::Status Run(const std::string& target, const std::string& name) {
  auto client = Client::Connect({.target = target});
  if (!client.ok()) return client.status();
  auto model = Find(**client, name);
  if (!model.ok()) return model.status();

  // Room for all tokens is reserved, so that no append can fail for want of it.
  auto seqs =
      (*client)->CreateSequences({.model = model->name, .expected_tokens = kPromptTokens + kSteps});
  if (!seqs.ok()) return seqs.status();
  const fp8kvd::client::Handle handle = seqs->front().handle();

  // The prompt, which the engine has attended to by itself: K and V of all layers.
  const size_t kv_row = size_t{model->kv_heads} * model->head_dim;
  const size_t prompt_elements = model->layers * kPromptTokens * kv_row;
  const std::vector<uint16_t> twos(prompt_elements, kTwo);
  const absl::Status appended = (*client)->Append({.model = model->name,
                                                   .handle = handle,
                                                   .layers_count = model->layers,
                                                   .n = kPromptTokens,
                                                   .k = SomeRows(prompt_elements, 1),
                                                   .v = twos});
  if (!appended.ok()) return appended;

  float worst = 0;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t position = kPromptTokens; position < kPromptTokens + kSteps; ++position) {
    for (uint32_t layer = 0; layer < model->layers; ++layer) {
      const auto seed = static_cast<uint32_t>(position * model->layers + layer);
      auto reply = (*client)->Decode({.model = model->name,
                                      .layer = layer,
                                      .handles = {&handle, 1},
                                      .positions = {&position, 1},
                                      .q = SomeRows(size_t{model->q_heads} * model->head_dim, seed),
                                      .k = SomeRows(kv_row, seed + 1),
                                      .v = absl::MakeConstSpan(twos).first(kv_row),
                                      .out_type = fp8kvd::client::OutType::kFp32});
      if (!reply.ok()) return reply.status();
      if (!reply->item_errors.empty()) return reply->item_errors.front().status;
      for (const float out : reply->out_fp32) {
        worst = std::max(worst, std::isfinite(out) ? std::abs(out - 2.0F) : INFINITY);
      }
    }
  }
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  std::printf("%s: %d tokens, %.0f us a layer, largest error %.1e\n", model->name.c_str(),
              static_cast<int>(kPromptTokens + kSteps), took.count() / (kSteps * model->layers),
              worst);
  return worst < 0.01F ? absl::OkStatus() : absl::InternalError("the answers are wrong");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fputs("usage: remote_decode TARGET [MODEL]\n", stderr);
    return 2;
  }
  const absl::Status status = Run(argv[1], argc == 3 ? argv[2] : "");
  if (!status.ok()) std::fprintf(stderr, "remote_decode: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
