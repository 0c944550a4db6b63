// client/cc/types.h: what a client says and hears, as plain structs; field names are the proto's.
// Tensors are row-major and without padding; bf16 elements travel as their bits in a uint16_t.
// Spans in *Args are read during the call only (DecodeStream::Send copies them).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fp8kvd::client {

// PEM texts.
struct TlsOptions {
  // Authorities that the server's certificate must be of; empty: those of the system.
  std::string root_certificates = {};
  // The client's own, for a server that asks for one; both or neither.
  std::string certificate_chain = {};
  std::string private_key = {};
};

// How tensors travel. Calls without tensors always go by gRPC.
enum class Transport {
  kAuto,  // shared memory where the server is on this host and gives it, else gRPC
  kGrpc,
  kSharedMemory,  // nothing else: UNAVAILABLE where it cannot be had
};

struct Options {
  // host:port, or any name that gRPC resolves ("unix:/run/fp8kvd.sock").
  std::string target = "127.0.0.1:50051";
  // Absent: in the clear.
  std::optional<TlsOptions> tls = {};
  // Sent with every call; empty: none. Over TLS, or to this machine alone.
  std::string token = {};
  // Of one call, its retries and waits included.
  int64_t timeout_ms = 30'000;
  // The same of one Append, which may carry gigabytes.
  int64_t append_timeout_ms = 600'000;
  // How often a call is tried again after UNAVAILABLE, or RESOURCE_EXHAUSTED with a delay. An
  // Append counts anew whenever the server has committed more.
  int32_t retries_max = 5;
  // First wait when the server names no delay; doubled each time up to the second number.
  int64_t backoff_ms_min = 50;
  int64_t backoff_ms_max = 2'000;
  // k and v bytes of one message of an Append. Larger chunks cost less, smaller ones let the
  // decodes of others in sooner and lose less when a connection breaks.
  int64_t append_chunk_bytes = int64_t{1} << 20;
  Transport transport = Transport::kAuto;
  // Room for requests and replies in flight; a larger call goes by gRPC. The server may give less.
  int64_t shared_memory_bytes = int64_t{32} << 20;
  // How long a waiting thread looks for a reply in shared memory before it sleeps.
  int64_t shared_memory_spin_us = 50;
};

// What Transport::kAuto came to.
struct TransportState {
  Transport in_use = Transport::kGrpc;
  std::string why_not_shared = {};  // empty while shared memory is in use
};

// Memory for bf16 elements, on this host where the daemon reads them: as q, k or v of a call, spans
// of it are not copied on this side. Until the call has its answer nobody may write to them. Copies
// share the memory, which goes with the last.
class SharedRows {
 public:
  SharedRows(std::shared_ptr<void> owner, absl::Span<uint16_t> elements)
      : owner_(std::move(owner)), elements_(elements) {}
  absl::Span<uint16_t> elements() const { return elements_; }

 private:
  std::shared_ptr<void> owner_;
  absl::Span<uint16_t> elements_;
};

// Names a sequence; opaque.
struct Handle {
  uint64_t seq_id = 0;
  uint32_t generation = 0;
  uint64_t incarnation = 0;
  uint32_t home = 0;

  friend bool operator==(const Handle&, const Handle&) = default;
};

enum class Precision { kUnspecified, kBf16, kFp8Kv };
enum class OutType { kBf16, kFp32 };

struct LayerGroupInfo {
  std::vector<uint32_t> layers = {};
  uint32_t window = 0;
  float softcap = 0.0F;
  bool has_sinks = false;
  Precision precision = Precision::kUnspecified;
  uint64_t pages_total = 0;
  uint64_t pages_used = 0;
  uint64_t pages_free = 0;
  uint64_t page_bytes = 0;
  uint32_t page_tokens = 0;
};

struct ModelInfo {
  std::string name = {};
  uint32_t layers = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  float sm_scale = 0.0F;
  std::vector<LayerGroupInfo> groups = {};
  std::string precision_reason = {};
};

struct Limits {
  uint64_t message_bytes_max = 0;
  uint64_t append_chunk_bytes_max = 0;
  uint32_t items_max = 0;
  uint32_t q_len_max = 0;
  uint64_t seq_len_max = 0;
  uint64_t seqs_max = 0;
  uint64_t lease_ttl_ms_max = 0;
};

// One of the devices that sequences are spread over; pages of all pools there, or of the caller's
// part of them.
struct DeviceInfo {
  std::string name = {};
  std::string device_name = {};
  uint64_t pages_total = 0;
  uint64_t pages_used = 0;
  uint64_t pages_free = 0;
};

struct ServerInfo {
  std::string version = {};
  uint64_t incarnation = 0;
  std::string device_kind = {};
  std::string device_name = {};
  std::vector<ModelInfo> models = {};
  Limits limits = {};
  bool draining = false;
  std::string shm_socket = {};           // of the same-host transport; empty: it is off
  std::string host_id = {};              // the boot id of the server's host
  std::vector<DeviceInfo> devices = {};  // by Handle::home
};

struct SequenceInfo {
  Handle handle = {};
  std::string model = {};
  std::vector<uint64_t> seq_lens = {};  // [layers]
  uint64_t pages = 0;
  uint64_t pages_shared = 0;
  uint64_t bytes = 0;
  uint64_t expected_tokens = 0;
  uint64_t ttl_ms = 0;
  uint64_t ttl_left_ms = 0;
};

// The item of a batch that failed.
struct ItemError {
  uint32_t index = 0;
  absl::Status status = {};
  uint32_t retry_after_ms = 0;
};

struct StatReply {
  std::vector<SequenceInfo> sequences = {};  // [items], a failed one's entry is empty
  std::vector<ItemError> item_errors = {};
};

