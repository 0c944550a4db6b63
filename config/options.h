// config/options.h: everything that an operator may set, one struct per part of the daemon, each
// field with its default, its effect and its cost. Names are those of the configuration file, the
// flags and the environment; ranges are in keys.cc. A loaded Options is checked: nobody checks it
// again.
//
// Does not manage: where a value came from (load.h); what follows from a model (model.h,
// cache_share.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/base/limits.h"

namespace fp8kvd::config {

// The doors of the daemon: addresses and what one stranger may make it hold.
struct ServerOptions {
  // host:port for gRPC. Port 0 takes any free port; the bound one is logged and written to
  // port_file. The default is reachable from this machine only.
  std::string listen_address = "127.0.0.1:50051";
  // host:port for metrics, livez, readyz and the status page. Empty: no HTTP at all.
  std::string http_address = "127.0.0.1:50052";
  // File that gets the bound gRPC port, a decimal line, once the daemon is ready. Empty: none.
  std::string port_file;
  // Completion queues, a thread each, and as many threads that copy the rows of large messages. One
  // answers some 20,000 decodes of one row a second, or takes in 3 GB/s; four, 50,000, and each is
  // a core. But with more than one gRPC wakes two of them for a message: 20 us of a lone call.
  int32_t poller_threads = 1;
  // One message, tensors included; larger ones are refused before their bytes are read whole. A
  // call's memory grows with it.
  int64_t message_bytes_max = kMessageBytesMax;
  // What gRPC may hold of connections, and of messages on their way in and out, all together.
  // Near it gRPC closes connections without calls and takes no new ones; beyond it calls end with
  // RESOURCE_EXHAUSTED. Memory for it must be left to the process.
  int64_t transport_bytes_max = int64_t{1} << 30;
  // Calls and streams open on one connection at a time; more wait in the client's library.
  int32_t streams_per_connection_max = 2048;
  // Calls and streams open in the whole daemon; more are answered RESOURCE_EXHAUSTED. Each holds
  // some kilobytes. Those of health, which need no token, have a quarter as many for themselves.
  int32_t streams_max = 8192;
  // Messages of one DecodeStream that are read and not yet answered. More hide a longer round trip;
  // beyond it the stream is not read, so a slow reader stalls only itself.
  int32_t stream_inflight_max = 32;
  // Metadata of one call. gRPC holds it uncompressed for as long as the call lives.
  int32_t metadata_bytes_max = 16384;
  // A connection without traffic is asked for a sign of life this often; one that does not answer
  // within as long again is dead, and its streams end. Lower notices killed clients sooner.
  int32_t keepalive_ms = 20000;
  // A connection that does not say what it wants (TLS, HTTP/2) for so long is closed.
  int32_t handshake_ms_max = 20000;
  // One without calls for so long is closed; clients connect again by themselves. Each holds some
  // tens of kilobytes.
  int32_t connection_idle_ms_max = 1800000;
  // A call whose client takes nothing of a reply for so long is cancelled: until then it holds the
  // replies, as many bytes as a message may have.
  int32_t reader_stall_ms_max = 60000;
};

// The same-host transport: a client on this machine sends its rows through shared memory.
struct SharedMemoryOptions {
  // false: every client uses gRPC.
  bool shm_enabled = true;
  // The unix socket where clients present their tickets. Empty: fp8kvd-<port>.sock in
  // $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR or /tmp/fp8kvd-<uid>; if none of them can be had, the
  // daemon runs without. A path that is set and cannot be had ends the start.
  std::string shm_socket;
  // The socket's mode is 0660 instead of 0600: processes of the daemon's group may connect, too.
  bool shm_group_access = false;
  // Threads that copy and check rows and write replies; sessions are spread over them. More serve
  // more clients at once and cost a core each under load.
  int32_t shm_threads = 2;
  // Sessions at a time, in all and of one tenant. Each has a socket and some hundred kilobytes.
  int32_t shm_sessions_max = 64;
  int32_t shm_sessions_per_tenant_max = 64;
  // Memory of one session, and of all sessions of one tenant. It is taken page by page when it is
  // first written to, and given back when the session ends.
  int64_t shm_session_bytes_max = int64_t{64} << 20;
  int64_t shm_tenant_bytes_max = int64_t{2} << 30;
  // Requests of one session that are taken and not yet answered. More hide a longer launch; each
  // decode among them holds a staging slot.
  int32_t shm_inflight_max = 64;
  // How long a thread looks for more after work before it sleeps. Longer answers the next call
  // sooner and takes more of a core. With four cores or fewer it sleeps at once.
  int32_t shm_spin_us = 50;
};

// Who may call, and what protects the bytes on the way. Files are read at start; the two of TLS
// again whenever they change, tokens_file at SIGHUP.
struct SecurityOptions {
  // PEM files of the daemon's certificate (its chain after it) and of that one's private key. Both
  // given: gRPC takes TLS 1.2 and newer alone. Empty: bytes, tokens included, go in the clear.
  std::string tls_cert_file;
  std::string tls_key_file;
  // PEM file of authorities: a client must show a certificate that one of them signed. Needs the
  // two above. Empty: clients show none.
  std::string tls_client_ca_file;
  // One line for each token, its tenant and its SHA-256: server/rpc/tokens.h. Every call but those
  // of health then needs a token. Empty: whoever reaches the port may do everything.
  std::string tokens_file;
};

// Callers who share the daemon and nothing else: a tenant knows its own sequences alone, and what
// it takes of the daemon is bounded by these. A bound that is not given is the tenant's share:
// of what the daemon has, the part that all tenants get alike.
struct TenantOptions {
  // As tokens_file names it.
  std::string name;
  // Part of each page pool that its sequences hold or have reserved, at most. Given for all, they
  // may add up to more than 1: then one may find taken what it counts on, reservations aside.
  double pages_share_max = 0.0;
  // Its live sequences.
  int32_t seqs_max = 0;
  // Its items admitted and not yet answered. Beyond it its calls are answered RESOURCE_EXHAUSTED
  // with a delay. More than its share lets it fill the queue for others.
  int32_t inflight_items_max = 0;
  // Items that it may send in a second, those of half a second at once. 0: no bound.
  int32_t items_per_s_max = 0;
};

enum class DeviceChoice : uint8_t {
  kAuto = 0,  // a GPU if the build and the machine have one, else the CPU
  kCpu = 1,
  kCuda = 2,  // refuse to start without a GPU
};

// The thread that owns the cache, and the device under it.
struct EngineOptions {
  DeviceChoice device = DeviceChoice::kAuto;
  // Which of them, each with an engine of its own: GPUs as CUDA numbers them, "0,2" or "0-3"; of a
  // CPU so many engines that share its cores, for tests. Empty: all GPUs there are, or one CPU.
  std::string devices;
  // Threads of the CPU backend, the engine's own included; of several CPU devices together. 0: one
  // for each core that we may use.
  int32_t cpu_threads = 0;
  // Items admitted on a device and not yet answered. More absorb longer bursts and make the last
  // one wait longer; beyond it calls are answered RESOURCE_EXHAUSTED with a delay.
  int32_t queue_items_max = 8192;
  // Rows in one launch, at most. More fill the device better and delay the first.
  int32_t batch_rows_max = 256;
  // KV bytes that the rows of one launch read beside its oldest, a row of several query tokens
  // counted for each of them. Less keeps short sequences quick beside long ones where a launch
  // takes milliseconds; more fills the device better. 0: 8 MiB for each thread of a CPU (some
  // 3 ms), no bound on a GPU.
  int64_t batch_kv_bytes_max = 0;
  // How long a first row waits for company. 0 launches at once: best p50 when idle, most launches.
  int32_t batch_wait_us_max = 0;
  // Bytes of K and V that one append slice brings to the device before waiting decodes get their
  // turn. Larger uploads faster; smaller keeps decode's p99 low beside an upload.
  int64_t append_slice_bytes_max = int64_t{1} << 20;
  // Launches handed to the device and not yet finished, beside a slice that they would starve. 2
  // hides the host's share of a launch; more only makes a late item wait.
  int32_t launches_inflight_max = 2;
  // Pinned memory for rows and replies in flight, taken once at start for each device. Too little
  // answers RESOURCE_EXHAUSTED under load; it must hold one message of message_bytes_max and its
  // reply. A GPU takes as much of its own memory beside it.
  int64_t staging_bytes = int64_t{256} << 20;
  // Messages that hold a part of it at a time.
  int32_t staging_slots = 1024;
  // An item's bits do not depend on the other rows of its launch. Repeatable; costs speed on small
  // batches, because splits then follow from the item alone.
  bool batch_invariant = false;
};

// Page pools, and what a sequence may hold.
struct CacheOptions {
  // Bytes of all page pools together, shared out in equal parts to devices and there in proportion
  // to what each layer group needs for its model's expected_seqs x expected_tokens. 0: exactly that
  // need.
  int64_t pool_bytes = 0;
  // The same as a part of each device's memory that is free at start. 0: not used. Not with
  // pool_bytes.
  double pool_fraction = 0.0;
  // Live sequences of all models.
  int32_t seqs_max = 4096;
  // Tokens of one sequence, at most. Block tables take 8 bytes per layer group for every 64 of
  // them, for each of seqs_max.
  int32_t seq_len_max = 131072;
  // Tokens that a sliding-window group keeps beyond its window, so that a client may step back that
  // far. Each costs a token of every windowed layer.
  int32_t reclaim_slack_tokens = 128;
  // Lease of a sequence whose creator names none: untouched for so long, it is freed. Shorter gives
  // a killed client's pages back sooner; clients renew at a third of it.
  int32_t lease_ttl_ms = 60000;
  // Longest lease that a client may ask for.
  int32_t lease_ttl_ms_max = 3600000;
  // Latest appends of one (sequence, layer) whose digest is kept, so that a retry of them is told
  // from other bytes. Each costs 16 bytes per sequence and layer.
  int32_t replay_digests_max = 8;
  // Fill freed pages with NaN, so that a read of one shows. For tests: costs a write of every page
  // freed.
  bool poison_freed_pages = false;
};

// What a model asks for, before the policy of cache_share.h has decided.
enum class PrecisionChoice : uint8_t {
  kAuto = 0,   // fp8_kv where allowed and worth it, else bf16
  kBf16 = 1,   // the rows as they came
  kFp8Kv = 2,  // e4m3 codes; needs allow_fp8_kv
};

// The daemon-wide half of the precision policy.
struct PolicyOptions {
  // Opt-in to a lossy cache. false: auto means bf16, and fp8_kv is a configuration error.
  bool allow_fp8_kv = false;
  // auto takes fp8_kv from this share of a step's bytes on. 0.2 predicts 1.10x at a ratio of 0.53.
  double cache_share_min = 0.2;
  // What fp8kvd --calibrate measured on this device and writes here: times of attention in both
  // precisions. Its numbers go before every given or computed one. Empty, or no such file: none.
  std::string calibration_file;
  // Time of the operation in fp8_kv divided by its time in bf16, at the workload's shape, for where
  // nothing was calibrated. 0: not given, the ratio of the bytes stands in.
  double fp8_bf16_ratio = 0.0;
  // What a call of one layer costs the engine besides attention, in microseconds: the network and
  // both ends. 0: not given, the calibration's loopback call stands in. For the prediction alone.
  double rpc_us = 0.0;
  // What the engine's device reads, in GB/s; weighs bytes against rpc_us. 0: not given, the
  // calibration's stands in. For the prediction alone.
  double read_gb_s = 0.0;
  // The load really served is compared with the configured one over periods of this length. A
  // shorter one sees a change sooner and judges by less.
  int32_t live_window_ms = 60000;
};

struct DrainOptions {
  // From SIGTERM on, admitted work has this long; what is unfinished is then answered UNAVAILABLE
  // and the daemon exits. Keep it under the grace period of whoever sends the SIGKILL.
  int32_t drain_ms_max = 20000;
  // A folder that is there and ours alone: after the drain all sequences are saved in it, at the
  // start they are restored from it, so that their handles outlive a planned restart. Takes as many
  // bytes of disk as pages are in use. Each daemon needs its own. Empty: sequences end with it.
  std::string snapshot_dir;
  // Saving has this long after the drain; one that is not finished then is deleted, and its
  // sequences are lost. It comes on top of drain_ms_max: the SIGKILL must come after both.
  int32_t snapshot_ms_max = 10000;
};

enum class LogLevel : uint8_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat : uint8_t { kText = 0, kJson = 1 };

struct LogOptions {
  // Lines below it are not made. debug logs every call and costs accordingly.
  LogLevel log_level = LogLevel::kInfo;
  // json: one object a line, for machines.
  LogFormat log_format = LogFormat::kText;
};

// Some layers of a model differ from the model's own window, softcap or sinks.
struct LayerRule {
  std::string layers;  // "5,11,17", "0-25", "5-17/6" (every sixth from 5 to 17) or a list of those
  std::optional<int32_t> window;
  std::optional<float> softcap;
  std::optional<bool> has_sinks;
};

// One model: its shape, the workload that it is sized for, its precision. The shape is either given
// or imported from hf_config, never both.
struct ModelOptions {
  // What clients call it. Letters, digits, '.', '_', '-', '/', at most 128.
  std::string name;

