// Bulk appends: slices, turns between streams and decodes, replays.
#include <memory>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

#include "server/engine/append_step.h"
#include "tests/engine/rig.h"

namespace fp8kvd::testing {
namespace {

using Kind = FakeBackend::Record::Kind;

std::vector<uint64_t> Tokens(int64_t n, uint64_t first = 1000) {
  std::vector<uint64_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Appends and decodes in the order in which they were launched: -tokens of a slice, or rows.
std::vector<int32_t> Launches(const Rig& rig) {
  std::vector<int32_t> launches;
  for (const FakeBackend::Record& record : rig.backend.records()) {
    if (record.kind == Kind::kAppend) launches.push_back(-record.tokens);
    if (record.kind == Kind::kDecode) launches.push_back(record.count);
  }
  return launches;
}

RigOptions OneAtATime() {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  options.models = {ModelSpec{.windows = {0}}};
  return options;
}

TEST(Append, GoesInSlicesOfTheConfiguredBytes) {
  Rig rig(OneAtATime());
  const cache::SeqHandle seq = rig.Create();
  rig.backend.ForgetRecords();
  rig.Fill(seq, 0, 40);
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{-16, -16, -8}));
}

TEST(Append, OneSliceTakesTheSmallPiecesOfSeveralLayers) {
  RigOptions options;
  options.models = {ModelSpec{.windows = {0, 0, 0}}};
  Rig rig(options);
  const cache::SeqHandle seq = rig.Create();
  rig.backend.ForgetRecords();
  rig.Fill(seq, 0, 4);
  const std::vector<FakeBackend::Record> appends = rig.backend.RecordsOf(Kind::kAppend);
  ASSERT_EQ(appends.size(), 1u);
  EXPECT_EQ(appends[0].count, 3);
}

TEST(Append, LayersOfDifferentPrecisionDoNotShareALaunch) {
  RigOptions options;
  ModelSpec spec{.windows = {0, 128}};
  options.models = {spec};
  std::vector<engine::ModelSetup> models = {MakeModel(spec)};
  models[0].geometry.groups[1].precision = Precision::kFp8Kv;
  FakeBackend backend;
  ManualClock clock;
  auto engine =
      *engine::Engine::Start(options.engine, options.cache, std::move(models), 1, &backend, &clock);
  ControlCall create(engine.get(), engine::ControlRequest::Op::kCreate);
  create.request.model = 0;
  ASSERT_TRUE(create.Submit().ok());
  engine->Step();
  AppendCall call(engine.get(), 0, 0, 2, create.request.handles[0], 0, Tokens(4));
  ASSERT_TRUE(call.Submit().ok());
  while (engine->Step()) {
  }
  ASSERT_TRUE(call.done());
  std::vector<Precision> launched;
  for (const FakeBackend::Record& record : backend.RecordsOf(Kind::kAppend)) {
    launched.push_back(record.precision);
  }
  EXPECT_EQ(launched, (std::vector<Precision>{Precision::kBf16, Precision::kFp8Kv}));
}

TEST(Append, WaitingDecodesGoBeforeTheNextSlice) {
  Rig rig(OneAtATime());
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[1], 0, 1);
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  AppendCall upload(rig.engine, 0, 0, 1, seqs[0], 0, Tokens(48));
  rig.Run(upload);  // its first slice is in flight
  DecodeCall first(rig.engine, 0, 0, {Ask(seqs[1], 0, 1)});
  rig.Run(first);
  rig.backend.ReleaseOneFence();
  rig.Settle();
  DecodeCall second(rig.engine, 0, 0, {Ask(seqs[1], 0, 2)});
  rig.Run(second);
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{-16, 1, 1, -16, -16}));
}

TEST(Append, ASteadyStreamOfDecodesDoesNotStarveASlice) {
  RigOptions options = OneAtATime();
  options.engine.launches_inflight_max = 2;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[1], 0, 1);
  AppendCall upload(rig.engine, 0, 0, 1, seqs[0], 0, Tokens(48));
  ASSERT_TRUE(upload.Submit().ok());
  int32_t turns = 0;
  for (; !upload.done() && turns < 100; ++turns) {
    DecodeCall ask(rig.engine, 0, 0, {Ask(seqs[1], 0, 7)});
    ASSERT_TRUE(ask.Submit().ok());
    rig.engine->Step();
    EXPECT_TRUE(ask.done());
  }
  EXPECT_EQ(turns, 3);  // a slice a turn
}

