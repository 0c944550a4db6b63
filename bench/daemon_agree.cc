// bench/daemon_agree.cc: whether two daemons of one configuration answer alike: the same prompts
// and the same steps to both, for the first layer of each layer group of each model.
//   daemon_agree TARGET_A TARGET_B
// Prints one JSON object; exit code 1 if the relative L2 of any answer's difference is over 4e-3.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bench/daemon_rows.h"
#include "client/cc/client.h"

namespace {

using fp8kvd::bench::Rows;
using fp8kvd::client::Client;
using fp8kvd::client::LayerGroupInfo;
using fp8kvd::client::ModelInfo;

constexpr double kAllowed = 4e-3;
// Of one of the example's models the first is over 512 KiB, which a GPU brings before the slice
// goes; a layer of a window of 512 may be no further ahead of its group.
constexpr int64_t kSlices[] = {600, 60, 60};
constexpr int64_t kPromptTokens = 720;
constexpr int kSteps = 16;
constexpr int kSequences = 3;

template <class T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "daemon_agree: %s\n", std::string(value.status().message()).c_str());
  std::exit(2);  // NOLINT(concurrency-mt-unsafe): one thread
}
void Must(const absl::Status& status) {
  if (!status.ok()) Must(absl::StatusOr<int>(status));
}

// fp32 answers of all steps.
std::vector<float> Answers(Client& client, const ModelInfo& model, const LayerGroupInfo& group) {
  const auto row = static_cast<size_t>(model.kv_heads) * model.head_dim;
  auto sequences = Must(client.CreateSequences(
      {.model = model.name, .count = kSequences, .expected_tokens = kPromptTokens + kSteps}));
  std::vector<fp8kvd::client::Handle> handles;
  handles.reserve(sequences.size());
  for (const auto& sequence : sequences) handles.push_back(sequence.handle());
  int64_t pos = 0;
  for (const int64_t n : kSlices) {
    for (size_t i = 0; i < handles.size(); ++i) {
      const auto k = Rows(n * row, static_cast<uint32_t>(pos * 31 + i));
      const auto v = Rows(n * row, static_cast<uint32_t>(pos * 37 + i + 5));
      for (const uint32_t layer : group.layers) {
        Must(client.Append({.model = model.name,
                            .handle = handles[i],
                            .layer = layer,
                            .pos = static_cast<uint64_t>(pos),
                            .n = static_cast<size_t>(n),
                            .k = k,
                            .v = v}));
      }
    }
    pos += n;
  }
  std::vector<float> answers;
  const std::vector<float> sinks(group.has_sinks ? model.q_heads : 0, 0.25F);
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<uint64_t> positions(handles.size(), kPromptTokens + step);
    const auto q = Rows(handles.size() * model.q_heads * model.head_dim, 1000 + step);
    const auto k = Rows(handles.size() * row, 2000 + step);
    const auto v = Rows(handles.size() * row, 3000 + step);
    const auto reply = Must(client.Decode({.model = model.name,
                                           .layer = group.layers.front(),
                                           .handles = handles,
                                           .positions = positions,
                                           .q = q,
                                           .k = k,
                                           .v = v,
                                           .sink_logits = sinks,
                                           .out_type = fp8kvd::client::OutType::kFp32}));
    if (!reply.item_errors.empty()) Must(reply.item_errors[0].status);
    answers.insert(answers.end(), reply.out_fp32.begin(), reply.out_fp32.end());
  }
  return answers;
}

double RelativeL2(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    size += std::pow(double{b[i]}, 2);
  }
  const double error = std::sqrt(difference / size);
  return a.size() == b.size() && std::isfinite(error) ? error : INFINITY;  // std::max drops NaN
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: daemon_agree TARGET_A TARGET_B\n", stderr);
    return 2;
  }
  auto a = Must(Client::Connect({.target = argv[1]}));
  auto b = Must(Client::Connect({.target = argv[2]}));
  const auto info = Must(a->GetServerInfo());
  double worst = 0;
  int groups = 0;
  for (const ModelInfo& model : info.models) {
    for (const LayerGroupInfo& group : model.groups) {
      worst = std::max(worst, RelativeL2(Answers(*a, model, group), Answers(*b, model, group)));
      ++groups;
    }
  }
  std::printf("{\"groups\": %d, \"relative_l2_max\": %.6f, \"allowed\": %.4f, \"held\": %s}\n",
              groups, worst, kAllowed, worst <= kAllowed && groups > 0 ? "true" : "false");
  return worst <= kAllowed && groups > 0 ? 0 : 1;
}
