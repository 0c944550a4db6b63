#include "config/security.h"

#include <algorithm>
#include <cstdint>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fp8kvd::config {
namespace {

absl::Status CheckFiles(const SecurityOptions& security) {
  if (security.tls_cert_file.empty() != security.tls_key_file.empty()) {
    return absl::InvalidArgumentError(
        "one of tls_cert_file and tls_key_file is set, both or none are allowed; name the file "
        "of the other");
  }
  if (!security.tls_client_ca_file.empty() && security.tls_cert_file.empty()) {
    return absl::InvalidArgumentError(
        "tls_client_ca_file is set without tls_cert_file and tls_key_file, clients show "
        "certificates within TLS alone; set those, too");
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const Options& options) {
  if (options.security.tokens_file.empty()) {
    return absl::InvalidArgumentError(
        "tenants are configured and nothing tells them apart; set tokens_file, or remove them");
  }
  std::set<std::string> names;
  for (const TenantOptions& tenant : options.tenants) {
    if (tenant.name.empty()) {
      return absl::InvalidArgumentError(
          "a tenant has no name, allowed are 1 to 128 letters, digits, '.', '_', '-' and '/'; give "
          "each a name");
    }
    if (!names.insert(tenant.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tenant \"", tenant.name, "\" is configured twice; give each its own name"));
    }
  }
  return absl::OkStatus();
}

// One number that tenants share, and what each needs of it.
struct Shared {
  const char* name;
  int64_t has;
  int64_t needs;
};

absl::Status CheckShares(const Options& options) {
  const auto tenants = static_cast<int64_t>(options.tenants.size());
  const Shared all[] = {{"queue_items_max", options.engine.queue_items_max, kItemsMax},
                        {"staging_slots", options.engine.staging_slots, 2},
                        {"streams_max", options.server.streams_max, 1},
                        {"seqs_max", options.cache.seqs_max, 1}};
  for (const Shared& shared : all) {
    if (shared.has / tenants >= shared.needs) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        shared.name, " is ", shared.has, " for ", tenants, " tenants, allowed is from ",
        shared.needs * tenants, ", so that each has a part; raise it or have fewer tenants"));
  }
  return absl::OkStatus();
}

bool IsLoopback(absl::string_view address) {
  const absl::string_view host = address.substr(0, address.rfind(':'));
  return host == "localhost" || host == "[::1]" || absl::StartsWith(host, "127.");
}

}  // namespace

absl::Status FinishSecurity(Options* options) {
  absl::Status status = CheckFiles(options->security);
  if (status.ok() && !options->tenants.empty()) status = CheckNames(*options);
  if (!status.ok()) return status;
  if (options->tenants.empty()) {
    options->tenants.push_back({.name = "default",
                                .pages_share_max = 1.0,
                                .seqs_max = options->cache.seqs_max,
                                .inflight_items_max = options->engine.queue_items_max});
    return absl::OkStatus();
  }
  status = CheckShares(*options);
  if (!status.ok()) return status;
  const auto tenants = static_cast<int32_t>(options->tenants.size());
  for (TenantOptions& tenant : options->tenants) {
    if (tenant.pages_share_max == 0.0) tenant.pages_share_max = 1.0 / tenants;
    if (tenant.seqs_max == 0) tenant.seqs_max = options->cache.seqs_max / tenants;
    if (tenant.inflight_items_max == 0) {
      tenant.inflight_items_max = options->engine.queue_items_max / tenants;
    }
    if (tenant.inflight_items_max < kItemsMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tenant \"", tenant.name, "\": inflight_items_max is ", tenant.inflight_items_max,
          ", allowed is from ", kItemsMax, ", the items of one full message; raise it"));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> OpenDoors(const Options& options) {
  std::vector<std::string> doors;
  const ServerOptions& server = options.server;
  const bool has_tls = !options.security.tls_cert_file.empty();
  const bool has_tokens = !options.security.tokens_file.empty();
  const bool has_client_ca = !options.security.tls_client_ca_file.empty();
  if (!IsLoopback(server.listen_address)) {
    if (!has_tls) {
      doors.push_back(absl::StrCat("listen_address ", server.listen_address,
                                   " is reachable from other machines without "
                                   "TLS: rows",
                                   has_tokens ? " and tokens" : "",
                                   " go over the network in the clear; set "
                                   "tls_cert_file and tls_key_file, or listen on 127.0.0.1"));
    }
    if (!has_tokens && !has_client_ca) {
      doors.push_back(absl::StrCat(
          "listen_address ", server.listen_address,
          " is reachable from other machines without "
          "tokens or client certificates: who reaches it may use, list and free every sequence; "
          "set tokens_file or tls_client_ca_file, or listen on 127.0.0.1"));
    }
  }
  if (!server.http_address.empty() && !IsLoopback(server.http_address)) {
    doors.push_back(absl::StrCat(
        "http_address ", server.http_address,
        " is reachable from other machines: metrics and the "
        "status page, tenants' names among them, are open to all; bind it to 127.0.0.1 or to a "
        "network of your own"));
  }
  return doors;
}

}  // namespace fp8kvd::config