TEST(Append, StreamsTakeTurnsWhateverTheyHaveQueued) {
  Rig rig(OneAtATime());
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  AppendCall greedy0(rig.engine, 0, 0, 1, seqs[0], 0, Tokens(32));
  AppendCall greedy1(rig.engine, 0, 0, 1, seqs[0], 32, Tokens(32));
  AppendCall modest(rig.engine, 0, 0, 1, seqs[1], 0, Tokens(20));
  for (AppendCall* call : {&greedy0, &greedy1, &modest}) ASSERT_TRUE(call->Submit().ok());
  rig.backend.Release();
  rig.Settle();
  std::vector<int32_t> positions;
  for (const FakeBackend::Record& record : rig.backend.RecordsOf(Kind::kAppend)) {
    positions.push_back(record.tokens == 4 ? -16 : record.positions[0]);
  }
  EXPECT_EQ(positions, (std::vector<int32_t>{0, 0, 16, -16, 32, 48}));  // -16: modest's second
}

TEST(Append, ReportsWhatIsCommittedWhenAPieceFails) {
  RigOptions options = OneAtATime();
  options.models[0].pages = 3;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[0], 0, 1);  // two pages are left
  AppendCall call(rig.engine, 0, 0, 1, seqs[1], 0, Tokens(200));
  rig.Run(call);
  EXPECT_TRUE(absl::IsResourceExhausted(call.request.status)) << call.request.status;
  EXPECT_GT(call.request.retry_after_ms, 0);
  EXPECT_EQ(call.seq_lens[0], 128);
}

TEST(Append, TheSameChunkAgainIsAReplay) {
  Rig rig(OneAtATime());
  const cache::SeqHandle seq = rig.Create();
  AppendCall call(rig.engine, 0, 0, 1, seq, 0, Tokens(40));
  AppendCall again(rig.engine, 0, 0, 1, seq, 0, Tokens(40));
  AppendCall other(rig.engine, 0, 0, 1, seq, 0, Tokens(40, 7000));
  rig.Run(call);
  rig.backend.ForgetRecords();
  rig.Run(again);
  EXPECT_TRUE(again.request.status.ok()) << again.request.status;
  EXPECT_EQ(again.seq_lens[0], 40);
  EXPECT_TRUE(Launches(rig).empty());
  rig.Run(other);
  EXPECT_TRUE(absl::IsAlreadyExists(other.request.status)) << other.request.status;
}

TEST(Append, ADecodeOfTheSameLayerWaitsForTheWholeChunk) {
  Rig rig(OneAtATime());
  const cache::SeqHandle seq = rig.Create();
  std::vector<uint64_t> history = Tokens(40);
  AppendCall upload(rig.engine, 0, 0, 1, seq, 0, history);
  DecodeCall step(rig.engine, 0, 0, {Step(seq, 40, 9)});
  ASSERT_TRUE(upload.Submit().ok());
  rig.Run(step);
  history.push_back(9);
  ASSERT_TRUE(step.items[0].status.ok()) << step.items[0].status;
  EXPECT_EQ(step.Check(0, history), "");
}

TEST(Append, IsAnsweredOnlyWhenTheDeviceHasReadItsSlot) {
  Rig rig(OneAtATime());
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  AppendCall call(rig.engine, 0, 0, 1, seq, 0, Tokens(4));
  rig.Run(call);
  EXPECT_FALSE(call.done());
  rig.backend.ReleaseOneFence();
  rig.Settle();
  EXPECT_TRUE(call.done());
}

TEST(Append, ACancelEndsItBeforeTheNextSliceAndKeepsWhatIsCommitted) {
  Rig rig(OneAtATime());
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  AppendCall call(rig.engine, 0, 0, 1, seq, 0, Tokens(48));
  rig.Run(call);
  call.request.cancelled = true;
  rig.backend.Release();
  rig.Settle();
  EXPECT_TRUE(absl::IsCancelled(call.request.status)) << call.request.status;
  EXPECT_EQ(call.seq_lens[0], 16);
}

