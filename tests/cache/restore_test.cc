// A store made of another one's image: what is as before, and images that are refused. Random
// histories with restarts in them: store_model_test.cc.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/store.h"

namespace fp8kvd::cache {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

constexpr int64_t kLater = 50'000;

std::unique_ptr<SeqStore> Restored(const StoreOptions& options, const StoreImage& image) {
  absl::StatusOr<std::unique_ptr<SeqStore>> store = SeqStore::Restore(options, image, kLater);
  EXPECT_TRUE(store.ok()) << store.status();
  EXPECT_TRUE(Audit(**store).ok()) << Audit(**store);
  return *std::move(store);
}

TEST(Restore, HandlesStayAndThoseOfFreedSequencesStayUnknown) {
  const StoreShape shape = PageTokens(4);
  Store store(shape);
  const SeqHandle freed = store.Filled(6);
  const SeqHandle kept = store.Filled(6);
  store.Free(freed);
  StoreOptions options = shape.options();
  options.incarnation = 1234;  // of the next run; the image brings its own
  const auto again = Restored(options, store->Image());
  const absl::StatusOr<SeqIndex> seq = again->Find(kept, TenantId{0});
  ASSERT_TRUE(seq.ok()) << seq.status();
  EXPECT_EQ(again->SeqLen(*seq, 0), 6);
  EXPECT_EQ(again->Handle(*seq), kept);
  // A new one takes the freed one's index, and is not it.
  std::vector<SeqHandle> more(15);
  ASSERT_TRUE(again->Create({}, kLater, absl::MakeSpan(more)).ok());
  EXPECT_FALSE(again->Find(freed, TenantId{0}).ok());
}

TEST(Restore, RetriesAreStillToldFromOtherBytes) {
  const StoreShape shape = PageTokens(4).Digests(2);
  Store store(shape);
  const SeqHandle handle = store.Create();
  for (uint64_t digest = 1; digest <= 3; ++digest) {
    ASSERT_TRUE(store.Append(handle, 2, 0, digest).ok());
  }
  const auto again = Restored(shape.options(), store->Image());
  const SeqIndex seq = *again->Find(handle, TenantId{0});
  EXPECT_EQ(again->PlanAppend(seq, {.pos = 4, .n = 2, .digest = 3})->verdict,
            AppendVerdict::kReplay);
  EXPECT_EQ(again->PlanAppend(seq, {.pos = 2, .n = 2, .digest = 9}).status().code(),
            StatusCode::kAlreadyExists);
  EXPECT_EQ(again->PlanAppend(seq, {.pos = 0, .n = 2, .digest = 1}).status().code(),
            StatusCode::kFailedPrecondition);
}

TEST(Restore, ForksStayShared) {
  const StoreShape shape = PageTokens(4);
  Store store(shape);
  const SeqHandle parent = store.Filled(6);
  const SeqHandle child = store.Fork(parent);
  const StoreImage image = store->Image();
  EXPECT_EQ(image.pages[0][0].size(), 2U);
  const auto again = Restored(shape.options(), image);
  EXPECT_EQ(again->Pool(0, 0).pages_used, 2);
  const SeqIndex seq = *again->Find(child, TenantId{0});
  EXPECT_EQ(again->Stat(seq, kLater).pages_shared, 2);
  EXPECT_EQ(again->Stat(seq, kLater).parent, parent);
  EXPECT_EQ(again->PlanAppend(seq, {.pos = 6, .n = 1})->copies.size(), 1U);
}

TEST(Restore, LeasesStartAnew) {
  const StoreShape shape = PageTokens(4);
  Store store(shape);
  const SeqHandle handle = *store.TryCreate({.ttl_ms = 500});
  const auto again = Restored(shape.options(), store->Image());
  SeqHandle expired;
  EXPECT_EQ(again->Expire(kLater + 499, absl::MakeSpan(&expired, 1)), 0);
  EXPECT_EQ(again->Expire(kLater + 500, absl::MakeSpan(&expired, 1)), 1);
  EXPECT_EQ(expired, handle);
}

TEST(Restore, ReservationsAndTenantsQuotasHold) {
  const StoreShape shape = PageTokens(4).Pages(10).Tenants(
      {{.seqs_max = 2, .pages_share_max = 0.5}, {.seqs_max = 9, .pages_share_max = 0.5}});
  Store store(shape);
  const SeqHandle handle = store.Filled(6, /*expected_tokens=*/20);  // all of its tenant's pages
  const auto again = Restored(shape.options(), store->Image());
  const SeqIndex seq = *again->Find(handle, TenantId{0});
  EXPECT_FALSE(again->Find(handle, TenantId{1}).ok());
  EXPECT_EQ(again->Pool(0, 0, TenantId{0}).pages_used, 2);
  EXPECT_EQ(again->Pool(0, 0, TenantId{0}).pages_reserved, 3);
  SeqHandle other;
  EXPECT_EQ(again->Create({.expected_tokens = 1}, kLater, absl::MakeSpan(&other, 1)).code(),
            StatusCode::kResourceExhausted);
  ASSERT_TRUE(again->Create({}, kLater, absl::MakeSpan(&other, 1)).ok());
  EXPECT_EQ(again->Create({}, kLater, absl::MakeSpan(&other, 1)).code(),
            StatusCode::kResourceExhausted);
  const absl::StatusOr<AppendPlan> plan = again->PlanAppend(seq, {.pos = 6, .n = 14});
  ASSERT_TRUE(plan.ok()) << plan.status();
  again->Commit(*plan);
  EXPECT_TRUE(Audit(*again).ok()) << Audit(*again);
}

TEST(Restore, TakesMoreRoomThanItHadAndRefusesLess) {
  Store store(PageTokens(4).Pages(8).Seqs(4));
  store.Filled(6, /*expected_tokens=*/16);
  store.Filled(4);
  const StoreImage image = store->Image();
  EXPECT_EQ(Restored(PageTokens(4).Pages(100).Seqs(9).options(), image)->seqs_used(), 2);
  const auto code = [&](const StoreShape& shape) {
    return SeqStore::Restore(shape.options(), image, kLater).status().code();
  };
  EXPECT_EQ(code(PageTokens(4).Pages(2)), StatusCode::kResourceExhausted);
  EXPECT_EQ(code(PageTokens(4).Pages(4)), StatusCode::kFailedPrecondition) << "5 with the reserved";
  EXPECT_EQ(code(PageTokens(4).Pages(8).Seqs(1)), StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(PageTokens(4).AndModel()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(PageTokens(4).AndGroup()), StatusCode::kInvalidArgument);
}

// An image is what a file says, and files are strangers.
struct BadImage {
  const char* name;
  std::function<void(StoreImage& image)> spoil;
  const char* said;
};

class Refused : public ::testing::TestWithParam<BadImage> {};

TEST_P(Refused, AnImageThatContradictsItself) {
  const StoreShape shape = PageTokens(4).Layers(2).AndGroup().Window(4).Layers(2).Tenants({{}, {}});
  Store store(shape);
  const SeqHandle parent = store.Create();
  for (int32_t layer = 0; layer < 4; ++layer) ASSERT_TRUE(store.Append(parent, 4, layer).ok());
  for (int32_t layer = 0; layer < 4; ++layer) ASSERT_TRUE(store.Append(parent, 3, layer).ok());
  store.Fork(parent);
  StoreImage image = store->Image();
  ASSERT_TRUE(SeqStore::Restore(shape.options(), image, kLater).ok());
  GetParam().spoil(image);
  const absl::Status status = SeqStore::Restore(shape.options(), image, kLater).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().said));
}

