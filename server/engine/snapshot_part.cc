#include "server/engine/snapshot_part.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "server/engine/snapshot_facts.h"

namespace fp8kvd::engine {
namespace {

// Where each of the saved names stands here; -1: nowhere.
template <typename Names, typename NameOf>
std::vector<int32_t> PlacesOf(const std::vector<std::string>& saved, const Names& here,
                              NameOf name_of) {
  std::vector<int32_t> places;
  for (const std::string& name : saved) {
    const auto at = std::find_if(here.begin(), here.end(),
                                 [&](const auto& thing) { return name_of(thing) == name; });
    places.push_back(at == here.end() ? -1 : static_cast<int32_t>(at - here.begin()));
  }
  return places;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotParts>> SnapshotParts::Make(const Setup& setup) {
  absl::StatusOr<std::vector<SnapshotFact>> facts =
      MakeFacts(setup.models, setup.cache_options, &setup.backend);
  if (!facts.ok()) return facts.status();
  return std::unique_ptr<SnapshotParts>(new SnapshotParts(setup, *std::move(facts)));
}

std::vector<SnapshotParts::Run> SnapshotParts::RunsOf(
    int32_t model, int32_t group, const std::vector<cache::PageId>& page_ids) const {
  const int64_t page_bytes = setup_.pages.page_stride(model, group);
  std::vector<Run> runs;
  for (const cache::PageId page_id : page_ids) {
    uint8_t* const at = setup_.pages.Page(model, group, page_id);
    if (runs.empty() || runs.back().at + runs.back().bytes != at) runs.push_back({.at = at});
    runs.back().bytes += page_bytes;
  }
  return runs;
}

absl::Status SnapshotParts::SavePool(const std::vector<Run>& runs, absl::Span<uint8_t> buffer,
                                     SnapshotWriter* writer) const {
  size_t filled = 0;
  for (Run run : runs) {
    while (run.bytes > 0) {
      const auto part = buffer.subspan(filled, static_cast<size_t>(run.bytes));
      if (absl::Status status = setup_.backend.Read(run.at, part); !status.ok()) return status;
      run.at += part.size();
      run.bytes -= static_cast<int64_t>(part.size());
      filled += part.size();
      if (filled < buffer.size()) break;
      if (absl::Status status = writer->Pages(buffer); !status.ok()) return status;
      filled = 0;
    }
  }
  return filled == 0 ? absl::OkStatus() : writer->Pages(buffer.subspan(0, filled));
}

absl::Status SnapshotParts::LoadPool(Run run, absl::Span<uint8_t> buffer, SnapshotReader* reader,
                                     absl::Status* device) const {
  while (run.bytes > 0) {
    const auto part = buffer.subspan(0, static_cast<size_t>(run.bytes));
    if (absl::Status status = reader->Pages(part); !status.ok()) return status;
    *device = setup_.backend.Write(run.at, part);
    if (!device->ok()) return *device;
    run.at += part.size();
    run.bytes -= static_cast<int64_t>(part.size());
  }
  return absl::OkStatus();
}

void SnapshotParts::NameAll(SnapshotHead* head) const {
  for (const ModelSetup& model : setup_.models) head->models.push_back(model.geometry.name);
  for (const config::TenantOptions& tenant : setup_.tenants) head->tenants.push_back(tenant.name);
}

SnapshotPart SnapshotParts::Of(const cache::SeqStore& store) const {
  SnapshotPart part{.image = store.Image()};
  for (size_t m = 0; m < part.image.pages.size(); ++m) {
    for (size_t g = 0; g < part.image.pages[m].size(); ++g) {
      const auto count = static_cast<int64_t>(part.image.pages[m][g].size());
      part.pages += count;
      part.bytes +=
          count * setup_.pages.page_stride(static_cast<int32_t>(m), static_cast<int32_t>(g));
    }
  }
  return part;
}

absl::Status SnapshotParts::Save(const SnapshotPart& part, SnapshotWriter* writer) const {
  const absl::StatusOr<StagingSlot> slot = setup_.staging.Acquire(kFrameBytesMax);
  if (!slot.ok()) return slot.status();
  const absl::Cleanup give_back = [&] { setup_.staging.Release(*slot); };
  const absl::Span<uint8_t> buffer(slot->bytes, static_cast<size_t>(kFrameBytesMax));
  absl::Status status = writer->Store(part.image);
  const auto& pages = part.image.pages;
  for (size_t m = 0; m < pages.size(); ++m) {
    for (size_t g = 0; status.ok() && g < pages[m].size(); ++g) {
      status = SavePool(RunsOf(static_cast<int32_t>(m), static_cast<int32_t>(g), pages[m][g]),
                        buffer, writer);
    }
  }
  return status;
}

// Models and tenants by what they are called, since their numbers may be others here.
absl::Status SnapshotParts::TakeNames(const SnapshotHead& head,
                                      const std::vector<std::vector<uint64_t>>& page_counts,
                                      cache::StoreImage* image) const {
  const std::vector<int32_t> models =
      PlacesOf(head.models, setup_.models,
               [](const ModelSetup& model) -> const std::string& { return model.geometry.name; });
  const std::vector<int32_t> tenants = PlacesOf(
      head.tenants, setup_.tenants,
      [](const config::TenantOptions& tenant) -> const std::string& { return tenant.name; });
  if (page_counts.size() != models.size()) {
    return absl::InvalidArgumentError("it contradicts itself: pages are of other models");
  }
  for (const ModelSetup& model : setup_.models) image->pages.emplace_back(model.group_pages.size());
  for (size_t m = 0; m < models.size(); ++m) {
    const int32_t here = models[m];
    if (here < 0 || page_counts[m].size() != setup_.models[here].group_pages.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("it contradicts itself: pages of model ", head.models[m]));
    }
    for (size_t g = 0; g < page_counts[m].size(); ++g) {
      const int64_t room = setup_.models[here].group_pages[g];
      if (page_counts[m][g] > static_cast<uint64_t>(room)) {
        return absl::FailedPreconditionError(absl::StrCat(
            "model ", head.models[m], ", layer group ", g, ": ", page_counts[m][g],
            " pages are in it, the pool has ", room, "; start with pools as large as before"));
      }
      image->pages[here][g].resize(page_counts[m][g]);
    }
  }
  for (cache::StoreImage::Seq& seq : image->seqs) {
    const auto tenant = static_cast<size_t>(seq.tenant);
    if (seq.model < 0 || static_cast<size_t>(seq.model) >= models.size() ||
        tenant >= tenants.size()) {
      return absl::InvalidArgumentError("it contradicts itself: a sequence of an unknown model");
    }
    seq.model = models[static_cast<size_t>(seq.model)];
    if (tenants[tenant] < 0) {
      return absl::FailedPreconditionError(absl::StrCat("tenant ", head.tenants[tenant],
                                                        " has sequences in it and is unknown here; "
                                                        "start with that tenant"));
    }
    seq.tenant = static_cast<cache::TenantId>(tenants[tenant]);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<cache::SeqStore>> SnapshotParts::Load(cache::StoreOptions options,
                                                                     int64_t now_ms,
                                                                     const SnapshotHead& head,
                                                                     SnapshotReader* reader,
                                                                     absl::Status* device) const {
  std::vector<std::vector<uint64_t>> page_counts;
  absl::StatusOr<cache::StoreImage> image = reader->Store(&page_counts);
  if (!image.ok()) return image.status();
  absl::Status status = TakeNames(head, page_counts, &*image);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<cache::SeqStore>> store =
      cache::SeqStore::Restore(std::move(options), *image, now_ms);
  if (!store.ok()) return store.status();

  const absl::StatusOr<StagingSlot> slot = setup_.staging.Acquire(kFrameBytesMax);
  if (!slot.ok()) return slot.status();
  const absl::Cleanup give_back = [&] { setup_.staging.Release(*slot); };
  const absl::Span<uint8_t> buffer(slot->bytes, static_cast<size_t>(kFrameBytesMax));
  for (const std::string& name : head.models) {  // in the order of Save
    int32_t model = 0;
    while (setup_.models[model].geometry.name != name) ++model;
    for (size_t g = 0; g < image->pages[model].size(); ++g) {
      const auto group = static_cast<int32_t>(g);
      const auto pages = static_cast<int64_t>(image->pages[model][g].size());
      status = LoadPool({.at = setup_.pages.Page(model, group, cache::PageId{0}),
                         .bytes = pages * setup_.pages.page_stride(model, group)},
                        buffer, reader, device);
      if (!status.ok()) return status;
    }
  }
  return store;
}

}  // namespace fp8kvd::engine
