// cache/seq_store.h: every sequence of the daemon: handle -> sequence, its committed length per
// layer, its block table per layer group, its lease. The only door to the pools.
//
// Promises
//   - A call that returns an error has changed nothing, and one that makes several sequences makes
//     all or none.
//   - A stale, foreign or unknown handle, or one of another tenant, is NOT_FOUND, in the same
//     words, and never another sequence's data. Forks belong to their parent's tenant, so that no
//     page is shared between tenants.
//   - expected_tokens at Create or Fork is a reservation: appends inside it never fail for room,
//     the copies that sharing makes necessary included. Beyond it, and with 0, appends are best
//     effort. A call that would break somebody's reservation is RESOURCE_EXHAUSTED instead.
//   - A tenant has no more sequences, and no more pages of a pool, reserved ones included, than it
//     may; its own reservations are within that.
//   - A page with several owners is never written: the plan of the append orders a copy.
//   - A windowed group drops a page when its last position < (least length of the group's layers)
//     - window - reclaim_slack_tokens, at Commit.
//   - used + free == total in every pool, after every call.
// Does not manage: bytes, addresses and device block tables (the engine); a clock (now_ms is given,
//   any monotonic milliseconds); quotas and queues.
// A SeqIndex comes from Find and stays good while the sequence exists, or while it is held (Hold):
//   the calls that take one abort on an index that is neither, which is a bug of the caller.
// One plan may be open at a time; between PlanAppend (kCommit) and Commit or Abandon only const
//   calls are allowed, others abort.
// Threads: one caller at a time, no locks. Cost: no allocation in Find, PlanAppend, Commit, Renew,
//   Hold, CheckVisible, Table; the first Create of an index, or one for another model than before,
//   allocates its tables (seq_len_max / page_tokens * 4 bytes a group, layers * (8 +
//   replay_digests_max * 16) bytes), which stay for the next. PlanAppend and Commit: O(pages
//   touched), and once a token O(layers of the group). Fork, Truncate, Free: O(pages + layers).
// Errors are statuses whose message says what was asked, what is allowed and what to do.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "cache/append_plan.h"
#include "cache/block_table.h"
#include "cache/ids.h"
#include "cache/lease_queue.h"
#include "cache/page_pool.h"
#include "cache/store_image.h"
#include "cache/store_options.h"
#include "cache/tenant_pages.h"

namespace fp8kvd::cache {

struct CreateArgs {
  int32_t model = 0;
  int64_t expected_tokens = 0;  // 0 .. seq_len_max; 0: no reservation
  int64_t ttl_ms = 60000;       // 1 .. kLeaseTtlMsMax
  TenantId tenant{0};           // whose they are, and their forks
};

struct ForkArgs {
  int64_t expected_tokens = 0;  // of the child in all, the shared tokens included
  int64_t ttl_ms = 60000;
};

struct SeqStat {
  int32_t model = 0;
  std::vector<int64_t> seq_lens;  // [layers] committed tokens by model layer
  int64_t pages_unique = 0;       // held by this sequence alone, over all groups
  int64_t pages_shared = 0;       // held with others
  int64_t expected_tokens = 0;
  int64_t pages_reserved = 0;  // claimed and not yet held
  int64_t ttl_ms = 0;
  int64_t lease_left_ms = 0;  // 0 when it has ended and only a hold keeps the sequence
  SeqHandle parent;           // what it was forked from (generation 0: nothing); may be gone
};

struct PoolStat {
  int64_t pages_total = 0;
  int64_t pages_used = 0;
  int64_t pages_free = 0;
  int64_t pages_reserved = 0;   // of the free ones, promised to sequences
  int64_t evictions_total = 0;  // pages that windows have passed, so far
};

class SeqStore {
 public:
  // INVALID_ARGUMENT as CheckOptions. Cost: seqs_max and pages_total times a few bytes, at once.
  static absl::StatusOr<std::unique_ptr<SeqStore>> Make(StoreOptions options);

  // A store that knows what the image says, with leases that start at now_ms; the incarnation is
  // the image's. Page number n of the image has the id n. INVALID_ARGUMENT: the image contradicts
  // itself or the options' models. FAILED_PRECONDITION, RESOURCE_EXHAUSTED: these options have no
  // room for it. Tenants' bounds are not asked: as SetTenants has it.
  static absl::StatusOr<std::unique_ptr<SeqStore>> Restore(StoreOptions options,
                                                           const StoreImage& image, int64_t now_ms);
  // All that Restore needs. No plan is open; holds are forgotten. Allocates as much as it tells.
  StoreImage Image() const;