  // A Hugging Face config.json, relative to the configuration file. Gives the whole shape and an
  // estimate of other_bytes.
  std::string hf_config;

  int32_t layers = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float sm_scale = 0.0F;  // 0: 1/sqrt(head_dim)
  int32_t window = 0;     // of every layer without a rule; 0: all tokens
  float softcap = 0.0F;   // 0: off
  bool has_sinks = false;
  std::vector<LayerRule> layer_rules;  // a later rule wins

  // Sequences that the pools hold at full length, and that the policy takes as the batch of a step.
  // Costs pool bytes in proportion.
  int32_t expected_seqs = 16;
  // Tokens of each. Appends beyond a sequence's own reservation are best effort.
  int32_t expected_tokens = 4096;

  PrecisionChoice precision = PrecisionChoice::kAuto;
  // Layers that stay bf16 whatever is decided, in the form of LayerRule::layers. Empty: none.
  std::string bf16_layers;
  // Bytes other than the cache that a step of this model reads: weights and activations. Not given:
  // estimated from hf_config; without that either, auto stays bf16, because the share is unknown.
  std::optional<int64_t> other_bytes;
};

struct Options {
  ServerOptions server;
  SharedMemoryOptions shared_memory;
  SecurityOptions security;
  EngineOptions engine;
  CacheOptions cache;
  PolicyOptions policy;
  DrainOptions drain;
  LogOptions log;
  std::vector<ModelOptions> models;  // 1..kModelsMax, names distinct
  // 1..kTenantsMax, names distinct, no bound left at 0 but items_per_s_max. Where the configuration
  // has none there is one, "default", that everybody is.
  std::vector<TenantOptions> tenants;
};

}  // namespace fp8kvd::config
