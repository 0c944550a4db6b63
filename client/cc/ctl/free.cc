// fp8kvctl free: gives sequences back whose owner is gone.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/handles.h"
#include "client/cc/ctl/output.h"

namespace fp8kvd::ctl {
namespace {

constexpr size_t kSequencesMax = 1'000'000;
constexpr size_t kHandlesInCall = 256;

absl::StatusOr<std::vector<client::Handle>> Chosen(const Invocation& invocation,
                                                   client::Client& client) {
  if (!invocation.Has("all")) return ParseHandles(invocation.arguments());
  absl::StatusOr<std::vector<client::SequenceInfo>> all =
      client.ListSequences(invocation.Text("model", ""), kSequencesMax);
  if (!all.ok()) return all.status();
  std::vector<client::Handle> handles;
  for (const client::SequenceInfo& seq : *all) handles.push_back(seq.handle);
  return handles;
}

absl::Status RunFree(const Invocation& invocation) {
  if (invocation.Has("all") == !invocation.arguments().empty()) {
    return UsageError("name handles, or give --all; fp8kvctl stat lists the handles");
  }
  absl::StatusOr<std::unique_ptr<client::Client>> client = invocation.Connect();
  if (!client.ok()) return client.status();
  absl::StatusOr<std::vector<client::Handle>> handles = Chosen(invocation, **client);
  if (!handles.ok()) return handles.status();
  absl::Status failed;
  size_t failures = 0;
  for (size_t begin = 0; begin < handles->size(); begin += kHandlesInCall) {
    const absl::Span<const client::Handle> some =
        absl::MakeConstSpan(*handles).subspan(begin, kHandlesInCall);
    absl::StatusOr<std::vector<client::ItemError>> errors = (*client)->FreeSequences(some);
    if (!errors.ok()) return errors.status();
    failures += errors->size();
    for (const client::ItemError& error : *errors) {
      const std::string text = error.index < some.size() ? HandleText(some[error.index]) : "";
      failed.Update(
          absl::Status(error.status.code(), absl::StrCat(text, ": ", error.status.message())));
    }
  }
  const size_t freed = handles->size() - std::min(failures, handles->size());
  if (invocation.json()) {
    Json json;
    json.BeginObject().Key("freed").Count(freed).Key("failed").Count(failures).EndObject();
    invocation.out() << json.str() << '\n';
  } else {
    invocation.out() << "freed " << freed << " of " << handles->size() << " sequences\n";
  }
  return failed;
}

}  // namespace

const Command& FreeCommand() {
  static const Command command = {
      "free",
      "gives sequences back: those named, or all",
      "[HANDLE...]",
      "fp8kvctl free --all --model=llama-3.1-8b",
      {{"all", "", "every live sequence instead of named ones; their owners get NOT_FOUND"},
       {"model", "NAME", "with --all: only this model's; default all"}},
      RunFree};
  return command;
}

}  // namespace fp8kvd::ctl