  // Makes handles.size() sequences. INVALID_ARGUMENT: arguments outside their ranges.
  // RESOURCE_EXHAUSTED: no index, or no pages to reserve.
  absl::Status Create(const CreateArgs& args, int64_t now_ms, absl::Span<SeqHandle> handles);
  // Makes handles.size() children that share all pages of the parent and know its digests. The
  // engine then fills their device block tables from Table. Errors as Create.
  absl::Status Fork(SeqIndex parent, const ForkArgs& args, int64_t now_ms,
                    absl::Span<SeqHandle> handles);
  // Drops the tokens from pos on, in every layer, and the digests that reach past pos; a pos at or
  // beyond every length changes nothing. FAILED_PRECONDITION: pos is reclaimed already, and the
  // message names the lowest position possible. RESOURCE_EXHAUSTED: the tokens dropped lie on pages
  // shared with others, and no pages are left to promise for writing them again.
  absl::Status Truncate(SeqIndex seq, int64_t pos);
  // Ends the sequence: its handle is NOT_FOUND from now on. Its pages and its index come back now,
  // or when the last hold ends.
  void Free(SeqIndex seq);

  // What each tenant may have from now on, as many as at Make. Who has more keeps it, and gets no
  // more before it is within its bounds.
  void SetTenants(const std::vector<TenantLimits>& tenants);

  // The tenant's sequence of that handle, or NOT_FOUND.
  absl::StatusOr<SeqIndex> Find(const SeqHandle& handle, TenantId tenant) const;
  SeqHandle Handle(SeqIndex seq) const;

  // The lease starts anew with the sequence's own ttl, or with another (INVALID_ARGUMENT: out of
  // range).
  void Renew(SeqIndex seq, int64_t now_ms);
  absl::Status SetTtl(SeqIndex seq, int64_t ttl_ms, int64_t now_ms);
  // A sequence with work queued or in flight is held: it does not expire, and its pages stay.
  void Hold(SeqIndex seq);
  void Unhold(SeqIndex seq);
  // Frees sequences that are not held and whose lease ended by now_ms, handles.size() at most, and
  // returns how many; their former handles are in handles. Takes at most that many steps of the
  // lease queue, so it may return few while more are due: call it again in the next round.
  int32_t Expire(int64_t now_ms, absl::Span<SeqHandle> handles);

  // What an append needs and what it is answered (append_plan.h). A plan of kCommit is open: queue
  // its work, then Commit; or Abandon it before any of its work is queued, which leaves everything
  // as it was. With skip_to, edits may name pages that the sequence itself gives up: no query of
  // the same launch may read them. Errors beside JudgeAppend's:
  //   NOT_FOUND            the sequence has been freed and is only held
  //   INVALID_ARGUMENT     no such layer, beyond seq_len_max, skip_to on a layer without a window
  //   FAILED_PRECONDITION  more than window + slack ahead of the slowest layer of the group, which
  //                        the message names
  //   RESOURCE_EXHAUSTED   no page left, and none reserved for this
  absl::StatusOr<AppendPlan> PlanAppend(SeqIndex seq, const AppendArgs& args);
  void Commit(const AppendPlan& plan);
  void Abandon(const AppendPlan& plan);

  // OK if queries at [pos, pos + q_len) find every key that they see. OUT_OF_RANGE: beyond the
  // committed length, which the message names. FAILED_PRECONDITION: keys are reclaimed, and the
  // message names the lowest position possible. INVALID_ARGUMENT: no such layer, q_len < 1, pos <
  // 0.
  absl::Status CheckVisible(SeqIndex seq, int32_t layer, int64_t pos, int32_t q_len) const;
  // The same for queries at the tokens of the open plan, were it committed: after skip_to or
  // Truncate the keys before them may be gone.
  absl::Status CheckPlanVisible(const AppendPlan& plan) const;

  int32_t Model(SeqIndex seq) const;
  int64_t SeqLen(SeqIndex seq, int32_t layer) const;
  // Pages by page number. Table(seq, group).first_page() is the lowest one held.
  const BlockTable& Table(SeqIndex seq, int32_t group) const;
  SeqStat Stat(SeqIndex seq, int64_t now_ms) const;
  // Handles of a tenant's sequences of a model from index *cursor on (begin with 0), handles.size()
  // at most, and a bounded part of the store in one call. Moves *cursor; it is seqs_max when all
  // were seen.
  int32_t List(int32_t model, TenantId tenant, uint32_t* cursor,
               absl::Span<SeqHandle> handles) const;

  const StoreOptions& options() const { return options_; }
  PoolStat Pool(int32_t model, int32_t group) const;
  // The same of a tenant: pages_total is what it may have.
  PoolStat Pool(int32_t model, int32_t group, TenantId tenant) const;
  int32_t seqs_used() const { return seqs_used_; }  // those that are freed and held included
  int32_t seqs_used(TenantId tenant) const { return tenant_seqs_[static_cast<size_t>(tenant)]; }
  int32_t seqs_of_model(int32_t model) const { return model_seqs_[static_cast<size_t>(model)]; }

