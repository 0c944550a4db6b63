#include "config/keys.h"

#include <limits>
#include <type_traits>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fp8kvd::config {
namespace {

constexpr double kInt32Max = std::numeric_limits<int32_t>::max();

constexpr Key<Options> kKeys[] = {
    {"server", "listen_address", [](Options& o) { return &o.server.listen_address; },
     "where gRPC listens; port 0 takes a free one", "host:port", 0, 0, Form::kAddress},
    {"server", "http_address", [](Options& o) { return &o.server.http_address; },
     "metrics, livez, readyz and status page; empty: none", "host:port", 0, 0,
     Form::kAddressOrEmpty},
    {"server", "port_file", [](Options& o) { return &o.server.port_file; },
     "file that gets the bound gRPC port when the daemon is ready", "path"},
    {"server", "poller_threads", [](Options& o) { return &o.server.poller_threads; },
     "threads that read and answer calls", "threads", 1, 64},
    {"server", "message_bytes_max", [](Options& o) { return &o.server.message_bytes_max; },
     "largest message that is read", "bytes", 65536, kMessageBytesMax},
    {"server", "transport_bytes_max", [](Options& o) { return &o.server.transport_bytes_max; },
     "what gRPC may hold of all connections and messages", "bytes", int64_t{16} << 20,
     int64_t{1} << 40},
    {"server", "streams_per_connection_max",
     [](Options& o) { return &o.server.streams_per_connection_max; },
     "calls and streams open on one connection", "calls", 1, 65536},
    {"server", "streams_max", [](Options& o) { return &o.server.streams_max; },
     "calls and streams open in all", "calls", 1, 1 << 20},
    {"server", "stream_inflight_max", [](Options& o) { return &o.server.stream_inflight_max; },
     "messages of one stream read and not yet answered", "messages", 1, 4096},
    {"server", "metadata_bytes_max", [](Options& o) { return &o.server.metadata_bytes_max; },
     "metadata of one call", "bytes", 1024, 1 << 20},
    {"server", "keepalive_ms", [](Options& o) { return &o.server.keepalive_ms; },
     "a silent connection is asked for a sign of life this often", "ms", 1000, 3600000},
    {"server", "handshake_ms_max", [](Options& o) { return &o.server.handshake_ms_max; },
     "a connection that does not say what it wants is closed", "ms", 100, 600000},
    {"server", "connection_idle_ms_max",
     [](Options& o) { return &o.server.connection_idle_ms_max; }, "one without calls is closed",
     "ms", 1000, kInt32Max},
    {"server", "reader_stall_ms_max", [](Options& o) { return &o.server.reader_stall_ms_max; },
     "a call whose client takes nothing of a reply is cancelled", "ms", 100, 3600000},

    {"security", "tls_cert_file", [](Options& o) { return &o.security.tls_cert_file; },
     "PEM of the daemon's certificate and chain; turns TLS on; read again when it changes", "path"},
    {"security", "tls_key_file", [](Options& o) { return &o.security.tls_key_file; },
     "PEM of its private key", "path"},
    {"security", "tls_client_ca_file", [](Options& o) { return &o.security.tls_client_ca_file; },
     "PEM of the authorities of client certificates, which are then required", "path"},
    {"security", "tokens_file", [](Options& o) { return &o.security.tokens_file; },
     "lines of TENANT and the SHA-256 of its token; every call then needs one", "path"},

    {"shared_memory", "shm_enabled", [](Options& o) { return &o.shared_memory.shm_enabled; },
     "clients on this machine may use shared memory"},
    {"shared_memory", "shm_socket", [](Options& o) { return &o.shared_memory.shm_socket; },
     "unix socket where they connect; empty: in the runtime folder, named by the gRPC port",
     "path"},
    {"shared_memory", "shm_group_access",
     [](Options& o) { return &o.shared_memory.shm_group_access; },
     "the socket's mode is 0660, not 0600"},
    {"shared_memory", "shm_threads", [](Options& o) { return &o.shared_memory.shm_threads; },
     "threads that serve sessions", "threads", 1, 64},
    {"shared_memory", "shm_sessions_max",
     [](Options& o) { return &o.shared_memory.shm_sessions_max; }, "sessions at a time", "sessions",
     1, 4096},
    {"shared_memory", "shm_sessions_per_tenant_max",
     [](Options& o) { return &o.shared_memory.shm_sessions_per_tenant_max; },
     "sessions of one tenant at a time", "sessions", 1, 4096},
    {"shared_memory", "shm_session_bytes_max",
     [](Options& o) { return &o.shared_memory.shm_session_bytes_max; },
     "memory of one session, its rings aside", "bytes", 1 << 20, int64_t{4} << 30},
    {"shared_memory", "shm_tenant_bytes_max",
     [](Options& o) { return &o.shared_memory.shm_tenant_bytes_max; },
     "memory of all sessions of one tenant", "bytes", 1 << 20, kPoolBytesMax},
    {"shared_memory", "shm_inflight_max",
     [](Options& o) { return &o.shared_memory.shm_inflight_max; },
     "requests of one session taken and not yet answered", "requests", 1, 1024},
    {"shared_memory", "shm_spin_us", [](Options& o) { return &o.shared_memory.shm_spin_us; },
     "how long a thread looks for more work before it sleeps", "us", 0, 10000},

    {"engine", "device", [](Options& o) { return &o.engine.device; },
     "what does the work; auto: a GPU where there is one"},
    {"engine", "devices", [](Options& o) { return &o.engine.devices; },
     "which GPUs, as \"0,2\" or \"0-3\", each with an engine; empty: all", "indices"},
    {"engine", "cpu_threads", [](Options& o) { return &o.engine.cpu_threads; },
     "threads of all CPU devices; 0: one per core", "threads", 0, 1024},
    {"engine", "queue_items_max", [](Options& o) { return &o.engine.queue_items_max; },
     "items admitted on a device and not yet answered; beyond it RESOURCE_EXHAUSTED", "items",
     kItemsMax, 1 << 20},
    {"engine", "batch_rows_max", [](Options& o) { return &o.engine.batch_rows_max; },
     "rows in one launch", "rows", 1, kItemsMax},
    {"engine", "batch_kv_bytes_max", [](Options& o) { return &o.engine.batch_kv_bytes_max; },
     "KV bytes that a launch reads beside its oldest row; 0: 8 MiB per CPU thread, none on a GPU",
     "bytes", 0, kPoolBytesMax},
    {"engine", "batch_wait_us_max", [](Options& o) { return &o.engine.batch_wait_us_max; },
     "how long a first row waits for company; 0: not at all", "us", 0, 100000},
    {"engine", "append_slice_bytes_max",
     [](Options& o) { return &o.engine.append_slice_bytes_max; },
     "K and V written before waiting decodes get their turn", "bytes", 65536, kAppendChunkBytesMax},
    {"engine", "launches_inflight_max", [](Options& o) { return &o.engine.launches_inflight_max; },
     "launches handed to the device and not finished", "launches", 1, 16},
    {"engine", "staging_bytes", [](Options& o) { return &o.engine.staging_bytes; },
     "pinned memory of a device for rows and replies in flight", "bytes", 1 << 20, kPoolBytesMax},
    {"engine", "staging_slots", [](Options& o) { return &o.engine.staging_slots; },
     "messages that hold a part of it", "messages", 2, 1 << 20},
    {"engine", "batch_invariant", [](Options& o) { return &o.engine.batch_invariant; },
     "an item's bits do not depend on its batch; slower on small batches"},

    {"cache", "pool_bytes", [](Options& o) { return &o.cache.pool_bytes; },
     "all page pools together, of all devices; 0: what the models' workloads need", "bytes", 0,
     kPoolBytesMax},
    {"cache", "pool_fraction", [](Options& o) { return &o.cache.pool_fraction; },
     "the same as a part of each device's memory free at start; 0: not used", "ratio", 0, 0.95},
    {"cache", "seqs_max", [](Options& o) { return &o.cache.seqs_max; },
     "live sequences of all models", "sequences", 1, kSeqsMax},
    {"cache", "seq_len_max", [](Options& o) { return &o.cache.seq_len_max; },
     "tokens of one sequence", "tokens", kPageTokens, kSeqLenMax},
    {"cache", "reclaim_slack_tokens", [](Options& o) { return &o.cache.reclaim_slack_tokens; },
     "tokens that a windowed layer keeps beyond its window", "tokens", 0, 1 << 20},
    {"cache", "lease_ttl_ms", [](Options& o) { return &o.cache.lease_ttl_ms; },
     "a sequence untouched for so long is freed, unless its creator says otherwise", "ms", 100,
     kInt32Max},
    {"cache", "lease_ttl_ms_max", [](Options& o) { return &o.cache.lease_ttl_ms_max; },
     "longest lease that a client may ask for", "ms", 100, kInt32Max},
    {"cache", "replay_digests_max", [](Options& o) { return &o.cache.replay_digests_max; },
     "latest appends per sequence and layer whose retry is recognised", "appends", 1, 64},
    {"cache", "poison_freed_pages", [](Options& o) { return &o.cache.poison_freed_pages; },
     "fill freed pages with NaN; for tests"},

    {"policy", "allow_fp8_kv", [](Options& o) { return &o.policy.allow_fp8_kv; },
     "opt-in to the lossy precision fp8_kv"},
    {"policy", "cache_share_min", [](Options& o) { return &o.policy.cache_share_min; },
     "auto takes fp8_kv from this share of a step's bytes on", "ratio", 0, 1},
    {"policy", "calibration_file", [](Options& o) { return &o.policy.calibration_file; },
     "what --calibrate writes and later starts decide with", "path"},
    {"policy", "fp8_bf16_ratio", [](Options& o) { return &o.policy.fp8_bf16_ratio; },
     "time of attention in fp8_kv over bf16, where none is calibrated; 0: that of the bytes",
     "ratio", 0, 100},
    {"policy", "rpc_us", [](Options& o) { return &o.policy.rpc_us; },
     "cost of one layer's call, for the prediction; 0: as calibrated", "us", 0, 1e6},
    {"policy", "read_gb_s", [](Options& o) { return &o.policy.read_gb_s; },
     "what the engine's device reads, for the prediction; 0: as calibrated", "GB/s", 0, 1e6},
    {"policy", "live_window_ms", [](Options& o) { return &o.policy.live_window_ms; },
     "periods over which the load served is compared with the configured one", "ms", 100, 3600000},

    {"drain", "drain_ms_max", [](Options& o) { return &o.drain.drain_ms_max; },
     "time from SIGTERM in which admitted work finishes", "ms", 0, 3600000},
    {"drain", "snapshot_dir", [](Options& o) { return &o.drain.snapshot_dir; },
     "folder where sequences are saved after the drain and restored from at the start", "path"},
    {"drain", "snapshot_ms_max", [](Options& o) { return &o.drain.snapshot_ms_max; },
     "time after the drain in which they are saved", "ms", 1, 3600000},

    {"log", "log_level", [](Options& o) { return &o.log.log_level; },
     "lines below it are not made"},
    {"log", "log_format", [](Options& o) { return &o.log.log_format; }, "json: one object a line"},
};

constexpr Key<ModelOptions> kModelKeys[] = {
    {"", "name", [](ModelOptions& m) { return &m.name; }, "what clients call it", "", 0, 0,
     Form::kName},
    {"", "hf_config", [](ModelOptions& m) { return &m.hf_config; },
     "a Hugging Face config.json that gives the whole shape; relative to this file", "path"},
    {"", "layers", [](ModelOptions& m) { return &m.layers; }, "decoder layers with attention",
     "layers", 1, kLayersMax},
    {"", "q_heads", [](ModelOptions& m) { return &m.q_heads; }, "query heads", "heads", 1,
     kQHeadsMax},
    {"", "kv_heads", [](ModelOptions& m) { return &m.kv_heads; },
     "key and value heads; q_heads is a multiple", "heads", 1, kKvHeadsMax},
    {"", "head_dim", [](ModelOptions& m) { return &m.head_dim; },
     "elements of one head: 64, 80, 96, 128, 192 or 256", "elements", 1, kHeadDimMax},
    {"", "sm_scale", [](ModelOptions& m) { return &m.sm_scale; },
     "factor of q.k before softmax; 0: 1/sqrt(head_dim)", "", 0, 1024},
    {"", "window", [](ModelOptions& m) { return &m.window; },
     "latest tokens that a layer sees, the query's own included; 0: all", "tokens", 0, kSeqLenMax},
    {"", "softcap", [](ModelOptions& m) { return &m.softcap; },
     "c in c * tanh(x / c), after sm_scale; 0: off", "", 0, 1e6},
    {"", "has_sinks", [](ModelOptions& m) { return &m.has_sinks; },
     "every Decode brings sink_logits"},
    {"", "expected_seqs", [](ModelOptions& m) { return &m.expected_seqs; },
     "sequences that the pools hold at full length, and the batch of a step", "sequences", 1,
     kSeqsMax},
    {"", "expected_tokens", [](ModelOptions& m) { return &m.expected_tokens; }, "tokens of each",
     "tokens", 1, kSeqLenMax},
    {"", "precision", [](ModelOptions& m) { return &m.precision; },
     "auto: fp8_kv where allowed and worth it"},
    {"", "bf16_layers", [](ModelOptions& m) { return &m.bf16_layers; },
     "layers that stay bf16, as \"0,5-17/6\"", "layers"},
    {"", "other_bytes", [](ModelOptions& m) { return &m.other_bytes; },
     "bytes besides the cache that a step reads; default: from hf_config", "bytes", 0,
     kPoolBytesMax},
};

constexpr Key<LayerRule> kLayerRuleKeys[] = {
    {"", "layers", [](LayerRule& r) { return &r.layers; }, "which, as \"0,5-17/6\"", "layers"},
    {"", "window", [](LayerRule& r) { return &r.window; }, "instead of the model's", "tokens", 0,
     kSeqLenMax},
    {"", "softcap", [](LayerRule& r) { return &r.softcap; }, "instead of the model's", "", 0, 1e6},
    {"", "has_sinks", [](LayerRule& r) { return &r.has_sinks; }, "instead of the model's"},
};

constexpr Key<TenantOptions> kTenantKeys[] = {
    {"", "name", [](TenantOptions& t) { return &t.name; }, "as tokens_file names it", "", 0, 0,
     Form::kName},
    {"", "pages_share_max", [](TenantOptions& t) { return &t.pages_share_max; },
     "part of each page pool, reservations included; 0: its share", "ratio", 0, 1},
    {"", "seqs_max", [](TenantOptions& t) { return &t.seqs_max; }, "live sequences; 0: its share",
     "sequences", 0, kSeqsMax},
    {"", "inflight_items_max", [](TenantOptions& t) { return &t.inflight_items_max; },
     "items admitted and not yet answered; 0: its share", "items", 0, 1 << 20},
    {"", "items_per_s_max", [](TenantOptions& t) { return &t.items_per_s_max; },
     "items sent in a second; 0: no bound", "items", 0, 1000000000},
};

template <typename Value>
struct Unwrapped {
  using Type = Value;
};
template <typename Value>
struct Unwrapped<std::optional<Value>> {
  using Type = Value;
};

template <typename Owner, typename Value>
ValueKind KindOfField(Value* (*)(Owner&)) {
  using Plain = typename Unwrapped<Value>::Type;
  if constexpr (std::is_same_v<Plain, std::string>) return ValueKind::kText;
  if constexpr (std::is_same_v<Plain, bool>) return ValueKind::kBool;
  if constexpr (std::is_enum_v<Plain>) return ValueKind::kEnum;
  return ValueKind::kNumber;
}

template <typename Owner>
std::string AllowedText(const Key<Owner>& key) {
  switch (KindOf(key)) {
    case ValueKind::kNumber:
      return RangeText({key.name, key.unit, key.min, key.max, key.form});
    case ValueKind::kBool:
      return "true or false";
    case ValueKind::kText:
      return key.unit;
    case ValueKind::kEnum:
      break;
  }
  return std::visit(
      [](auto field) -> std::string {
        using Value = std::remove_pointer_t<std::invoke_result_t<decltype(field), Owner&>>;
        if constexpr (std::is_enum_v<Value>) return absl::StrJoin(Names(Value{}), ", ");
        return "";
      },
      key.field);
}

template <typename Owner>
void AppendHelp(const Key<Owner>& key, const std::string& title, std::string* help) {
  const std::string allowed = AllowedText(key);
  const std::string standard = ValueText(key, Owner());
  absl::StrAppend(help, "  ", title, "\n      ", key.text, " (", allowed,
                  allowed.empty() || standard.empty() ? "" : "; ",
                  standard.empty() ? "" : absl::StrCat("default ", standard), ")\n");
}

}  // namespace

