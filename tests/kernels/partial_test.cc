#include "kernels/partial.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace fp8kvd::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// (o, denominator) of some keys by definition, o raw.
struct State {
  Denominator denominator;
  float o = 0.0F;
};

struct Key {
  float score;
  float value;
};

State Of(const std::vector<Key>& keys) {
  State state;
  for (const Key& key : keys) state.denominator.max = std::fmax(state.denominator.max, key.score);
  for (const Key& key : keys) {
    const float p = std::exp(key.score - state.denominator.max);
    state.denominator.sum += p;
    state.o += p * key.value;
  }
  return state;
}

State Merged(const State& a, const State& b) {
  const MergedDenominator merged = Merge(a.denominator, b.denominator);
  return {merged.both, merged.weight_a * a.o + merged.weight_b * b.o};
}

TEST(Partial, MergingTwoPartsGivesTheWhole) {
  const std::vector<Key> left = {{1.0F, 2.0F}, {-3.0F, 5.0F}};
  const std::vector<Key> right = {{4.0F, -1.0F}, {2.0F, 0.5F}, {-80.0F, 9.0F}};
  std::vector<Key> all = left;
  all.insert(all.end(), right.begin(), right.end());
  const State whole = Of(all);
  for (const State& merged : {Merged(Of(left), Of(right)), Merged(Of(right), Of(left))}) {
    EXPECT_NEAR(merged.o / merged.denominator.sum, whole.o / whole.denominator.sum, 1e-6);
    EXPECT_NEAR(Lse(merged.denominator), Lse(whole.denominator), 1e-6);
  }
}

TEST(Partial, AnEmptyPartChangesNothing) {
  const State some = Of({{700.0F, 2.0F}, {701.0F, 3.0F}});
  for (const State& merged : {Merged(some, State{}), Merged(State{}, some)}) {
    EXPECT_EQ(merged.o, some.o);
    EXPECT_EQ(merged.denominator.max, some.denominator.max);
    EXPECT_EQ(merged.denominator.sum, some.denominator.sum);
  }
}

TEST(Partial, TwoEmptyPartsAreEmptyAndNotNan) {
  const MergedDenominator merged = Merge(Denominator{}, Denominator{});
  EXPECT_TRUE(IsEmpty(merged.both));
  EXPECT_EQ(merged.weight_a, 0.0F);
  EXPECT_EQ(merged.weight_b, 0.0F);
  EXPECT_EQ(Lse(merged.both), -kInfinity);
}

TEST(Partial, NormalisedOutputsOfTwoDaemonsMergeByTheirLse) {
  const State a = Of({{1.0F, 2.0F}, {0.0F, 4.0F}});
  const State b = Of({{3.0F, -2.0F}});
  const State whole = Of({{1.0F, 2.0F}, {0.0F, 4.0F}, {3.0F, -2.0F}});
  const MergedDenominator merged = Merge(FromLse(Lse(a.denominator)), FromLse(Lse(b.denominator)));
  const float o =
      (merged.weight_a * a.o / a.denominator.sum + merged.weight_b * b.o / b.denominator.sum) /
      merged.both.sum;
  EXPECT_NEAR(o, whole.o / whole.denominator.sum, 1e-6);
  EXPECT_NEAR(Lse(merged.both), Lse(whole.denominator), 1e-6);
}

TEST(Partial, AnEmptyDaemonsLseMergesAsNothing) {
  const MergedDenominator merged = Merge(FromLse(-kInfinity), FromLse(2.5F));
  EXPECT_EQ(merged.weight_a, 0.0F);
  EXPECT_EQ(merged.weight_b, 1.0F);
  EXPECT_EQ(Lse(merged.both), 2.5F);
}

TEST(Partial, ASinkJoinsTheDenominatorAlone) {
  const State keys = Of({{1.0F, 2.0F}});
  const MergedDenominator merged = Merge(keys.denominator, FromLse(1.0F));
  EXPECT_EQ(merged.weight_a * keys.o / merged.both.sum, 1.0F);  // half of the weight is the sink's
  EXPECT_NEAR(Lse(merged.both), 1.0F + std::log(2.0F), 1e-6);
}

}  // namespace
}  // namespace fp8kvd::kernels
