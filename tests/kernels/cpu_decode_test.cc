// The CPU's decode against the contract: every case of cases.h, on every instruction set.
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/float_mode.h"
#include "tests/kernels/backend_device.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/cpu_ready.h"
#include "tests/kernels/cpu_targets.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::kernels::cpu {
namespace {

using cases::Answer;
using cases::BackendDevice;
using cases::Case;
using cases::Set;
using cases::Unseen;

bool IsPortable(int64_t target) { return target == HWY_SCALAR || target == HWY_EMU128; }

// All targets share the data and the right answers, which cost more than the kernels. Portable code
// walks the short set: it is the same source, and slow.
TEST(CpuDecode, EveryCaseHoldsOnEveryVectorTarget) {
  ReadyCpu cpu(2);
  BackendDevice device(cpu.backend, {});
  for (const Case& c : cases::Cases(cases::kSetOfThisBuild)) {
    const std::vector<cases::RowData> data = cases::MakeData(c);
    const reference::DecodeOutput right = cases::Right(c, data, cases::Broken::kNone);
    for (const int64_t target : CompiledTargets()) {
      if (IsPortable(target) || !HasTarget(target)) continue;
      const UseTarget use(target);
      EXPECT_EQ(cases::RunCase(device, c, data, right), "") << hwy::TargetName(target);
    }
  }
}

class CpuDecodeShort : public OnEachTarget {};

TEST_P(CpuDecodeShort, EveryShortCaseHolds) {
  ReadyCpu cpu(2);
  BackendDevice device(cpu.backend, {});
  for (const Case& c : cases::Cases(Set::kShort)) EXPECT_EQ(cases::RunCase(device, c), "");
}

FP8KVD_ON_EACH_TARGET(CpuDecodeShort);

// Long and short rows, windows, several queries: whatever could make a split depend on its
// neighbours.
Case RaggedCase() {
  Case c;
  c.name = "ragged";
  c.seed = 77;
  for (const int32_t length : {5000, 1, 64, 700, 2048, 3, 1111}) {
    cases::Row row;
    row.seq_len = length;
    row.q_len = length > 100 ? 2 : 1;
    row.pos = length - row.q_len;
    row.kv_heads = 2;
    row.window = length == 2048 ? 900 : 0;
    row.sinks = length == 64;
    c.rows.push_back(row);
  }
  return c;
}

Answer AnswerOf(int32_t threads, const Case& c, const std::vector<cases::RowData>& data) {
  ReadyCpu cpu(threads);
  BackendDevice device(cpu.backend, {});
  Answer answer;
  EXPECT_EQ(cases::Launch(device, c, data, Unseen::kTokens, &answer), "");
  return answer;
}

bool SameBits(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

TEST(CpuDecode, TheNumberOfThreadsChangesNoBit) {
  const Case c = RaggedCase();
  const std::vector<cases::RowData> data = cases::MakeData(c);
  const Answer one = AnswerOf(1, c, data);
  for (const int32_t threads : {2, 3, 7, 16}) {
    const Answer many = AnswerOf(threads, c, data);
    ASSERT_EQ(many.out.size(), one.out.size());
    EXPECT_TRUE(SameBits(many.out.data(), one.out.data(), one.out.size())) << threads;
    EXPECT_TRUE(SameBits(many.lse.data(), one.lse.data(), one.lse.size())) << threads;
  }
}

TEST(CpuDecode, ARowAloneGivesTheBitsThatItGivesAmongOthers) {
  const Case all = RaggedCase();
  const std::vector<cases::RowData> data = cases::MakeData(all);
  const Answer together = AnswerOf(3, all, data);
  size_t at = 0;
  for (size_t i = 0; i < all.rows.size(); ++i) {
    Case alone = all;
    alone.rows = {all.rows[i]};
    const Answer answer = AnswerOf(3, alone, {data[i]});
    EXPECT_TRUE(SameBits(answer.out.data(), &together.out[at], answer.out.size())) << "row " << i;
    at += answer.out.size();
  }
  EXPECT_EQ(at, together.out.size());
}

TEST(CpuDecode, TheThreadsOwnTreatmentOfSubnormalsIsRestored) {
  volatile float subnormal = 0x1p-130F;
  for (const Subnormals before : {Subnormals::kKeep, Subnormals::kFlush}) {
    const FloatMode mode(before);
    AnswerOf(1, RaggedCase(), cases::MakeData(RaggedCase()));
    EXPECT_EQ(subnormal * 1.0F != 0.0F, before == Subnormals::kKeep);
  }
}

}  // namespace
}  // namespace fp8kvd::kernels::cpu
