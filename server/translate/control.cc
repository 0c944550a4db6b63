#include "server/translate/control.h"

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "server/translate/requests.h"
#include "server/translate/status.h"

namespace fp8kvd::translate {
namespace {

using Op = engine::ControlRequest::Op;
using Handles = google::protobuf::RepeatedPtrField<v1::Handle>;

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

cache::SeqHandle ToHandle(const v1::Handle& handle) {
  return translate::ToHandle(WireHandle{.seq_id = handle.seq_id(),
                                        .generation = handle.generation(),
                                        .incarnation = handle.incarnation(),
                                        .home = handle.home()});
}

// A field that may be 0 to max.
absl::Status CheckAtMost(absl::string_view field, uint64_t value, int64_t max,
                         absl::string_view unit, absl::string_view what_to_do) {
  if (value <= static_cast<uint64_t>(max)) return absl::OkStatus();
  return Invalid(field, " is ", value, ", at most ", max, " ", unit, " are allowed; ", what_to_do);
}

absl::Status ReadSizes(const Catalog& catalog, uint32_t count, uint64_t expected_tokens,
                       uint64_t ttl_ms, engine::ControlRequest* to) {
  absl::Status status =
      CheckAtMost("count", count, kItemsMax, "sequences", "make them in several calls");
  if (!status.ok()) return status;
  status = CheckAtMost("expected_tokens", expected_tokens, catalog.seq_len_max,
                       "tokens of one sequence", "expect fewer, or 0 for best effort");
  if (!status.ok()) return status;
  status = CheckAtMost("ttl_ms", ttl_ms, catalog.lease_ttl_ms_max, "milliseconds",
                       "ask for a shorter lease and renew it");
  if (!status.ok()) return status;
  to->count = count == 0 ? 1 : static_cast<int32_t>(count);
  to->expected_tokens = static_cast<int64_t>(expected_tokens);
  to->ttl_ms = static_cast<int64_t>(ttl_ms);
  return absl::OkStatus();
}

absl::StatusOr<ControlRequestPtr> WithHandles(Op op, const Handles& handles) {
  if (handles.empty() || handles.size() > kItemsMax) {
    return Invalid("handles has ", handles.size(), " entries, a call takes 1 to ", kItemsMax,
                   "; send them in several calls");
  }
  auto to = std::make_unique<engine::ControlRequest>(op);
  to->handles.reserve(handles.size());
  for (const v1::Handle& handle : handles) to->handles.push_back(ToHandle(handle));
  return to;
}

template <typename Response>
void AddItemErrors(const engine::ControlRequest& from, Response* to) {
  ItemErrors errors(ItemErrors::kTextBytesMin);
  for (size_t i = 0; i < from.item_status.size(); ++i) {
    if (from.item_status[i].ok()) continue;
    *to->add_item_errors() = errors.Next(i, from.item_status[i], /*retry_after_ms=*/0);
  }
}

template <typename Response>
void AddHandles(const engine::ControlRequest& from, Response* to) {
  for (const cache::SeqHandle& handle : from.handles) *to->add_handles() = FromHandle(handle);
}

v1::SequenceInfo FromInfo(const Catalog& catalog, const engine::SequenceInfo& from) {
  v1::SequenceInfo to;
  *to.mutable_handle() = FromHandle(from.handle);
  to.set_model(catalog.models[from.model].geometry.name);
  for (const int64_t seq_len : from.seq_lens) to.add_seq_lens(seq_len);
  to.set_pages(from.pages);
  to.set_pages_shared(from.pages_shared);
  to.set_bytes(from.bytes);
  to.set_expected_tokens(from.expected_tokens);
  to.set_ttl_ms(from.ttl_ms);
  to.set_ttl_left_ms(from.ttl_left_ms);
  return to;
}

void AddModel(const CatalogModel& from, v1::ModelInfo* to) {
  const ModelGeometry& geometry = from.geometry;
  to->set_name(geometry.name);
  to->set_layers(geometry.layers);
  to->set_q_heads(geometry.q_heads);
  to->set_kv_heads(geometry.kv_heads);
  to->set_head_dim(geometry.head_dim);
  to->set_sm_scale(geometry.sm_scale);
  to->set_precision_reason(from.precision_reason);
  for (const LayerGroup& group : geometry.groups) {
    v1::LayerGroupInfo* info = to->add_groups();
    info->set_page_bytes(from.group_page_bytes[to->groups_size() - 1]);
    for (const int32_t layer : group.layers) info->add_layers(layer);
    const auto sinks = [&](int32_t layer) { return geometry.layer[layer].has_sinks; };
    info->set_window(group.window);
    info->set_softcap(geometry.layer[group.layers.front()].softcap);
    info->set_has_sinks(std::any_of(group.layers.begin(), group.layers.end(), sinks));
    info->set_precision(FromPrecision(group.precision));
    info->set_page_tokens(kPageTokens);
  }
}

}  // namespace

v1::Handle FromHandle(const cache::SeqHandle& handle) {
  v1::Handle to;
  to.set_seq_id(static_cast<uint64_t>(handle.seq_id));
  to.set_generation(handle.generation);
  to.set_incarnation(handle.incarnation);
  to.set_home(handle.home);
  return to;
}

v1::Precision FromPrecision(Precision precision) {
  return precision == Precision::kFp8Kv ? v1::PRECISION_FP8_KV : v1::PRECISION_BF16;
}

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::CreateSequencesRequest& from) {
  auto to = std::make_unique<engine::ControlRequest>(Op::kCreate);
  const absl::StatusOr<int32_t> model =
      FindModel(catalog, from.model(), static_cast<int64_t>(from.model().size()));
  if (!model.ok()) return model.status();
  to->model = *model;
  absl::Status status =
      ReadSizes(catalog, from.count(), from.expected_tokens(), from.ttl_ms(), to.get());
  if (!status.ok()) return status;
  return to;
}

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::ForkSequencesRequest& from) {
  if (!from.has_parent()) {
    return Invalid("parent is missing; send the handle of the sequence to fork");
  }
  auto to = std::make_unique<engine::ControlRequest>(Op::kFork);
  to->handles.push_back(ToHandle(from.parent()));
  absl::Status status =
      ReadSizes(catalog, from.count(), from.expected_tokens(), from.ttl_ms(), to.get());
  if (!status.ok()) return status;
  return to;
}

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::TruncateSequencesRequest& from) {
  absl::StatusOr<ControlRequestPtr> to = WithHandles(Op::kTruncate, from.handles());
  if (!to.ok()) return to;
  if (from.seq_lens_size() != from.handles_size()) {
    return Invalid("seq_lens has ", from.seq_lens_size(), " entries for ", from.handles_size(),
                   " handles; send one length for each");
  }
  for (int i = 0; i < from.seq_lens_size(); ++i) {
    if (from.seq_lens(i) > static_cast<uint64_t>(catalog.seq_len_max)) {
      return Invalid("item ", i, ": seq_lens is ", from.seq_lens(i), ", a sequence has at most ",
                     catalog.seq_len_max, " tokens; send how many shall remain");
    }
    (*to)->seq_lens.push_back(static_cast<int64_t>(from.seq_lens(i)));
  }
  return to;
}

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog&, const v1::FreeSequencesRequest& from) {
  return WithHandles(Op::kFree, from.handles());
}

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog&, const v1::RenewSequencesRequest& from) {
  return WithHandles(Op::kRenew, from.handles());
}

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog&, const v1::StatSequencesRequest& from) {
  return WithHandles(Op::kStat, from.handles());
}

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::ListSequencesRequest& from) {
  auto to = std::make_unique<engine::ControlRequest>(Op::kList);
  if (!from.model().empty()) {
    const absl::StatusOr<int32_t> model =
        FindModel(catalog, from.model(), static_cast<int64_t>(from.model().size()));
    if (!model.ok()) return model.status();
    to->model = *model;
  }
  constexpr uint32_t kMax = kItemsMax;
  const bool asks = from.page_size() >= 1 && from.page_size() <= kMax;
  to->count = static_cast<int32_t>(asks ? from.page_size() : kMax);
  if (!from.page_token().empty() && !absl::SimpleAtoi(from.page_token(), &to->list_after)) {
    return Invalid(
        "page_token is none that this server gave; send next_page_token as it came, or "
        "nothing to start anew");
  }
  return to;
}