// A device whose rows of 100 bytes and more set out, and arrive when the test says so.
RigOptions ThreeInFlight() {
  RigOptions options = OneAtATime();
  options.engine.launches_inflight_max = 3;
  return options;
}
RigOptions ThreeInFlightOfCallersInTurns() {
  RigOptions options = ThreeInFlight();
  options.returns_at_once = true;
  return options;
}
void HoldBrings(Rig& rig) {
  rig.backend.SetBringBytesMin(100);
  rig.backend.HoldBrings();
}

// An upload of so many tokens whose first rows are on their way.
struct OnItsWay {
  explicit OnItsWay(int32_t tokens) : upload(rig.engine, 0, 0, 1, seq, 0, Tokens(tokens)) {
    HoldBrings(rig);
    rig.Run(upload);
  }
  // The upload ends before it goes, and the rig after it.
  ~OnItsWay() {
    rig.backend.Release();
    rig.Settle();
  }

  Rig rig{ThreeInFlight()};
  cache::SeqHandle seq = rig.Create();
  AppendCall upload;
};

TEST(AppendComes, ADecodeGoesBeforeSlicesWhoseRowsAreOnTheirWay) {
  Rig rig(ThreeInFlight());
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[1], 0, 1);
  rig.backend.ForgetRecords();
  HoldBrings(rig);
  AppendCall upload(rig.engine, 0, 0, 1, seqs[0], 0, Tokens(48));
  rig.Run(upload);
  EXPECT_EQ(rig.backend.on_their_way(), 3u);
  DecodeCall ask(rig.engine, 0, 0, {Ask(seqs[1], 0, 1)});
  rig.Run(ask);
  EXPECT_TRUE(ask.done());
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{1}));
  rig.backend.LetOneArrive();
  rig.Settle();
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{1, -16}));
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{1, -16, -16, -16}));
  EXPECT_TRUE(upload.request.status.ok()) << upload.request.status;
  EXPECT_EQ(upload.seq_lens[0], 48);
}

TEST(AppendComes, AFewSlicesAreOnTheirWayAndTheRestFollows) {
  OnItsWay it(160);
  auto& [rig, seq, upload] = it;
  EXPECT_EQ(rig.backend.on_their_way(), 3u);
  rig.backend.LetOneArrive();
  rig.Settle();
  EXPECT_EQ(rig.backend.on_their_way(), 3u);
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(upload.seq_lens[0], 160);
}

TEST(AppendComes, ASliceIsNotInTheWayOfTheDecodeThatFollowsAnAnswer) {
  Rig rig(ThreeInFlightOfCallersInTurns());
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[1], 0, 1);
  rig.backend.ForgetRecords();
  HoldBrings(rig);
  DecodeCall first(rig.engine, 0, 0, {Ask(seqs[1], 0, 1)});
  rig.Run(first);
  AppendCall upload(rig.engine, 0, 0, 1, seqs[0], 0, Tokens(48));
  rig.Run(upload);
  EXPECT_EQ(rig.backend.on_their_way(), 0u);
  rig.backend.Hold();
  DecodeCall next(rig.engine, 0, 0, {Ask(seqs[1], 0, 2)});
  rig.Run(next);
  EXPECT_EQ(rig.backend.on_their_way(), 3u);  // it is under way
  rig.backend.ReleaseOneFence();
  rig.Settle();
  EXPECT_TRUE(next.done());
  rig.backend.LetOneArrive();
  rig.Settle();
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{1, 1}));
  rig.clock.AdvanceUs(24);
  rig.Settle();
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{1, 1}));
  rig.clock.AdvanceUs(1);  // no decode came
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{1, 1, -16, -16, -16}));
  EXPECT_EQ(upload.seq_lens[0], 48);
}

