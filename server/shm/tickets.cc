#include "server/shm/tickets.h"

#include <sys/random.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "proto/fp8kvd/v1/shared_memory.h"

namespace fp8kvd::shm {
namespace {

absl::StatusOr<std::string> RandomText() {
  char bytes[kTicketBytes / 2];
  if (getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes))) {
    return absl::UnavailableError("the system gives no random numbers for a ticket; use gRPC");
  }
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

// Takes as long wherever the two differ.
bool IsSame(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

}  // namespace

void TicketBook::SetSocket(const std::string& path) {
  const std::lock_guard<std::mutex> lock(mutex_);
  socket_ = path;
  if (path.empty()) entries_.clear();
}

std::string TicketBook::unix_socket() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return socket_;
}

void TicketBook::DropExpired() {
  const int64_t now = clock_->NowUs();
  std::erase_if(entries_, [now](const Entry& entry) { return entry.expires_us <= now; });
}

absl::StatusOr<Ticket> TicketBook::Issue(cache::TenantId tenant) {
  absl::StatusOr<std::string> text = RandomText();
  if (!text.ok()) return text.status();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (socket_.empty()) {
    return absl::UnavailableError(
        "the same-host transport is off here; use Decode, DecodeStream and Append");
  }
  DropExpired();
  const size_t of_tenant = static_cast<size_t>(
      std::count_if(entries_.begin(), entries_.end(),
                    [&tenant](const Entry& entry) { return entry.tenant == tenant; }));
  if (entries_.size() >= limits_.outstanding_max ||
      of_tenant >= limits_.outstanding_per_tenant_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(of_tenant, " tickets are not presented yet, a tenant may have ",
                     limits_.outstanding_per_tenant_max, " and all together ",
                     limits_.outstanding_max, "; present them, or wait until they expire"));
  }
  entries_.push_back({*text, tenant, clock_->NowUs() + limits_.ttl_ms * 1000});
  return Ticket{*std::move(text), socket_};
}

absl::StatusOr<cache::TenantId> TicketBook::Redeem(absl::string_view text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DropExpired();
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [text](const Entry& entry) { return IsSame(entry.text, text); });
  if (found == entries_.end()) {
    return absl::NotFoundError(
        absl::StrCat("the ticket is unknown, used or older than ", limits_.ttl_ms,
                     " ms, a ticket opens one session; call OpenSharedMemory for another"));
  }
  const cache::TenantId tenant = found->tenant;
  entries_.erase(found);
  return tenant;
}

}  // namespace fp8kvd::shm
