// tests/data/append_verdicts.txt, one test per line, each against a whole store.
#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/store.h"

namespace fp8kvd::cache {
namespace {

constexpr uint64_t kDigest = 11;
constexpr uint64_t kOtherDigest = 12;
constexpr int32_t kDigestsKept = 4;

struct Line {
  std::string name;
  int64_t len = 0;
  AppendArgs args;
  std::string digest;
  std::string verdict;
  int64_t len_after = 0;
};

std::vector<Line> ReadLines() {
  std::ifstream file("tests/data/append_verdicts.txt");
  std::vector<Line> lines;
  std::string text;
  while (std::getline(file, text)) {
    if (text.empty() || text[0] == '#') continue;
    std::istringstream fields(text);
    Line line;
    fields >> line.name >> line.len >> line.args.pos >> line.args.n >> line.args.skip_to >>
        line.digest >> line.verdict >> line.len_after;
    line.args.digest = line.digest == "differs" ? kOtherDigest : kDigest;
    if (!fields) ADD_FAILURE() << "not a line of the table: " << text;
    lines.push_back(line);
  }
  return lines;
}

// Brings the layer to line.len so that what is kept of [pos, pos + n) is as the line says.
SeqHandle Prepare(Store& store, const Line& line) {
  const SeqHandle seq = store.Create();
  const bool kept = line.digest != "none";
  const int64_t pos = kept ? line.args.pos : 0;
  const int64_t end = kept ? std::min(pos + line.args.n, line.len) : 0;
  if (pos > 0) {
    EXPECT_TRUE(store.Append(seq, pos, 0, 1).ok());
  }
  if (end > pos) {
    EXPECT_TRUE(store.Append(seq, end - pos, 0, kDigest).ok());
  }
  const int64_t rest = line.len - end;
  if (line.digest == "forgotten") {
    for (int32_t i = 1; i < kDigestsKept; ++i) EXPECT_TRUE(store.Append(seq, 1, 0, 2).ok());
    EXPECT_TRUE(store.Append(seq, rest - kDigestsKept + 1, 0, 2).ok());
  } else if (rest > 0) {
    EXPECT_TRUE(store.Append(seq, rest, 0, 2).ok());
  }
  EXPECT_EQ(store.Len(seq), line.len);
  return seq;
}

std::string Name(const absl::StatusOr<AppendVerdict>& verdict) {
  if (!verdict.ok()) return absl::StatusCodeToString(verdict.status().code());
  return *verdict == AppendVerdict::kCommit ? "COMMIT" : "REPLAY";
}

class AppendVerdictTable : public testing::TestWithParam<Line> {};

TEST_P(AppendVerdictTable, IsWhatTheTableSays) {
  const Line& line = GetParam();
  Store store(PageTokens(4).Window(300).Digests(kDigestsKept));
  const SeqHandle seq = Prepare(store, line);
  EXPECT_EQ(Name(store.AppendAt(seq, line.args)), line.verdict);
  EXPECT_EQ(store.Len(seq), line.len_after);
}

INSTANTIATE_TEST_SUITE_P(Lines, AppendVerdictTable, testing::ValuesIn(ReadLines()),
                         [](const auto& test) { return test.param.name; });

TEST(AppendVerdict, OutOfRangeNamesTheLength) {
  Store store(PageTokens(4));
  const SeqHandle seq = store.Filled(6);
  const absl::Status status = store.AppendAt(seq, {.pos = 9, .n = 1}).status();
  EXPECT_NE(status.message().find("seq_len is 6"), absl::string_view::npos) << status;
}

TEST(AppendVerdict, ADuplicatePutStoresOnce) {
  Store store(PageTokens(4));
  const SeqHandle seq = store.Filled(6);
  const int64_t used = store.Pool().pages_used;
  EXPECT_EQ(Name(store.AppendAt(seq, {.pos = 0, .n = 6, .digest = 1})), "REPLAY");
  EXPECT_EQ(store.Pool().pages_used, used);
  EXPECT_EQ(store.Len(seq), 6);
}

TEST(AppendVerdict, APutWithOtherBytesNeverWins) {
  Store store(PageTokens(4));
  const SeqHandle seq = store.Filled(6);
  EXPECT_EQ(Name(store.AppendAt(seq, {.pos = 0, .n = 6, .digest = 2})), "ALREADY_EXISTS");
  EXPECT_TRUE(store.Holds(seq, 0, 6, /*digest=*/1));
}

TEST(AppendVerdict, ASequenceEndsAtItsLongestLength) {
  Store store(PageTokens(4).SeqLenMax(10));
  const SeqHandle seq = store.Filled(8);
  EXPECT_EQ(store.Append(seq, 3).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(store.Append(seq, 2).ok());
}

TEST(AppendVerdict, ALayerThatTheModelLacksIsInvalid) {
  Store store(PageTokens(4).Layers(2));
  const SeqHandle seq = store.Create();
  for (const int32_t layer : {-1, 2}) {
    EXPECT_EQ(store.AppendAt(seq, {.layer = layer, .pos = 0, .n = 1}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(AppendVerdict, ALayerWithoutWindowCannotSkip) {
  Store store(PageTokens(4));
  const SeqHandle seq = store.Create();
  EXPECT_EQ(store.AppendAt(seq, {.pos = 8, .n = 1, .skip_to = 8}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(AppendVerdict, TruncateForgetsAppendsThatReachPastItsPoint) {
  Store store(PageTokens(4));
  const SeqHandle seq = store.Filled(4);
  ASSERT_TRUE(store.Append(seq, 4).ok());
  ASSERT_TRUE(store.Truncate(seq, 6).ok());
  EXPECT_EQ(Name(store.AppendAt(seq, {.pos = 0, .n = 4, .digest = 1})), "REPLAY");
  EXPECT_EQ(Name(store.AppendAt(seq, {.pos = 4, .n = 2, .digest = 1})), "FAILED_PRECONDITION");
  EXPECT_EQ(Name(store.AppendAt(seq, {.pos = 4, .n = 4, .digest = 1})), "OUT_OF_RANGE");
}

TEST(AppendVerdict, LayersOfASequenceAreIndependent) {
  Store store(PageTokens(4).Layers(2));
  const SeqHandle seq = store.Filled(6);
  EXPECT_EQ(store.Len(seq, 1), 0);
  EXPECT_TRUE(store.Append(seq, 3, 1, 5).ok());
  EXPECT_TRUE(store.Holds(seq, 0, 6, 1, 0));
  EXPECT_TRUE(store.Holds(seq, 0, 3, 5, 1));
}

}  // namespace
}  // namespace fp8kvd::cache