TEST(AppendComes, ASliceGoesAtOnceAfterALongDecode) {
  Rig rig(ThreeInFlightOfCallersInTurns());
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[1], 0, 1);
  for (const bool is_long : {false, true}) {
    rig.backend.ForgetRecords();
    rig.backend.Hold();
    DecodeCall decode(rig.engine, 0, 0, {Ask(seqs[1], 0, is_long ? 2 : 1)});
    rig.Run(decode);
    rig.clock.AdvanceUs(is_long ? 51 : 50);
    rig.backend.ReleaseOneFence();
    rig.Settle();
    EXPECT_TRUE(decode.done());
    AppendCall upload(rig.engine, 0, 0, 1, seqs[0], is_long ? 16 : 0, Tokens(16));
    rig.Run(upload);
    EXPECT_EQ(Launches(rig).size(), is_long ? 2u : 1u);
    rig.clock.AdvanceUs(25);
    rig.backend.Release();
    rig.Settle();
    EXPECT_EQ(Launches(rig), (std::vector<int32_t>{1, -16})) << is_long;
  }
}

// More decodes wait than the launches in flight take.
TEST(AppendComes, ACrowdOfDecodesLeavesASliceAPlace) {
  for (const bool comes : {false, true}) {
    RigOptions options = ThreeInFlight();
    options.engine.batch_rows_max = 2;
    options.engine.staging_bytes = int64_t{16} << 20;
    Rig rig(options);
    const std::vector<cache::SeqHandle> seqs = rig.Create(10);
    for (const cache::SeqHandle& seq : seqs) rig.Fill(seq, 0, 1);
    if (comes) HoldBrings(rig);
    rig.backend.Hold();
    AppendCall upload(rig.engine, 0, 0, 1, seqs[9], 1, Tokens(48));
    ASSERT_TRUE(upload.Submit().ok());
    std::vector<std::unique_ptr<DecodeCall>> crowd(9);
    for (int32_t launches = 0; !upload.done() && launches < 100; ++launches) {
      for (size_t i = 0; i < crowd.size(); ++i) {
        if (crowd[i] != nullptr && !crowd[i]->done()) continue;
        crowd[i] = nullptr;  // its slot is free for the next
        crowd[i] = std::make_unique<DecodeCall>(rig.engine, 0, 0, std::vector{Ask(seqs[i], 0, 7)});
        ASSERT_TRUE(crowd[i]->Submit().ok());
      }
      rig.Settle();
      rig.backend.LetOneArrive();
      rig.backend.ReleaseOneFence();
    }
    EXPECT_TRUE(upload.done()) << comes;
    rig.backend.Release();
    rig.Settle();
  }
}

TEST(AppendComes, AShortLastSliceKeepsItsPlace) {
  OnItsWay it(20);  // the last four have 64 bytes
  auto& [rig, seq, upload] = it;
  EXPECT_EQ(Launches(rig), std::vector<int32_t>{});
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(Launches(rig), (std::vector<int32_t>{-16, -4}));
  DecodeCall step(rig.engine, 0, 0, {Step(seq, 20, 9)});
  rig.Run(step);
  std::vector<uint64_t> history = Tokens(20);
  history.push_back(9);
  EXPECT_EQ(step.Check(0, history), "");
}

TEST(AppendComes, UploadsTakeTurnsInSettingOut) {
  Rig rig(ThreeInFlight());
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.backend.ForgetRecords();
  HoldBrings(rig);
  AppendCall greedy(rig.engine, 0, 0, 1, seqs[0], 0, Tokens(64));
  AppendCall modest(rig.engine, 0, 0, 1, seqs[1], 0, Tokens(16));
  for (AppendCall* call : {&greedy, &modest}) ASSERT_TRUE(call->Submit().ok());
  rig.Settle();
  rig.backend.Release();
  rig.Settle();
  std::vector<int32_t> positions;
  for (const FakeBackend::Record& record : rig.backend.RecordsOf(Kind::kAppend)) {
    positions.push_back(record.positions[0]);
  }
  EXPECT_EQ(positions, (std::vector<int32_t>{0, 0, 16, 32, 48}));  // the second 0 is modest's
}

TEST(AppendComes, ACancelWaitsForWhatReadsItsSlot) {
  OnItsWay it(48);
  auto& [rig, seq, upload] = it;
  upload.request.cancelled = true;
  rig.Settle();
  EXPECT_FALSE(upload.done());
  for (int32_t i = 0; i < 3; ++i) rig.backend.LetOneArrive();
  rig.Settle();
  EXPECT_TRUE(upload.done());
  EXPECT_TRUE(absl::IsCancelled(upload.request.status)) << upload.request.status;
  EXPECT_EQ(upload.seq_lens[0], 0);
}

