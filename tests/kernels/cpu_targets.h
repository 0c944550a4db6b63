// tests/kernels/cpu_targets.h: the instruction sets that kernels/cpu is compiled for, to run a test
// on each. One that this machine lacks shows as a skipped test.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/targets.h"

namespace fp8kvd::kernels::cpu {

inline bool HasTarget(int64_t target) { return (hwy::SupportedTargets() & target) != 0; }

inline std::vector<int64_t> CompiledTargets() {
  std::vector<int64_t> targets;
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1) targets.push_back(rest & -rest);
  return targets;
}

// Kernels use this target alone, for a scope.
class UseTarget {
 public:
  explicit UseTarget(int64_t target) { hwy::SetSupportedTargetsForTest(target); }
  ~UseTarget() { hwy::SetSupportedTargetsForTest(0); }
  UseTarget(const UseTarget&) = delete;
  UseTarget& operator=(const UseTarget&) = delete;
};

class OnEachTarget : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (!HasTarget(GetParam()))
      GTEST_SKIP() << "this machine lacks " << hwy::TargetName(GetParam());
    hwy::SetSupportedTargetsForTest(GetParam());
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

inline std::string TargetName(const testing::TestParamInfo<int64_t>& target) {
  return hwy::TargetName(target.param);
}

#define FP8KVD_ON_EACH_TARGET(fixture) \
  INSTANTIATE_TEST_SUITE_P(On, fixture, testing::ValuesIn(CompiledTargets()), TargetName)

}  // namespace fp8kvd::kernels::cpu
