// fp8kvctl bench: decode calls against a running daemon, pipelined on one stream.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <unordered_map>

#include "absl/strings/str_cat.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/handles.h"
#include "client/cc/ctl/output.h"
#include "client/cc/decode_stream.h"

namespace fp8kvd::ctl {
namespace {

using Clock = std::chrono::steady_clock;

struct Plan {
  client::ModelInfo model;
  client::LayerGroupInfo group;
  uint32_t layer = 0;
  int64_t batch = 0;
  int64_t seq_len = 0;
  int64_t in_flight = 0;
  double seconds = 0;
};

// Where the time of a call went: as the daemon reports it, and what is left of it.
struct Breakdown {
  std::vector<double> stage_us;
  std::vector<double> queue_us;
  std::vector<double> kernel_us;
  std::vector<double> reply_us;
  std::vector<double> wire_us;  // both ways, gRPC and this client included
  std::vector<double> batch_items;

  void Add(double call_us, const client::DecodeReply& reply) {
    stage_us.push_back(reply.stage_us);
    queue_us.push_back(reply.queue_us);
    kernel_us.push_back(reply.kernel_us);
    reply_us.push_back(reply.reply_us);
    const double inside = stage_us.back() + queue_us.back() + kernel_us.back() + reply_us.back();
    wire_us.push_back(std::max(0.0, call_us - inside));
    batch_items.push_back(reply.batch_items);
  }
};

struct Result {
  std::vector<double> call_ms;
  Breakdown breakdown;
  double wall_s = 0;
};

// Tokens of prompt that one Append carries; bounds the memory that this process takes.
constexpr int64_t kPromptTokens = 1024;

absl::StatusOr<Plan> MakePlan(const Invocation& invocation, const client::ServerInfo& info) {
  Plan plan;
  absl::Status status;
  const auto take = [&](const char* flag, int64_t absent, int64_t max) {
    absl::StatusOr<int64_t> count = invocation.Count(flag, absent, 1, max);
    status.Update(count.status());
    return count.value_or(absent);
  };
  plan.batch = take("batch", 4, info.limits.items_max);
  plan.seq_len = take("seq_len", 1024, static_cast<int64_t>(info.limits.seq_len_max));
  plan.in_flight = take("in_flight", 4, 1024);
  absl::StatusOr<double> seconds = invocation.Number("seconds", 3, 0.1, 3600);
  status.Update(seconds.status());
  absl::StatusOr<int64_t> layer = invocation.Count("layer", 0, 0, 511);
  status.Update(layer.status());
  if (!status.ok()) return status;
  plan.seconds = *seconds;
  plan.layer = static_cast<uint32_t>(*layer);
  const std::string name = invocation.Text("model", info.models.empty() ? "" : info.models[0].name);
  for (const client::ModelInfo& model : info.models) {
    if (model.name != name) continue;
    for (const client::LayerGroupInfo& group : model.groups) {
      for (const uint32_t member : group.layers) {
        if (member != plan.layer) continue;
        plan.model = model;
        plan.group = group;
        return plan;
      }
    }
  }
  return absl::NotFoundError(absl::StrCat("no model \"", name, "\" with a layer ", plan.layer,
                                          "; fp8kvctl info lists the models"));
}

// bf16 between -1 and 1, the same every run.
std::vector<uint16_t> Rows(size_t elements, uint32_t seed) {
  std::minstd_rand random(seed);
  std::vector<uint16_t> rows(elements);
  for (uint16_t& bits : rows) {
    const auto draw = static_cast<uint32_t>(random());
    // Sign, an exponent of 2^-8 to 2^-1, seven bits of mantissa.
    bits = static_cast<uint16_t>((draw & 0x8000U) | ((119U + ((draw >> 16) & 7U)) << 7) |
                                 (draw & 0x7FU));
  }
  return rows;
}

absl::StatusOr<std::vector<client::Sequence>> Fill(const Plan& plan, client::Client& client) {
  absl::StatusOr<std::vector<client::Sequence>> sequences =
      client.CreateSequences({.model = plan.model.name,
                              .count = static_cast<uint32_t>(plan.batch),
                              .expected_tokens = static_cast<uint64_t>(plan.seq_len)});
  if (!sequences.ok()) return sequences.status();
  // Layers of a window may not run far ahead of one another, so the whole group gets the tokens.
  const std::vector<uint32_t> layers =
      plan.group.window == 0 ? std::vector<uint32_t>{plan.layer} : plan.group.layers;
  const auto row = static_cast<size_t>(plan.model.kv_heads) * plan.model.head_dim;
  const std::vector<uint16_t> rows = Rows(kPromptTokens * row, 1);
  const int64_t step = plan.group.window == 0
                           ? kPromptTokens  // what a server says may be anything
                           : std::clamp<int64_t>(plan.group.page_tokens, 1, kPromptTokens);
  for (int64_t pos = 0; pos < plan.seq_len; pos += step) {
    const auto n = static_cast<size_t>(std::min(step, plan.seq_len - pos));
    const absl::Span<const uint16_t> some = absl::MakeConstSpan(rows).first(n * row);
    for (const client::Sequence& sequence : *sequences) {
      for (const uint32_t layer : layers) {
        absl::Status status = client.Append({.model = plan.model.name,
                                             .handle = sequence.handle(),
                                             .layer = layer,
                                             .pos = static_cast<uint64_t>(pos),
                                             .n = n,
                                             .k = some,
                                             .v = some});
        if (!status.ok()) return status;
      }
    }
  }
  return sequences;
}

absl::StatusOr<Result> Measure(const Plan& plan, client::Client& client,
                               const std::vector<client::Sequence>& sequences) {
  std::vector<client::Handle> handles;
  handles.reserve(sequences.size());
  for (const client::Sequence& sequence : sequences) handles.push_back(sequence.handle());
  const std::vector<uint64_t> positions(handles.size(), static_cast<uint64_t>(plan.seq_len - 1));
  const std::vector<uint16_t> q =
      Rows(handles.size() * plan.model.q_heads * plan.model.head_dim, 2);
  const std::vector<float> sinks(plan.group.has_sinks ? plan.model.q_heads : 0, 0.0F);
  const client::DecodeArgs args{.model = plan.model.name,
                                .layer = plan.layer,
                                .handles = handles,
                                .positions = positions,
                                .q = q,
                                .sink_logits = sinks};
  absl::StatusOr<std::unique_ptr<client::DecodeStream>> stream =
      client.OpenDecodeStream(static_cast<int32_t>(plan.in_flight));
  if (!stream.ok()) return stream.status();
  std::unordered_map<uint64_t, Clock::time_point> sent;
  Result result;
  const Clock::time_point begin = Clock::now();
  const Clock::time_point end = begin + std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double>(plan.seconds));
  uint64_t id = 0;
  for (bool sending = true; sending || !sent.empty();) {
    sending = Clock::now() < end;
    while (sending && sent.size() < static_cast<size_t>(plan.in_flight)) {
      sent[++id] = Clock::now();
      if (absl::Status status = (*stream)->Send(id, args); !status.ok()) return status;
    }
    if (sent.empty()) break;
    absl::StatusOr<client::StreamReply> reply = (*stream)->Receive();
    if (!reply.ok()) return reply.status();
    if (!reply->status.ok()) return reply->status;
    if (!reply->reply.item_errors.empty()) return reply->reply.item_errors[0].status;
    const std::chrono::duration<double, std::milli> took = Clock::now() - sent[reply->request_id];
    result.call_ms.push_back(took.count());
    result.breakdown.Add(took.count() * 1e3, reply->reply);
    sent.erase(reply->request_id);
  }
  result.wall_s = std::chrono::duration<double>(Clock::now() - begin).count();
  return result;
}

// Bytes of the cache that one call reads.
double CallBytes(const Plan& plan) {
  const int64_t window = plan.group.window;
  const int64_t tokens = window == 0 ? plan.seq_len : std::min(plan.seq_len, window);
  const int64_t head_dim = plan.model.head_dim;
  const int64_t token_bytes =
      plan.group.precision == client::Precision::kFp8Kv ? 2 * head_dim + 8 : 4 * head_dim;
  return static_cast<double>(plan.batch) * static_cast<double>(tokens) *
         static_cast<double>(plan.model.kv_heads) * static_cast<double>(token_bytes);
}

struct Part {
  const char* name;
  std::vector<double>* values;
};
std::vector<Part> PartsOf(Breakdown& breakdown) {
  return {{"stage_us", &breakdown.stage_us},   {"queue_us", &breakdown.queue_us},
          {"kernel_us", &breakdown.kernel_us}, {"reply_us", &breakdown.reply_us},
          {"wire_us", &breakdown.wire_us},     {"batch_items", &breakdown.batch_items}};
}

void AddBreakdown(Breakdown& breakdown, Json& json) {
  json.Key("breakdown").BeginObject();
  for (const Part& part : PartsOf(breakdown)) {
    json.Key(part.name).BeginObject();
    json.Key("p50").Number(Quantile(*part.values, 0.5));
    json.Key("p99").Number(Quantile(*part.values, 0.99)).EndObject();
  }
  json.EndObject();
}

void PrintBreakdown(Breakdown& breakdown, const Invocation& invocation) {
  Table table({"part of a call", "p50", "p99"});
  for (const Part& part : PartsOf(breakdown)) {
    table.Add(
        {part.name, Fixed(Quantile(*part.values, 0.5), 1), Fixed(Quantile(*part.values, 0.99), 1)});
  }
  table.Print(invocation.out());
}

void Print(const Plan& plan, Result& result, const Invocation& invocation) {
  const double calls = static_cast<double>(result.call_ms.size());
  const double gb_s = calls * CallBytes(plan) / result.wall_s / 1e9;
  const double p50 = Quantile(result.call_ms, 0.5);
  const double p99 = Quantile(result.call_ms, 0.99);
  const double tokens_s = calls * static_cast<double>(plan.batch) / result.wall_s;
  const char* precision = PrecisionName(plan.group.precision);
  if (invocation.json()) {
    Json json;
    json.BeginObject().Key("model").Text(plan.model.name).Key("layer").Count(plan.layer);
    json.Key("precision").Text(precision).Key("batch").Count(static_cast<uint64_t>(plan.batch));
    json.Key("seq_len").Count(static_cast<uint64_t>(plan.seq_len));
    json.Key("in_flight").Count(static_cast<uint64_t>(plan.in_flight));
    json.Key("calls").Count(result.call_ms.size()).Key("seconds").Number(result.wall_s);
    json.Key("p50_ms").Number(p50).Key("p99_ms").Number(p99);
    json.Key("calls_per_s").Number(calls / result.wall_s).Key("rows_per_s").Number(tokens_s);
    json.Key("cache_gb_per_s").Number(gb_s);
    if (invocation.Has("breakdown")) AddBreakdown(result.breakdown, json);
    json.EndObject();
    invocation.out() << json.str() << '\n';
    return;
  }
  Table table({"model", "layer", "precision", "batch", "seq_len", "in flight", "calls/s", "rows/s",
               "p50 ms", "p99 ms", "cache GB/s"});
  table.Add({Printable(plan.model.name), absl::StrCat(plan.layer), precision,
             absl::StrCat(plan.batch), absl::StrCat(plan.seq_len), absl::StrCat(plan.in_flight),
             Fixed(calls / result.wall_s, 1), Fixed(tokens_s, 1), Fixed(p50, 2), Fixed(p99, 2),
             Fixed(gb_s, 2)});
  table.Print(invocation.out());
  if (invocation.Has("breakdown")) PrintBreakdown(result.breakdown, invocation);
}

absl::Status RunBench(const Invocation& invocation) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = invocation.Connect();
  if (!client.ok()) return client.status();
  absl::StatusOr<client::ServerInfo> info = (*client)->GetServerInfo();
  if (!info.ok()) return info.status();
  absl::StatusOr<Plan> plan = MakePlan(invocation, *info);
  if (!plan.ok()) return plan.status();
  if (!invocation.json()) {
    invocation.progress() << "filling " << plan->batch << " sequences of " << plan->seq_len
                          << " tokens, then decoding for " << plan->seconds << " s\n";
  }
  absl::StatusOr<std::vector<client::Sequence>> sequences = Fill(*plan, **client);
  if (!sequences.ok()) return sequences.status();
  absl::StatusOr<Result> result = Measure(*plan, **client, *sequences);
  absl::StatusOr<std::vector<client::ItemError>> freed =
      (*client)->FreeSequences(*std::move(sequences));
  if (!result.ok()) return result.status();
  Print(*plan, *result, invocation);
  return freed.status();
}

}  // namespace

const Command& BenchCommand() {
  static const Command command = {
      "bench",
      "decode latency and throughput of one layer, attend only, pipelined on one stream",
      "",
      "fp8kvctl bench --model=llama-3.1-8b --batch=16 --seq_len=4096 --in_flight=4",
      {{"model", "NAME", "default the daemon's first"},
       {"layer", "N", "0-based; default 0"},
       {"batch", "N", "sequences in a call; default 4"},
       {"seq_len", "N", "tokens of each; default 1024"},
       {"in_flight", "N", "calls in the pipeline; default 4"},
       {"seconds", "S", "how long to decode; default 3"},
       {"breakdown", "", "where a call's time goes: in the daemon's parts, and on the wire"}},
      RunBench};
  return command;
}

}  // namespace fp8kvd::ctl