void ExpectACancelAppendsNothing(void (FakeBackend::*rows_come)()) {
  OnItsWay it(48);
  auto& [rig, seq, upload] = it;
  rig.backend.ForgetRecords();
  upload.request.cancelled = true;
  (rig.backend.*rows_come)();
  rig.Settle();
  EXPECT_TRUE(upload.done());
  EXPECT_TRUE(absl::IsCancelled(upload.request.status)) << upload.request.status;
  EXPECT_EQ(Launches(rig), std::vector<int32_t>{});
}

TEST(AppendComes, ACancelFindsRowsThatHaveJustComeAndAppendsNothing) {
  ExpectACancelAppendsNothing(&FakeBackend::Release);
}

TEST(AppendComes, ACancelAppendsNothingOfWhatComesBetweenTwoLooks) {
  ExpectACancelAppendsNothing(&FakeBackend::LetArriveOnceAsked);
}

TEST(AppendComes, APieceThatFailsEndsTheSlicesBehindIt) {
  RigOptions options = ThreeInFlight();
  options.models[0].pages = 2;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[0], 0, 1);  // one page is left
  HoldBrings(rig);
  AppendCall upload(rig.engine, 0, 0, 1, seqs[1], 0, Tokens(200));
  rig.Run(upload);
  rig.backend.Release();
  rig.Settle();
  EXPECT_TRUE(absl::IsResourceExhausted(upload.request.status)) << upload.request.status;
  EXPECT_EQ(upload.seq_lens[0], 64);
}

TEST(AppendComes, ADeviceFaultEndsWhatIsOnItsWay) {
  OnItsWay it(48);
  auto& [rig, seq, upload] = it;
  rig.backend.FailCall(0);
  rig.Settle();
  EXPECT_TRUE(upload.done());
  EXPECT_TRUE(absl::IsUnavailable(upload.request.status)) << upload.request.status;
}

TEST(Append, SkipToLeavesOutWhatNoQuerySees) {
  RigOptions options;
  options.models = {ModelSpec{.windows = {32}, .pages = 4}};
  Rig rig(options);
  const cache::SeqHandle seq = rig.Create();
  AppendCall call(rig.engine, 0, 0, 1, seq, 900, Tokens(40), /*skip_to=*/900);
  rig.Run(call);
  ASSERT_TRUE(call.request.status.ok()) << call.request.status;
  EXPECT_EQ(call.seq_lens[0], 940);
  DecodeCall too_low(rig.engine, 0, 0, {Ask(seq, 930, 1)});  // sees 899
  DecodeCall lowest(rig.engine, 0, 0, {Ask(seq, 931, 1)});
  rig.Run(too_low);
  rig.Run(lowest);
  EXPECT_TRUE(absl::IsFailedPrecondition(too_low.items[0].status)) << too_low.items[0].status;
  EXPECT_TRUE(lowest.items[0].status.ok()) << lowest.items[0].status;
}

TEST(Append, NoTokensAreRefused) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  AppendCall call(rig.engine, 0, 0, 1, seq, 0, Tokens(1));
  call.request.n = 0;
  rig.Run(call);
  EXPECT_TRUE(absl::IsInvalidArgument(call.request.status)) << call.request.status;
}

TEST(AppendSliceTokens, FollowsBytesAndStaysInsideTheWindow) {
  config::EngineOptions options;
  config::CacheOptions cache;
  const ModelGeometry plain =
      MakeModel(ModelSpec{.windows = {0, 0}, .kv_heads = 8, .group = 8, .head_dim = 128}).geometry;
  EXPECT_EQ(engine::AppendSliceTokens(options, cache, plain, 0, 2), 256);  // 1 MiB / 4 KiB
  cache.reclaim_slack_tokens = 8;
  const ModelGeometry windowed =
      MakeModel(ModelSpec{.windows = {0, 64}, .kv_heads = 8, .group = 8, .head_dim = 128}).geometry;
  EXPECT_EQ(engine::AppendSliceTokens(options, cache, windowed, 0, 2), 72);
  options.append_slice_bytes_max = 1;
  EXPECT_EQ(engine::AppendSliceTokens(options, cache, plain, 0, 1), 1);
}

}  // namespace
}  // namespace fp8kvd::testing
