#include "server/reload.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "spdlog/spdlog.h"

#include "config/keys.h"
#include "config/report.h"
#include "server/ops/log.h"

namespace fp8kvd {
namespace {

// The models and tenants of a configuration, as the report writes them.
std::string ListsText(const config::Loaded& loaded) {
  config::Loaded lists = loaded;
  lists.options = config::Options();
  lists.options.models = loaded.options.models;
  lists.options.tenants = loaded.options.tenants;
  lists.options.security.tokens_file = loaded.options.security.tokens_file.empty() ? "" : "set";
  lists.sources.clear();
  return config::EffectiveConfig(lists);
}

std::string TenantsText(const config::Loaded& loaded) {
  config::Loaded tenants = loaded;
  tenants.options.models.clear();
  return ListsText(tenants);
}

// Who is who stays; what each may have is taken over.
void ReloadBounds(const config::Loaded& fresh, config::Loaded* loaded, engine::Fleet* fleet) {
  std::vector<config::TenantOptions>& tenants = loaded->options.tenants;
  const auto has_same_name = [](const config::TenantOptions& a, const config::TenantOptions& b) {
    return a.name == b.name;
  };
  const bool are_same_tenants =
      std::equal(tenants.begin(), tenants.end(), fresh.options.tenants.begin(),
                 fresh.options.tenants.end(), has_same_name);
  if (!are_same_tenants || TenantsText(*loaded) == TenantsText(fresh)) return;
  tenants = fresh.options.tenants;
  fleet->SetTenants(tenants);
  spdlog::warn("SIGHUP: the tenants have other bounds from now on");
}

}  // namespace

void ReloadConfig(const LoadConfig& load_again, config::Loaded* loaded, engine::Fleet* fleet) {
  const absl::StatusOr<config::Loaded> fresh = load_again();
  if (!fresh.ok()) {
    spdlog::error("SIGHUP: nothing has changed, the configuration is refused: {}",
                  std::string(fresh.status().message()));
    return;
  }
  std::vector<std::string> need_restart;
  for (const config::Key<config::Options>& key : config::Keys()) {
    const std::string is = config::ValueText(key, loaded->options);
    const std::string becomes = config::ValueText(key, fresh->options);
    if (is == becomes) continue;
    if (std::string(key.name) == "log_level") {
      loaded->options.log.log_level = fresh->options.log.log_level;
      ops::SetLogLevel(loaded->options.log.log_level);
      spdlog::warn("SIGHUP: log_level was {} and is {}", is, becomes);
    } else {
      need_restart.emplace_back(key.name);
    }
  }
  ReloadBounds(*fresh, loaded, fleet);
  if (ListsText(*loaded) != ListsText(*fresh)) {
    need_restart.emplace_back("models or tenants");
  }
  if (!need_restart.empty()) {
    spdlog::warn("SIGHUP: these changes need a restart: {}", absl::StrJoin(need_restart, ", "));
  }
  spdlog::info("SIGHUP: the configuration was read again");
}

}  // namespace fp8kvd