absl::Span<const Key<Options>> Keys() { return kKeys; }
absl::Span<const Key<ModelOptions>> ModelKeys() { return kModelKeys; }
absl::Span<const Key<LayerRule>> LayerRuleKeys() { return kLayerRuleKeys; }
absl::Span<const Key<TenantOptions>> TenantKeys() { return kTenantKeys; }

template <typename Owner>
absl::Status SetValue(const Key<Owner>& key, absl::string_view text, Owner& owner) {
  const Bounds bounds = {key.name, key.unit, key.min, key.max, key.form};
  return std::visit([&](auto field) { return ParseValue(bounds, text, field(owner)); }, key.field);
}

template <typename Owner>
std::string ValueText(const Key<Owner>& key, const Owner& owner) {
  // A field only makes an address; what is behind it is read, not written.
  Owner& readable = const_cast<Owner&>(owner);
  return std::visit([&](auto field) { return PrintValue(*field(readable)); }, key.field);
}

template <typename Owner>
ValueKind KindOf(const Key<Owner>& key) {
  return std::visit([](auto field) { return KindOfField<Owner>(field); }, key.field);
}

template absl::Status SetValue(const Key<Options>&, absl::string_view, Options&);
template absl::Status SetValue(const Key<ModelOptions>&, absl::string_view, ModelOptions&);
template absl::Status SetValue(const Key<LayerRule>&, absl::string_view, LayerRule&);
template absl::Status SetValue(const Key<TenantOptions>&, absl::string_view, TenantOptions&);
template std::string ValueText(const Key<Options>&, const Options&);
template std::string ValueText(const Key<ModelOptions>&, const ModelOptions&);
template std::string ValueText(const Key<LayerRule>&, const LayerRule&);
template std::string ValueText(const Key<TenantOptions>&, const TenantOptions&);
template ValueKind KindOf(const Key<Options>&);
template ValueKind KindOf(const Key<ModelOptions>&);
template ValueKind KindOf(const Key<LayerRule>&);
template ValueKind KindOf(const Key<TenantOptions>&);

