#include "cache/audit.h"

#include <vector>

#include "absl/strings/str_cat.h"

namespace fp8kvd::cache {
namespace {

struct Count {
  int64_t owners = 0;
  int64_t claims = 0;
  size_t tenant = 0;  // of the owners
};

class PoolAudit {
 public:
  PoolAudit(const SeqStore& store, int32_t model, int32_t group)
      : store_(store),
        model_(model),
        group_(group),
        pool_(store.PagesOf(model, group)),
        counts_(static_cast<size_t>(pool_.pages_total())),
        tenants_(store.options().tenants.size()) {}

  absl::Status Run() {
    const auto seqs_max = static_cast<uint32_t>(store_.options().seqs_max);
    for (uint32_t i = 0; i < seqs_max; ++i) {
      const auto seq = static_cast<SeqIndex>(i);
      if (!store_.Occupied(seq) || store_.Model(seq) != model_) continue;
      tenant_ = static_cast<size_t>(store_.Tenant(seq));
      absl::Status status = CountTable(store_.Table(seq, group_));
      if (!status.ok()) return status;
    }
    const AppendPlan* plan = store_.open_plan();
    if (plan != nullptr && plan->model == model_ && plan->group == group_) {
      for (const PlannedEdit& edit : store_.pages_planned()) {
        ++At(edit.page_id).owners;
        At(edit.page_id).tenant = static_cast<size_t>(store_.Tenant(plan->seq));
      }
    }
    return Compare(plan != nullptr);
  }

 private:
  Count& At(PageId page_id) { return counts_[static_cast<size_t>(page_id)]; }

  template <typename... Text>
  absl::Status Differs(const Text&... text) const {
    return absl::InternalError(
        absl::StrCat("audit of model ", model_, " group ", group_, ": ", text...));
  }

  absl::Status CountTable(const BlockTable& table) {
    for (int64_t page_no = table.first_page(); page_no < table.end_page(); ++page_no) {
      const PageId page_id = table.page(page_no);
      if (static_cast<size_t>(page_id) >= counts_.size()) {
        return Differs("a block table holds no page at ", page_no);
      }
      Count& count = At(page_id);
      if (count.owners > 0 && count.tenant != tenant_) {
        return Differs("tenants ", count.tenant, " and ", tenant_, " share a page");
      }
      ++count.owners;
      count.claims += table.Claimed(page_no) ? 1 : 0;
      count.tenant = tenant_;
    }
    tenants_[tenant_].pages_reserved += table.open_claims();
    return absl::OkStatus();
  }

  absl::Status Compare(bool plan_open) {
    for (size_t i = 0; i < counts_.size(); ++i) {
      const auto page_id = static_cast<PageId>(i);
      const Count& count = counts_[i];
      if (count.owners != pool_.owners(page_id) || count.claims != pool_.claims(page_id)) {
        return Differs("page ", i, " has ", count.owners, " owners and ", count.claims,
                       " claims in the tables, ", pool_.owners(page_id), " and ",
                       pool_.claims(page_id), " in the pool");
      }
      PoolStat& tenant = tenants_[count.tenant];
      tenant.pages_used += count.owners > 0 ? 1 : 0;
      tenant.pages_reserved += count.claims;
      tenant.pages_reserved -= count.owners > 0 && count.claims == count.owners ? 1 : 0;
    }
    int64_t used = 0;
    int64_t reserved = 0;
    for (size_t t = 0; t < tenants_.size(); ++t) {
      const PoolStat pool = store_.Pool(model_, group_, static_cast<TenantId>(t));
      if (tenants_[t].pages_used != pool.pages_used ||
          tenants_[t].pages_reserved != pool.pages_reserved) {
        return Differs("tenant ", t, " has ", tenants_[t].pages_used, " pages and ",
                       tenants_[t].pages_reserved, " claims, ", pool.pages_used, " and ",
                       pool.pages_reserved, " are put down to it");
      }
      if (!plan_open && pool.pages_used + pool.pages_reserved > pool.pages_total) {
        return Differs("tenant ", t, " has more than the ", pool.pages_total, " pages it may");
      }
      used += pool.pages_used;
      reserved += pool.pages_reserved;
    }
    if (used != pool_.pages_used() || used + pool_.pages_free() != pool_.pages_total()) {
      return Differs(used, " pages are in tables, ", pool_.pages_used(), " used + ",
                     pool_.pages_free(), " free of ", pool_.pages_total(), " in the pool");
    }
    if (reserved != pool_.pages_reserved()) {
      return Differs(reserved, " pages are claimed, ", pool_.pages_reserved(), " reserved");
    }
    if (!plan_open && reserved > pool_.pages_free()) {
      return Differs(reserved, " pages are reserved, ", pool_.pages_free(), " free");
    }
    return absl::OkStatus();
  }

  const SeqStore& store_;
  const int32_t model_;
  const int32_t group_;
  const PagePool& pool_;
  std::vector<Count> counts_;      // by page, from the tables
  std::vector<PoolStat> tenants_;  // pages_used and pages_reserved of each, from the tables
  size_t tenant_ = 0;              // of the table in hand
};

}  // namespace

absl::Status Audit(const SeqStore& store) {
  for (size_t m = 0; m < store.options().models.size(); ++m) {
    for (size_t g = 0; g < store.options().models[m].groups.size(); ++g) {
      absl::Status status =
          PoolAudit(store, static_cast<int32_t>(m), static_cast<int32_t>(g)).Run();
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace fp8kvd::cache