v1::GetServerInfoResponse ServerInfo(const Catalog& catalog) {
  v1::GetServerInfoResponse to;
  to.set_version(catalog.version);
  to.set_incarnation(catalog.incarnation);
  to.set_device_kind(catalog.device_kind);
  for (const CatalogDevice& device : catalog.devices) {
    v1::DeviceInfo* const info = to.add_devices();
    info->set_name(device.name);
    info->set_device_name(device.model);
  }
  if (!catalog.devices.empty()) to.set_device_name(catalog.devices.front().model);
  to.set_host_id(catalog.host_id);
  for (const CatalogModel& model : catalog.models) AddModel(model, to.add_models());
  v1::Limits* limits = to.mutable_limits();
  limits->set_message_bytes_max(catalog.message_bytes_max);
  limits->set_append_chunk_bytes_max(
      std::min({kAppendChunkBytesMax, catalog.slot_bytes_max / 2, catalog.message_bytes_max / 2}));
  limits->set_items_max(kItemsMax);
  limits->set_q_len_max(kQLenMax);
  limits->set_seq_len_max(catalog.seq_len_max);
  limits->set_seqs_max(catalog.seqs_max);
  limits->set_lease_ttl_ms_max(catalog.lease_ttl_ms_max);
  return to;
}

void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::CreateSequencesResponse* to) {
  AddHandles(from, to);
  to->set_ttl_ms(from.ttl_ms == 0 ? catalog.lease_ttl_ms : from.ttl_ms);
}

void ToReply(const Catalog&, const engine::ControlRequest& from, v1::ForkSequencesResponse* to) {
  AddHandles(from, to);
}

void ToReply(const Catalog&, const engine::ControlRequest& from,
             v1::TruncateSequencesResponse* to) {
  AddItemErrors(from, to);
}

void ToReply(const Catalog&, const engine::ControlRequest& from, v1::FreeSequencesResponse* to) {
  AddItemErrors(from, to);
}

void ToReply(const Catalog&, const engine::ControlRequest& from, v1::RenewSequencesResponse* to) {
  AddItemErrors(from, to);
}

void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::StatSequencesResponse* to) {
  AddItemErrors(from, to);
  for (size_t i = 0; i < from.infos.size(); ++i) {
    v1::SequenceInfo* info = to->add_sequences();
    if (from.item_status[i].ok()) *info = FromInfo(catalog, from.infos[i]);
  }
}

void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::ListSequencesResponse* to) {
  for (const engine::SequenceInfo& info : from.infos) {
    *to->add_sequences() = FromInfo(catalog, info);
  }
  if (from.list_next != 0) to->set_next_page_token(absl::StrCat(from.list_next));
}

}  // namespace fp8kvd::translate