const Key<Options>* FindKey(absl::string_view name) {
  for (const Key<Options>& key : kKeys) {
    if (name == key.name) return &key;
  }
  return nullptr;
}

std::string PathOf(const Key<Options>& key) { return absl::StrCat(key.section, ".", key.name); }

std::string FlagName(const Key<Options>& key) { return absl::StrCat("--", key.name); }

std::string EnvName(const Key<Options>& key) {
  return absl::StrCat("FP8KVD_", absl::AsciiStrToUpper(key.name));
}

std::string HelpText() {
  std::string help =
      "fp8kvd --config=FILE [--KEY=VALUE ...]\n"
      "  --config=FILE    the configuration, .textproto or .json (FP8KVD_CONFIG)\n"
      "  --check_config   check everything, print the effective configuration, exit\n"
      "  --calibrate      measure the models' attention on this device, write calibration_file, "
      "exit\n"
      "  --version, --help\n"
      "Flags win over the environment, the environment over the file, the file over defaults.\n"
      "A key is --key=VALUE, FP8KVD_KEY=VALUE, or section { key: VALUE } in the file.\n";
  std::string section;
  for (const Key<Options>& key : kKeys) {
    if (section != key.section) absl::StrAppend(&help, "\n", key.section, "\n");
    section = key.section;
    AppendHelp(key, FlagName(key), &help);
  }
  absl::StrAppend(&help, "\nmodels (in the file only; one models { } each)\n");
  for (const Key<ModelOptions>& key : kModelKeys) AppendHelp(key, key.name, &help);
  absl::StrAppend(&help, "  layer_rules { } within models: some layers differ\n");
  for (const Key<LayerRule>& key : kLayerRuleKeys) {
    AppendHelp(key, absl::StrCat("layer_rules.", key.name), &help);
  }
  absl::StrAppend(&help, "\ntenants (in the file only; one tenants { } each)\n");
  for (const Key<TenantOptions>& key : kTenantKeys) AppendHelp(key, key.name, &help);
  return help;
}

}  // namespace fp8kvd::config
