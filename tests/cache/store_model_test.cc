// The store against a simple model of it, over a long random run. FP8KVD_SEED=n repeats run n.
#include <cstdlib>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/store_driver.h"

namespace fp8kvd::cache {
namespace {

constexpr int kOperations = 100000;

TEST(StoreModel, UsedPlusFreeIsTheTotalAfterEveryOneOf100000MixedOperations) {
  const char* given = std::getenv("FP8KVD_SEED");  // NOLINT(concurrency-mt-unsafe): one thread
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
  std::mt19937_64 random(seed);
  StoreDriver driver([&](uint32_t bound) { return static_cast<uint32_t>(random() % bound); });
  for (int i = 0; i < kOperations; ++i) {
    ASSERT_EQ(driver.Step(), "") << "operation " << i << "; repeat with FP8KVD_SEED=" << seed;
  }
  // The run is worth something only if it met every kind of answer often.
  for (const char* kind :
       {"append OK", "append RESOURCE_EXHAUSTED", "append OUT_OF_RANGE", "append ALREADY_EXISTS",
        "append FAILED_PRECONDITION", "append INVALID_ARGUMENT", "replay OK", "create OK",
        "create RESOURCE_EXHAUSTED", "fork OK", "fork RESOURCE_EXHAUSTED", "truncate OK",
        "truncate FAILED_PRECONDITION", "visible OK", "visible OUT_OF_RANGE",
        "visible FAILED_PRECONDITION", "find stale NOT_FOUND", "expired", "restart"}) {
    const auto answers = driver.answers().find(kind);
    EXPECT_GE(answers == driver.answers().end() ? 0 : answers->second, 100) << kind;
  }
  for (const auto& [kind, count] : driver.answers()) {
    RecordProperty(kind, std::to_string(count));
  }
}

}  // namespace
}  // namespace fp8kvd::cache
