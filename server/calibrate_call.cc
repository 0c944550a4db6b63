#include "server/calibrate_call.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"

#include "client/cc/client.h"

namespace fp8kvd {
namespace {

constexpr int kCalls = 201;

struct Place {
  const client::ModelInfo* model = nullptr;
  uint32_t layer = 0;
};

absl::StatusOr<Place> FindPlace(const client::ServerInfo& info) {
  for (const client::ModelInfo& model : info.models) {
    for (const client::LayerGroupInfo& group : model.groups) {
      if (!group.has_sinks && !group.layers.empty()) return Place{&model, group.layers[0]};
    }
  }
  return absl::NotFoundError("every layer of every model has sinks; nothing to time a call on");
}

}  // namespace

absl::StatusOr<double> TimeDecodeCalls(const std::string& target) {
  client::Options options;
  options.target = target;
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(options);
  if (!client.ok()) return client.status();
  absl::StatusOr<client::ServerInfo> info = (*client)->GetServerInfo();
  if (!info.ok()) return info.status();
  absl::StatusOr<Place> place = FindPlace(*info);
  if (!place.ok()) return place.status();
  absl::StatusOr<std::vector<client::Sequence>> created =
      (*client)->CreateSequences({.model = place->model->name, .count = 1});
  if (!created.ok()) return created.status();

  const client::Handle handle = created->front().handle();
  const uint64_t pos = 0;
  const std::vector<uint16_t> q(size_t{place->model->q_heads} * place->model->head_dim, 0x3F80);
  const std::vector<uint16_t> kv(size_t{place->model->kv_heads} * place->model->head_dim, 0x3F80);
  std::vector<double> times_us;
  for (int call = 0; call < kCalls; ++call) {
    client::DecodeArgs args{.model = place->model->name,
                            .layer = place->layer,
                            .handles = {&handle, 1},
                            .positions = {&pos, 1},
                            .q = q};
    args.k = args.v = kv;  // the first call appends, the others replay
    const auto begin = std::chrono::steady_clock::now();
    absl::StatusOr<client::DecodeReply> reply = (*client)->Decode(args);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (!reply.ok()) return reply.status();
    if (!reply->item_errors.empty()) return reply->item_errors[0].status;
    times_us.push_back(took.count());
  }
  if (absl::Status status = created->front().Free(); !status.ok()) return status;
  std::nth_element(times_us.begin(), times_us.begin() + kCalls / 2, times_us.end());
  return times_us[kCalls / 2];
}

}  // namespace fp8kvd
