// What a store knows of its tenants.
#include "cache/tenant_pages.h"

#include <vector>

#include "cache/seq_store.h"
#include "config/base/check.h"

namespace fp8kvd::cache {

void SeqStore::SetPages() {
  for (ModelPools& model : models_) {
    for (size_t g = 0; g < model.pools.size(); ++g) {
      const auto pages_total = static_cast<double>(model.pools[g]->pages_total());
      for (size_t t = 0; t < options_.tenants.size(); ++t) {
        model.tenants[g][t].max =
            static_cast<int64_t>(options_.tenants[t].pages_share_max * pages_total);
      }
    }
  }
}

void SeqStore::SetTenants(const std::vector<TenantLimits>& tenants) {
  FP8KVD_CHECK(!plan_open_ && tenants.size() == options_.tenants.size());
  options_.tenants = tenants;
  SetPages();
}

TenantPages& SeqStore::PagesOfTenant(int32_t model, int32_t group, TenantId tenant) {
  return models_[static_cast<size_t>(model)]
      .tenants[static_cast<size_t>(group)][static_cast<size_t>(tenant)];
}

const TenantPages& SeqStore::PagesOfTenant(int32_t model, int32_t group, TenantId tenant) const {
  return const_cast<SeqStore*>(this)->PagesOfTenant(model, group, tenant);
}

Charge SeqStore::ChargeOf(const Seq& seq, size_t group) {
  const auto g = static_cast<int32_t>(group);
  return {&PagesOf(seq.model, g), &PagesOfTenant(seq.model, g, seq.tenant)};
}

PoolStat SeqStore::Pool(int32_t model, int32_t group, TenantId tenant) const {
  const TenantPages& pages = PagesOfTenant(model, group, tenant);
  return {.pages_total = pages.max,
          .pages_used = pages.used,
          .pages_free = pages.max - pages.used,
          .pages_reserved = pages.reserved};
}

}  // namespace fp8kvd::cache
