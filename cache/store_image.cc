// A store as plain numbers, and back.
#include "cache/store_image.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "cache/seq_store.h"
#include "config/base/check.h"

namespace fp8kvd::cache {
namespace {

template <typename... Text>
absl::Status Wrong(const StoreImage::Seq& seq, const Text&... text) {
  return absl::InvalidArgumentError(absl::StrCat("sequence ", seq.index, ": ", text...));
}

// By pool, for what an image says of each page: who has it.
struct PageUser {
  uint32_t seq = std::numeric_limits<uint32_t>::max();  // the latest
  TenantId tenant{0};
  bool is_used() const { return seq != std::numeric_limits<uint32_t>::max(); }
};

absl::Status CheckReplays(const StoreImage::Seq& seq, const std::vector<ReplayEntry>& replays,
                          int64_t seq_len) {
  int64_t end = 0;
  for (const ReplayEntry& entry : replays) {
    if (entry.pos < end || entry.n < 1 || int64_t{entry.pos} + entry.n > seq_len) {
      return Wrong(seq, "an append of ", entry.n, " tokens at ", entry.pos, " lies outside ", end,
                   " to ", seq_len);
    }
    end = int64_t{entry.pos} + entry.n;
  }
  return absl::OkStatus();
}

// What SeqStore keeps true of every sequence (seq_store.h, block_table.h).
absl::Status CheckGroup(const StoreImage::Seq& seq, const StoreImage::Group& group, size_t layers,
                        const BlockTable::Shape& shape, size_t pages) {
  if (group.seq_lens.size() != layers || group.replays.size() != layers) {
    return Wrong(seq, "it has ", group.seq_lens.size(), " lengths for ", layers, " layers");
  }
  const auto [least, most] = std::minmax_element(group.seq_lens.begin(), group.seq_lens.end());
  if (*least < 0 || *most > shape.seq_len_max) {
    return Wrong(seq, "it has lengths from ", *least, " to ", *most, ", allowed are 0 to ",
                 shape.seq_len_max);
  }
  const int64_t ahead_max = int64_t{shape.window} + shape.reclaim_slack_tokens;
  if (group.first_pos < 0 || group.first_pos > (shape.window == 0 ? 0 : *least) ||
      (shape.window > 0 && *most > *least + ahead_max)) {
    return Wrong(seq, "lengths from ", *least, " to ", *most, " that begin at ", group.first_pos,
                 " cannot be");
  }
  const int64_t held =
      (*most + shape.page_tokens - 1) / shape.page_tokens - group.first_pos / shape.page_tokens;
  if (static_cast<int64_t>(group.pages.size()) != held) {
    return Wrong(seq, "it has ", group.pages.size(), " pages, its tokens need ", held);
  }
  for (const uint32_t page : group.pages) {
    if (page >= pages) return Wrong(seq, "it has page ", page, " of ", pages);
  }
  for (size_t i = 0; i < layers; ++i) {
    absl::Status status = CheckReplays(seq, group.replays[i], group.seq_lens[i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

StoreImage SeqStore::Image() const {
  FP8KVD_CHECK(!plan_open_);
  StoreImage image;
  image.incarnation = options_.incarnation;
  // First which pages there are, then what number each has.
  std::vector<std::vector<std::vector<uint32_t>>> numbers;  // [models][groups][pages_total]
  for (const ModelPools& model : models_) {
    image.pages.emplace_back(model.pools.size());
    auto& pools = numbers.emplace_back();
    for (const auto& pool : model.pools) {
      pools.emplace_back(static_cast<size_t>(pool->pages_total()), 0);
    }
  }
  const auto is_live = [](const Seq& seq) { return seq.occupied && !seq.freed; };
  for (const Seq& seq : seqs_) {
    for (size_t g = 0; is_live(seq) && g < seq.groups.size(); ++g) {
      auto& used = numbers[static_cast<size_t>(seq.model)][g];
      for (const PageId page_id : seq.groups[g].table.pages()) {
        used[static_cast<size_t>(page_id)] = 1;
      }
    }
  }
  for (size_t m = 0; m < numbers.size(); ++m) {
    for (size_t g = 0; g < numbers[m].size(); ++g) {
      for (size_t id = 0; id < numbers[m][g].size(); ++id) {
        if (numbers[m][g][id] == 0) continue;
        numbers[m][g][id] = static_cast<uint32_t>(image.pages[m][g].size());
        image.pages[m][g].push_back(static_cast<PageId>(id));
      }
    }
  }
  for (size_t i = 0; i < seqs_.size(); ++i) {
    const Seq& seq = seqs_[i];
    if (seq.generation != 0) {
      image.generations.resize(i + 1, 0);
      image.generations[i] = seq.generation;
    }
    if (!is_live(seq)) continue;
    image.seqs.push_back(ImageOf(seq, numbers[static_cast<size_t>(seq.model)]));
    image.seqs.back().index = static_cast<uint32_t>(i);
  }
  return image;
}

StoreImage::Seq SeqStore::ImageOf(const Seq& seq,
                                  const std::vector<std::vector<uint32_t>>& numbers) {
  StoreImage::Seq image{.index = 0,
                        .model = seq.model,
                        .tenant = seq.tenant,
                        .expected_tokens = seq.expected_tokens,
                        .ttl_ms = seq.ttl_ms,
                        .parent = seq.parent,
                        .groups = {}};
  for (size_t g = 0; g < seq.groups.size(); ++g) {
    const SeqGroup& from = seq.groups[g];
    StoreImage::Group& to = image.groups.emplace_back();
    to.first_pos = from.first_pos;
    to.seq_lens = from.seq_lens;
    for (const ReplayWindow& replay : from.replays) {
      std::vector<ReplayEntry>& kept = to.replays.emplace_back();
      for (int32_t i = 0; i < replay.size(); ++i) kept.push_back(replay.At(i));
    }
    for (const PageId page_id : from.table.pages()) {
      to.pages.push_back(numbers[g][static_cast<size_t>(page_id)]);
    }
  }
  return image;
}

// Makes a new store into what an image says, once.
class SeqStore::Restorer {
 public:
  Restorer(SeqStore* store, const StoreImage& image) : store_(*store), image_(image) {}

  absl::Status Run(int64_t now_ms) {
    absl::Status status = TakePages();
    if (status.ok()) status = TakeGenerations();
    for (const StoreImage::Seq& seq : image_.seqs) {
      if (status.ok()) status = Take(seq, now_ms);
    }
    if (status.ok()) status = CheckPools();
    return status;
  }

 private:
  absl::Status TakePages() {
    if (image_.pages.size() != store_.models_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(image_.pages.size(), " models, the store has ", store_.models_.size()));
    }
    for (size_t m = 0; m < image_.pages.size(); ++m) {
      const ModelPools& model = store_.models_[m];
      users_.emplace_back();
      if (image_.pages[m].size() != model.pools.size()) {
        return absl::InvalidArgumentError(absl::StrCat("model ", m, " has ", image_.pages[m].size(),
                                                       " layer groups, not ", model.pools.size()));
      }
      for (size_t g = 0; g < model.pools.size(); ++g) {
        std::vector<PageId> page_ids(image_.pages[m][g].size());
        absl::Status status = model.pools[g]->Alloc(absl::MakeSpan(page_ids));  // ids 0, 1, …
        if (!status.ok()) return status;
        users_[m].emplace_back(page_ids.size());
      }
    }
    return absl::OkStatus();
  }

  absl::Status TakeGenerations() {
    if (image_.generations.size() > store_.seqs_.size()) {
      return absl::FailedPreconditionError(absl::StrCat("seqs_max is ", store_.seqs_.size(),
                                                        ", sequences up to ",
                                                        image_.generations.size(), " were used"));
    }
    for (size_t i = 0; i < image_.generations.size(); ++i) {
      store_.seqs_[i].generation = image_.generations[i];
    }
    return absl::OkStatus();
  }

  absl::Status CheckSeq(const StoreImage::Seq& seq) const {
    if (seq.index < next_ || seq.index >= image_.generations.size() ||
        image_.generations[seq.index] == 0) {
      return Wrong(seq, "it stands at a wrong place");
    }
    if (seq.model < 0 || static_cast<size_t>(seq.model) >= store_.models_.size() ||
        static_cast<size_t>(seq.tenant) >= store_.options_.tenants.size()) {
      return Wrong(seq, "it is of model ", seq.model, " and tenant ",
                   static_cast<uint32_t>(seq.tenant), ", which are not there");
    }
    if (seq.expected_tokens < 0 || seq.expected_tokens > store_.options_.seq_len_max ||
        seq.ttl_ms < 1 || seq.ttl_ms > kLeaseTtlMsMax) {
      return Wrong(seq, "it expects ", seq.expected_tokens, " tokens and has a lease of ",
                   seq.ttl_ms, " ms; allowed are 0 to ", store_.options_.seq_len_max, " and 1 to ",
                   kLeaseTtlMsMax);
    }
    const ModelPools& model = store_.models_[static_cast<size_t>(seq.model)];
    if (seq.groups.size() != model.pools.size()) {
      return Wrong(seq, "it has ", seq.groups.size(), " layer groups, its model has ",
                   model.pools.size());
    }
    for (size_t g = 0; g < seq.groups.size(); ++g) {
      const size_t layers =
          store_.options_.models[static_cast<size_t>(seq.model)].groups[g].layers.size();
      absl::Status status = CheckGroup(seq, seq.groups[g], layers, model.shapes[g],
                                       users_[static_cast<size_t>(seq.model)][g].size());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Take(const StoreImage::Seq& from, int64_t now_ms) {
    absl::Status status = CheckSeq(from);
    if (!status.ok()) return status;
    // Indices are free in ascending order, so those between are passed over.
    for (; next_ < from.index; ++next_) store_.free_[free_count_++] = next_;
    ++next_;
    Seq& seq = store_.seqs_[from.index];
    store_.MakeGroups(&seq, from.model);
    seq.tenant = from.tenant;
    seq.occupied = true;
    seq.expected_tokens = from.expected_tokens;
    seq.ttl_ms = from.ttl_ms;
    seq.lease_end_ms = now_ms + from.ttl_ms;
    seq.parent = from.parent;
    if (seq.parent.generation != 0) {
      seq.parent.incarnation = image_.incarnation;
      seq.parent.home = store_.options_.home;
    }
    store_.leases_.Set(static_cast<SeqIndex>(from.index), seq.lease_end_ms);
    ++store_.seqs_used_;
    ++store_.tenant_seqs_[static_cast<size_t>(from.tenant)];
    ++store_.model_seqs_[static_cast<size_t>(from.model)];
    for (size_t g = 0; status.ok() && g < from.groups.size(); ++g) status = TakeGroup(from, g);
    return status;
  }

  absl::Status TakeGroup(const StoreImage::Seq& seq, size_t g) {
    const StoreImage::Group& from = seq.groups[g];
    SeqGroup& to = store_.seqs_[seq.index].groups[g];
    const Charge charge = store_.ChargeOf(store_.seqs_[seq.index], g);
    to.seq_lens = from.seq_lens;
    to.first_pos = from.first_pos;
    to.FindSlowest();
    for (size_t i = 0; i < from.replays.size(); ++i) {
      for (const ReplayEntry& entry : from.replays[i]) {
        to.replays[i].Push(entry.pos, entry.n, entry.digest);
      }
    }
    PagePool& pool = store_.MutablePool(seq.model, static_cast<int32_t>(g));
    std::vector<PageId> page_ids;
    for (const uint32_t page : from.pages) {
      PageUser& user = users_[static_cast<size_t>(seq.model)][g][page];
      if (user.is_used() && (user.seq == seq.index || user.tenant != seq.tenant)) {
        return Wrong(seq, "its page ", page, " belongs to sequence ", user.seq, ", too");
      }
      if (user.is_used()) {
        pool.AddOwner(static_cast<PageId>(page));
      } else {  // taken for it above, before any tenant was charged
        ++store_.PagesOfTenant(seq.model, static_cast<int32_t>(g), seq.tenant).used;
      }
      user = {.seq = seq.index, .tenant = seq.tenant};
      page_ids.push_back(static_cast<PageId>(page));
    }
    const int64_t first_page = from.first_pos / store_.options_.page_tokens;
    to.table.Adopt(first_page, page_ids, seq.expected_tokens, to.seq_len_min);
    return absl::OkStatus();
  }

  absl::Status CheckPools() {
    for (; next_ < store_.seqs_.size(); ++next_) store_.free_[free_count_++] = next_;
    for (size_t m = 0; m < users_.size(); ++m) {
      for (size_t g = 0; g < users_[m].size(); ++g) {
        for (size_t page = 0; page < users_[m][g].size(); ++page) {
          if (users_[m][g][page].is_used()) continue;
          return absl::InvalidArgumentError(
              absl::StrCat("model ", m, ", layer group ", g, ": no sequence has page ", page));
        }
        const PagePool& pool = *store_.models_[m].pools[g];
        if (pool.pages_reserved() <= pool.pages_free()) continue;
        return absl::FailedPreconditionError(
            absl::StrCat("model ", m, ", layer group ", g, ": ", pool.pages_reserved(),
                         " pages are reserved, ", pool.pages_free(), " are free"));
      }
    }
    return absl::OkStatus();
  }

  SeqStore& store_;
  const StoreImage& image_;
  std::vector<std::vector<std::vector<PageUser>>> users_;  // [models][groups][page numbers]
  uint32_t next_ = 0;                                      // index after the latest sequence
  size_t free_count_ = 0;
};

absl::StatusOr<std::unique_ptr<SeqStore>> SeqStore::Restore(StoreOptions options,
                                                            const StoreImage& image,
                                                            int64_t now_ms) {
  options.incarnation = image.incarnation;
  absl::StatusOr<std::unique_ptr<SeqStore>> store = Make(std::move(options));
  if (!store.ok()) return store.status();
  absl::Status status = Restorer(store->get(), image).Run(now_ms);
  if (!status.ok()) return status;
  return store;
}

}  // namespace fp8kvd::cache