  // For audit.h. Occupied: the index has tables, its sequence may be freed and held.
  bool Occupied(SeqIndex seq) const;
  TenantId Tenant(SeqIndex seq) const;
  const PagePool& PagesOf(int32_t model, int32_t group) const;
  const AppendPlan* open_plan() const { return plan_open_ ? &plan_ : nullptr; }
  absl::Span<const PlannedEdit> pages_planned() const;  // what the open plan took from its pool

 private:
  class Restorer;
  struct Place {
    int32_t group = 0;
    int32_t group_layer = 0;
  };
  struct ModelPools {
    std::vector<Place> places;              // by model layer
    std::vector<BlockTable::Shape> shapes;  // by group
    std::vector<std::unique_ptr<PagePool>> pools;
    std::vector<std::vector<TenantPages>> tenants;  // [groups][tenants]
  };
  // A sequence in one layer group.
  struct SeqGroup {
    BlockTable table;
    std::vector<int64_t> seq_lens;      // by group_layer
    std::vector<ReplayWindow> replays;  // by group_layer
    int64_t first_pos = 0;              // positions before it are reclaimed
    int64_t seq_len_min = 0;            // least of seq_lens,
    int32_t slowest_layers = 0;         // which so many layers have

    void FindSlowest();                                   // both anew, from seq_lens
    void SetSeqLen(size_t group_layer, int64_t seq_len);  // not shorter than it is
  };
  struct Seq {
    int32_t model = -1;  // whose tables groups holds; -1 before the first use
    TenantId tenant{0};
    uint32_t generation = 0;  // of the sequence here, or of the last one
    bool occupied = false;
    bool freed = false;         // occupied, but only by holds
    bool lease_parked = false;  // the lease ended while held, and is not queued
    int32_t holds = 0;
    int64_t expected_tokens = 0;
    int64_t ttl_ms = 0;
    int64_t lease_end_ms = 0;
    SeqHandle parent;
    std::vector<SeqGroup> groups;
  };

  explicit SeqStore(StoreOptions options);
  Seq& At(SeqIndex seq);
  const Seq& At(SeqIndex seq) const;
  absl::Status CheckNew(int64_t expected_tokens, int64_t ttl_ms, TenantId tenant,
                        size_t count) const;
  absl::Status CheckLayer(const Seq& seq, int32_t layer) const;
  absl::Status CheckWindow(const Seq& seq, Place place, int32_t layer, int64_t pos) const;
  absl::Status CheckRoom(int32_t model, int32_t group, TenantId tenant, int64_t pages_needed) const;
  Place PlaceOf(const Seq& seq, int32_t layer) const;
  const BlockTable::Shape& Shape(const Seq& seq, Place place) const;
  PagePool& MutablePool(int32_t model, int32_t group) const;
  SeqHandle TakeIndex(const CreateArgs& args, int64_t now_ms);
  void MakeGroups(Seq* seq, int32_t model) const;
  static StoreImage::Seq ImageOf(const Seq& seq, const std::vector<std::vector<uint32_t>>& numbers);
  void Release(SeqIndex seq);
  absl::Status CheckLive(const Seq& seq) const;
  absl::Status CheckSkip(Place place, const Seq& seq, const AppendArgs& args) const;
  absl::Status CheckRunAhead(Place place, const Seq& seq, const AppendArgs& args) const;
  absl::Status TakePages(const Seq& seq, int32_t group, const AppendArgs& args);
  void SetPages();  // of tenants, from options_
  Charge ChargeOf(const Seq& seq, size_t group);
  TenantPages& PagesOfTenant(int32_t model, int32_t group, TenantId tenant);
  const TenantPages& PagesOfTenant(int32_t model, int32_t group, TenantId tenant) const;

  StoreOptions options_;
  std::vector<ModelPools> models_;
  std::vector<Seq> seqs_;
  std::vector<uint32_t> free_;  // a ring of free indices: the longest free goes out first
  size_t free_head_ = 0;
  int32_t seqs_used_ = 0;
  LeaseQueue leases_;
  std::vector<int32_t> tenant_seqs_;  // of seqs_used_, each tenant's
  std::vector<int32_t> model_seqs_;   // and each model's

  // The open plan.
  AppendPlan plan_;
  bool plan_open_ = false;
  AppendArgs plan_args_;
  size_t pages_recycled_ = 0;  // the first so many edits are pages that skip_to sets free
  std::vector<PlannedCopy> copies_;
  std::vector<PlannedEdit> edits_;
  std::vector<PageId> page_ids_;
};

}  // namespace fp8kvd::cache
