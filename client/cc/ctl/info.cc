// fp8kvctl info: what runs there.
#include "absl/strings/str_cat.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/handles.h"
#include "client/cc/ctl/output.h"

namespace fp8kvd::ctl {
namespace {

void PrintGroup(const client::LayerGroupInfo& group, Json& json) {
  json.BeginObject().Key("layers").BeginArray();
  for (const uint32_t layer : group.layers) json.Count(layer);
  json.EndArray();
  json.Key("window").Count(group.window).Key("softcap").Number(group.softcap);
  json.Key("has_sinks").Bool(group.has_sinks);
  json.Key("precision").Text(PrecisionName(group.precision));
  json.Key("pages_total").Count(group.pages_total).Key("pages_used").Count(group.pages_used);
  json.Key("pages_free").Count(group.pages_free).Key("page_bytes").Count(group.page_bytes);
  json.Key("page_tokens").Count(group.page_tokens).EndObject();
}

void PrintLimits(const client::Limits& limits, Json& json) {
  json.Key("limits").BeginObject();
  json.Key("message_bytes_max").Count(limits.message_bytes_max);
  json.Key("append_chunk_bytes_max").Count(limits.append_chunk_bytes_max);
  json.Key("items_max").Count(limits.items_max).Key("q_len_max").Count(limits.q_len_max);
  json.Key("seq_len_max").Count(limits.seq_len_max).Key("seqs_max").Count(limits.seqs_max);
  json.Key("lease_ttl_ms_max").Count(limits.lease_ttl_ms_max).EndObject();
}

std::string InfoJson(const client::ServerInfo& info) {
  Json json;
  json.BeginObject().Key("version").Text(info.version);
  json.Key("incarnation").Text(absl::StrCat(absl::Hex(info.incarnation)));
  json.Key("device_kind").Text(info.device_kind).Key("device_name").Text(info.device_name);
  json.Key("draining").Bool(info.draining);
  json.Key("shm_socket").Text(info.shm_socket).Key("host_id").Text(info.host_id);
  json.Key("models").BeginArray();
  for (const client::ModelInfo& model : info.models) {
    json.BeginObject().Key("name").Text(model.name).Key("layers").Count(model.layers);
    json.Key("q_heads").Count(model.q_heads).Key("kv_heads").Count(model.kv_heads);
    json.Key("head_dim").Count(model.head_dim).Key("sm_scale").Number(model.sm_scale);
    json.Key("precision_reason").Text(model.precision_reason).Key("groups").BeginArray();
    for (const client::LayerGroupInfo& group : model.groups) PrintGroup(group, json);
    json.EndArray().EndObject();
  }
  json.EndArray().Key("devices").BeginArray();
  for (const client::DeviceInfo& device : info.devices) {
    json.BeginObject().Key("name").Text(device.name).Key("device_name").Text(device.device_name);
    json.Key("pages_total").Count(device.pages_total).Key("pages_used").Count(device.pages_used);
    json.Key("pages_free").Count(device.pages_free).EndObject();
  }
  json.EndArray();
  PrintLimits(info.limits, json);
  return json.EndObject().str();
}

void PrintTables(const client::ServerInfo& info, std::ostream& out) {
  out << "fp8kvd " << Printable(info.version) << " on " << Printable(info.device_kind) << " ("
      << Printable(info.device_name) << "), incarnation "
      << absl::StrCat(absl::Hex(info.incarnation)) << (info.draining ? ", draining\n" : "\n");
  out << "host " << Printable(info.host_id) << ", shared memory "
      << (info.shm_socket.empty() ? "off" : "by " + Printable(info.shm_socket)) << "\n\n";
  Table table({"model", "layers", "q/kv heads", "head_dim", "precision", "window", "pages used",
               "of", "pool"});
  for (const client::ModelInfo& model : info.models) {
    for (const client::LayerGroupInfo& group : model.groups) {
      table.Add({Printable(model.name), absl::StrCat(group.layers.size(), "/", model.layers),
                 absl::StrCat(model.q_heads, "/", model.kv_heads), absl::StrCat(model.head_dim),
                 PrecisionName(group.precision),
                 group.window == 0 ? "-" : absl::StrCat(group.window),
                 absl::StrCat(group.pages_used), absl::StrCat(group.pages_total),
                 HumanBytes(static_cast<double>(group.page_bytes) *
                            static_cast<double>(group.pages_total))});
    }
  }
  table.Print(out);
  out << '\n';
  if (info.devices.size() > 1) {
    Table devices({"device", "pages used", "of", "what"});
    for (const client::DeviceInfo& device : info.devices) {
      devices.Add({Printable(device.name), absl::StrCat(device.pages_used),
                   absl::StrCat(device.pages_total), Printable(device.device_name)});
    }
    devices.Print(out);
    out << '\n';
  }
  for (const client::ModelInfo& model : info.models) {
    out << Printable(model.name) << ": " << Printable(model.precision_reason) << '\n';
  }
}

absl::Status RunInfo(const Invocation& invocation) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = invocation.Connect();
  if (!client.ok()) return client.status();
  absl::StatusOr<client::ServerInfo> info = (*client)->GetServerInfo();
  if (!info.ok()) return info.status();
  if (invocation.json()) {
    invocation.out() << InfoJson(*info) << '\n';
  } else {
    PrintTables(*info, invocation.out());
  }
  return absl::OkStatus();
}

}  // namespace

const Command& InfoCommand() {
  static const Command command = {
      "info", "what runs there: version, device, models, precisions, pools",
      "",     "fp8kvctl info --target=127.0.0.1:50051",
      {},     RunInfo};
  return command;
}

}  // namespace fp8kvd::ctl