INSTANTIATE_TEST_SUITE_P(
    Because, Refused,
    ::testing::Values(
        BadImage{"index_twice", [](StoreImage& i) { i.seqs[1].index = 0; }, "wrong place"},
        BadImage{"index_beyond", [](StoreImage& i) { i.seqs[1].index = 1U << 31; }, "wrong place"},
        BadImage{"no_generation", [](StoreImage& i) { i.generations[1] = 0; }, "wrong place"},
        BadImage{"model", [](StoreImage& i) { i.seqs[0].model = -1; }, "of model -1"},
        BadImage{"tenant", [](StoreImage& i) { i.seqs[0].tenant = TenantId{2}; }, "tenant 2"},
        BadImage{"expected", [](StoreImage& i) { i.seqs[0].expected_tokens = -1; }, "expects -1"},
        BadImage{"lease", [](StoreImage& i) { i.seqs[0].ttl_ms = 0; }, "a lease of 0"},
        BadImage{"groups", [](StoreImage& i) { i.seqs[0].groups.pop_back(); }, "1 layer groups"},
        BadImage{"layers", [](StoreImage& i) { i.seqs[0].groups[0].seq_lens.pop_back(); },
                 "1 lengths"},
        BadImage{"replays", [](StoreImage& i) { i.seqs[0].groups[0].replays.clear(); }, "lengths"},
        BadImage{"negative", [](StoreImage& i) { i.seqs[0].groups[0].seq_lens[0] = -1; },
                 "lengths from -1"},
        BadImage{"too_long", [](StoreImage& i) { i.seqs[0].groups[0].seq_lens[0] = 5000; },
                 "to 5000"},
        BadImage{"begins_late", [](StoreImage& i) { i.seqs[0].groups[0].first_pos = 4; },
                 "begin at 4"},
        BadImage{"window_begins_late", [](StoreImage& i) { i.seqs[0].groups[1].first_pos = 8; },
                 "begin at 8"},
        BadImage{"ran_ahead", [](StoreImage& i) { i.seqs[0].groups[1].seq_lens[0] = 12; },
                 "cannot be"},
        BadImage{"pages_missing", [](StoreImage& i) { i.seqs[0].groups[0].pages.pop_back(); },
                 "1 pages, its tokens need 2"},
        BadImage{"page_beyond", [](StoreImage& i) { i.seqs[0].groups[0].pages[0] = 2; },
                 "page 2 of 2"},
        BadImage{"page_twice", [](StoreImage& i) { i.seqs[0].groups[0].pages[0] = 1; },
                 "belongs to sequence 0, too"},
        BadImage{"page_of_another_tenant", [](StoreImage& i) { i.seqs[1].tenant = TenantId{1}; },
                 "belongs to sequence 0"},
        BadImage{"page_of_nobody", [](StoreImage& i) { i.pages[0][0].push_back(PageId{9}); },
                 "no sequence has"},
        BadImage{"replay_beyond",
                 [](StoreImage& i) { i.seqs[0].groups[0].replays[0].back().n = 4; },
                 "lies outside"},
        BadImage{"replay_empty", [](StoreImage& i) { i.seqs[0].groups[0].replays[0].back().n = 0; },
                 "lies outside"},
        BadImage{"replays_overlap",
                 [](StoreImage& i) { i.seqs[0].groups[0].replays[0].back().pos = 3; },
                 "lies outside"}),
    [](const auto& bad) { return std::string(bad.param.name); });

}  // namespace
}  // namespace fp8kvd::cache
