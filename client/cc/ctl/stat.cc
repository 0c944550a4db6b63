// fp8kvctl stat: the live sequences, or those named.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/handles.h"
#include "client/cc/ctl/output.h"

namespace fp8kvd::ctl {
namespace {

constexpr int64_t kSequencesMax = 1'000'000;

struct Stats {
  std::vector<client::SequenceInfo> sequences;
  absl::Status failed;  // the first item that failed
};

absl::StatusOr<Stats> Named(client::Client& client, const std::vector<std::string>& texts) {
  absl::StatusOr<std::vector<client::Handle>> handles = ParseHandles(texts);
  if (!handles.ok()) return handles.status();
  absl::StatusOr<client::StatReply> reply = client.StatSequences(*handles);
  if (!reply.ok()) return reply.status();
  Stats stats;
  for (size_t i = 0; i < reply->sequences.size(); ++i) {
    const bool failed = std::any_of(reply->item_errors.begin(), reply->item_errors.end(),
                                    [i](const auto& error) { return error.index == i; });
    if (!failed) stats.sequences.push_back(reply->sequences[i]);
  }
  for (const client::ItemError& error : reply->item_errors) {
    const std::string text = error.index < texts.size() ? texts[error.index] : "";
    stats.failed.Update(
        absl::Status(error.status.code(), absl::StrCat(text, ": ", error.status.message())));
  }
  return stats;
}

// "1024", or "1000-1024" where layers differ.
std::string LengthText(const std::vector<uint64_t>& seq_lens) {
  if (seq_lens.empty()) return "0";
  const auto [low, high] = std::minmax_element(seq_lens.begin(), seq_lens.end());
  return *low == *high ? absl::StrCat(*low) : absl::StrCat(*low, "-", *high);
}

std::string StatJson(const Stats& stats) {
  Json json;
  json.BeginObject().Key("sequences").BeginArray();
  for (const client::SequenceInfo& seq : stats.sequences) {
    json.BeginObject().Key("handle").Text(HandleText(seq.handle)).Key("model").Text(seq.model);
    json.Key("device").Count(seq.handle.home);
    json.Key("seq_lens").BeginArray();
    for (const uint64_t seq_len : seq.seq_lens) json.Count(seq_len);
    json.EndArray().Key("pages").Count(seq.pages).Key("pages_shared").Count(seq.pages_shared);
    json.Key("bytes").Count(seq.bytes).Key("expected_tokens").Count(seq.expected_tokens);
    json.Key("ttl_ms").Count(seq.ttl_ms).Key("ttl_left_ms").Count(seq.ttl_left_ms).EndObject();
  }
  return json.EndArray().EndObject().str();
}

void PrintTable(const Stats& stats, std::ostream& out) {
  Table table({"handle", "model", "device", "seq_len", "expected", "pages", "shared", "bytes",
               "lease left"});
  for (const client::SequenceInfo& seq : stats.sequences) {
    table.Add({HandleText(seq.handle), Printable(seq.model), absl::StrCat(seq.handle.home),
               LengthText(seq.seq_lens), absl::StrCat(seq.expected_tokens), absl::StrCat(seq.pages),
               absl::StrCat(seq.pages_shared), HumanBytes(static_cast<double>(seq.bytes)),
               absl::StrCat(Fixed(static_cast<double>(seq.ttl_left_ms) / 1e3, 1), " of ",
                            Fixed(static_cast<double>(seq.ttl_ms) / 1e3, 1), " s")});
  }
  table.Print(out);
  out << stats.sequences.size() << " sequences\n";
}

absl::Status RunStat(const Invocation& invocation) {
  absl::StatusOr<int64_t> limit = invocation.Count("limit", 1000, 1, kSequencesMax);
  if (!limit.ok()) return limit.status();
  absl::StatusOr<std::unique_ptr<client::Client>> client = invocation.Connect();
  if (!client.ok()) return client.status();
  Stats stats;
  if (invocation.arguments().empty()) {
    absl::StatusOr<std::vector<client::SequenceInfo>> all =
        (*client)->ListSequences(invocation.Text("model", ""), static_cast<size_t>(*limit));
    if (!all.ok()) return all.status();
    stats.sequences = *std::move(all);
  } else {
    absl::StatusOr<Stats> named = Named(**client, invocation.arguments());
    if (!named.ok()) return named.status();
    stats = *std::move(named);
  }
  if (invocation.json()) {
    invocation.out() << StatJson(stats) << '\n';
  } else {
    PrintTable(stats, invocation.out());
  }
  return stats.failed;
}

}  // namespace

const Command& StatCommand() {
  static const Command command = {
      "stat",
      "sequences: lengths, pages, bytes, leases; all that live, or those named",
      "[HANDLE...]",
      "fp8kvctl stat --model=llama-3.1-8b --limit=20",
      {{"model", "NAME", "only this model's; default all"},
       {"limit", "N", "at most so many; default 1000"}},
      RunStat};
  return command;
}

}  // namespace fp8kvd::ctl