struct CreateArgs {
  std::string model = {};  // empty when the server has only one
  uint32_t count = 1;
  uint64_t expected_tokens = 0;
  uint64_t ttl_ms = 0;  // 0: the server's default
};

struct ForkArgs {
  uint32_t count = 1;
  uint64_t expected_tokens = 0;
  uint64_t ttl_ms = 0;  // 0: the parent's
};

// What fp8_kv does to given rows: relative L2 of all of them, and of the worst one.
struct KvError {
  double k = 0;
  double v = 0;
  double k_worst_row = 0;
  double v_worst_row = 0;
};

// Rows of one layer and queries that attend to them.
struct MeasureArgs {
  uint32_t kv_heads = 1;
  uint32_t head_dim = 0;
  absl::Span<const uint16_t> k = {};  // bf16 [tokens, kv_heads, head_dim], after RoPE and norms
  absl::Span<const uint16_t> v = {};
  uint32_t q_heads = 1;
  absl::Span<const uint16_t> q = {};         // bf16 [steps, q_heads, head_dim]
  absl::Span<const int32_t> positions = {};  // [steps], ascending, below tokens
  std::optional<float> sm_scale = {};        // none: 1 / sqrt(head_dim)
  uint32_t window = 0;                       // 0: all
  float softcap = 0;                         // 0: off
};

// What fp8_kv, and other ways to keep K and V in e4m3, do to attention over given rows; relative
// L2. accuracy.proto says what each number is.
struct WayError {
  std::string way = {};
  double op = 0;
  double op_worst_row = 0;
  double k = 0;
  double v = 0;
  double saturated = 0;
  double subnormal = 0;
};
struct OutlierRow {
  uint32_t token = 0;
  uint32_t kv_head = 0;
  double error = 0;
  double amax = 0;
};
struct RowsProfile {
  double amax = 0;
  double amax_over_rms = 0;
  double channel_amax_ratio = 0;
  double subnormal = 0;
  std::vector<OutlierRow> worst = {};
};
struct Accuracy {
  std::vector<WayError> ways = {};
  RowsProfile k = {};
  RowsProfile v = {};
  double score_spread = 0;
  double effective_keys = 0;
};

struct AppendArgs {
  std::string model = {};
  Handle handle = {};
  uint32_t layer = 0;
  uint32_t layers_count = 1;
  uint64_t pos = 0;
  uint64_t n = 0;                     // tokens
  absl::Span<const uint16_t> k = {};  // bf16 [layers_count, n, kv_heads, head_dim]
  absl::Span<const uint16_t> v = {};
  uint64_t skip_to = 0;  // 0: off; else equal to pos
};

struct DecodeArgs {
  std::string model = {};
  uint32_t layer = 0;
  absl::Span<const Handle> handles = {};      // [items]
  absl::Span<const uint64_t> positions = {};  // [items]
  absl::Span<const uint32_t> q_lens = {};     // [items]; empty: all 1; n is their sum
  absl::Span<const uint16_t> q = {};          // bf16 [n, q_heads, head_dim]
  absl::Span<const uint16_t> k = {};  // bf16 [n, kv_heads, head_dim]; both empty: attend only
  absl::Span<const uint16_t> v = {};
  absl::Span<const float> sink_logits = {};  // [q_heads]
  bool omit_sinks = false;
  bool want_lse = false;
  OutType out_type = OutType::kBf16;
};

// Either model (empty when the server has only one) or hf_config_json.
struct PlanArgs {
  std::string model = {};
  std::string hf_config_json = {};  // the text of a Hugging Face config.json
  uint64_t batch = 0;               // sequences in a step; 0: the configured workload's
  uint64_t tokens = 0;              // of each; likewise
  uint64_t other_bytes = 0;         // 0: computed from the model
  double rpc_us = 0;                // cost of one layer's call; 0: the server's own setting
};

// What a model served over the server's latest window, and what the policy says of it.
struct LiveLoad {
  double seconds = 0;
  double steps = 0;
  double batch = 0;   // sequences in a step, on average
  double tokens = 0;  // of each
  double cache_share = 0;
  double predicted_speedup = 0;                   // of a step, for fp8_kv
  Precision precision = Precision::kUnspecified;  // what auto would choose with allow_fp8_kv
  bool contradicts = false;                       // that is not what runs
  std::string hint = {};
};

// The decision for a model, with every number it came from: PlanPrecisionResponse says what each
// is.
struct PrecisionPlan {
  Precision precision = Precision::kUnspecified;
  std::string reason = {};
  uint64_t batch = 0;
  uint64_t tokens = 0;
  double kv_bytes = 0;
  double other_bytes = 0;
  double cache_share = 0;
  double convertible_share = 0;
  double cache_share_min = 0;
  double r = 0;
  std::string r_source = {};
  double attention_speedup = 0;
  double predicted_speedup = 0;
  std::optional<double> speedup_with_calls = {};
  std::optional<double> rpc_us = {};
  std::optional<double> read_bytes_per_s = {};
  std::optional<LiveLoad> live = {};
};

struct DecodeReply {
  std::vector<uint16_t> out_bf16 =
      {};  // [n, q_heads, head_dim]; the one of the two that was asked for
  std::vector<float> out_fp32 = {};
  std::vector<float> lse = {};  // [n, q_heads] if asked
  std::vector<ItemError> item_errors = {};
  uint32_t stage_us = 0;
  uint32_t queue_us = 0;
  uint32_t kernel_us = 0;
  uint32_t reply_us = 0;
  uint32_t batch_items = 0;
};

}  // namespace fp8kvd::client
