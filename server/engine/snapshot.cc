#include "server/engine/snapshot.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/engine/snapshot_facts.h"

namespace fp8kvd::engine {
namespace {

SnapshotInfo InfoOf(const SnapshotHead& head) {
  return {.version = head.version,
          .unix_ms = head.unix_ms,
          .seqs = head.seqs,
          .pages = head.pages,
          .bytes = head.bytes};
}

// Those of the first device as they are, in a snapshot of one device there are no others.
std::vector<SnapshotFact> FactsOf(const Fleet& fleet) {
  std::vector<SnapshotFact> facts = fleet.Of(0).snapshots().facts();
  for (int32_t device = 1; device < fleet.devices(); ++device) {
    for (const SnapshotFact& fact : fleet.Of(device).snapshots().facts()) {
      facts.push_back(
          {.name = absl::StrCat("on device ", device, ", ", fact.name), .value = fact.value});
    }
  }
  return facts;
}

absl::Status CheckHead(const SnapshotHead& head, const Fleet& fleet) {
  if (head.devices != static_cast<uint32_t>(fleet.devices())) {
    return absl::FailedPreconditionError(
        absl::StrCat("it is of ", head.devices, " devices, here are ", fleet.devices(),
                     "; start with as many as wrote it (devices), sequences stay on theirs"));
  }
  return CompareFacts(head.facts, FactsOf(fleet));
}

// What the parts must be together: of one run, and no more than all devices may have.
absl::Status CheckParts(const std::vector<std::unique_ptr<cache::SeqStore>>& stores,
                        int64_t seqs_max) {
  int64_t seqs = 0;
  for (const auto& store : stores) {
    seqs += store->seqs_used();
    if (store->options().incarnation == stores.front()->options().incarnation) continue;
    return absl::InvalidArgumentError("it contradicts itself: its devices are of several runs");
  }
  if (seqs <= seqs_max) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("seqs_max is ", seqs_max, ", ", seqs, " sequences are in it"));
}

}  // namespace

absl::Status PrepareSnapshots(Fleet* fleet) {
  for (int32_t device = 0; device < fleet->devices(); ++device) {
    if (absl::Status status = fleet->Of(device).PrepareSnapshots(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status SaveSnapshot(Fleet* fleet, SnapshotSink* sink, SnapshotInfo* info) {
  SnapshotHead head{.version = info->version,
                    .unix_ms = info->unix_ms,
                    .facts = FactsOf(*fleet),
                    .models = {},
                    .tenants = {},
                    .devices = static_cast<uint32_t>(fleet->devices())};
  fleet->Of(0).snapshots().NameAll(&head);
  std::vector<SnapshotPart> parts;
  for (int32_t device = 0; device < fleet->devices(); ++device) {
    absl::StatusOr<SnapshotPart> part = fleet->Of(device).TakePart();
    if (!part.ok()) return part.status();
    head.seqs += static_cast<int64_t>(part->image.seqs.size());
    head.pages += part->pages;
    head.bytes += part->bytes;
    parts.push_back(*std::move(part));
  }
  *info = InfoOf(head);
  SnapshotWriter writer(sink);
  absl::Status status = writer.Begin(head);
  for (int32_t device = 0; status.ok() && device < fleet->devices(); ++device) {
    status = fleet->Of(device).snapshots().Save(parts[static_cast<size_t>(device)], &writer);
  }
  return status.ok() ? writer.End() : status;
}

absl::Status RestoreSnapshot(Fleet* fleet, SnapshotSource* source, SnapshotInfo* info) {
  SnapshotReader reader(source);
  const absl::StatusOr<SnapshotHead> head = reader.Begin();
  if (!head.ok()) return head.status();
  *info = InfoOf(*head);
  if (absl::Status status = CheckHead(*head, *fleet); !status.ok()) return status;
  std::vector<std::unique_ptr<cache::SeqStore>> stores;
  for (int32_t device = 0; device < fleet->devices(); ++device) {
    auto store = fleet->Of(device).LoadPart(*head, &reader);
    if (!store.ok()) return store.status();
    stores.push_back(*std::move(store));
  }
  absl::Status status = reader.End();
  if (status.ok()) status = CheckParts(stores, fleet->Of(0).cache_options().seqs_max);
  for (int32_t device = 0; status.ok() && device < fleet->devices(); ++device) {
    status = fleet->Of(device).Adopt(std::move(stores[static_cast<size_t>(device)]));
  }
  return status;
}

}  // namespace fp8kvd::engine
