#include "server/ops/metrics.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fp8kvd::ops {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Metrics, CountsCallsByMethodAndCode) {
  Metrics metrics;
  MethodMetrics* const decode = metrics.Method("Decode");
  EXPECT_EQ(metrics.Method("Decode"), decode);
  decode->Observe(0, 3);
  decode->Observe(0, 5);
  decode->Observe(8, 2000000);
  metrics.Method("Append");  // never called: not shown
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_calls_total{method="Decode",code="OK"} 2)"));
  EXPECT_THAT(text, HasSubstr(R"(code="RESOURCE_EXHAUSTED"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_call_seconds_bucket{method="Decode",le="4e-06"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_call_seconds_bucket{method="Decode",le="8e-06"} 2)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_call_seconds_count{method="Decode"} 3)"));
  EXPECT_THAT(text, Not(HasSubstr("Append")));
}

TEST(Metrics, ACodeOutsideOfGrpcsIsUnknown) {
  Metrics metrics;
  metrics.Method("Decode")->Observe(99, 1);
  EXPECT_THAT(metrics.Scrape(), HasSubstr(R"(code="UNKNOWN"} 1)"));
}

TEST(Metrics, AScrapeIsOneCopyOfTheEngine) {
  Metrics metrics;
  int copies = 0;
  metrics.SetEngine(
      {.version = "1", .incarnation = "a", .device = "cpu", .models = {"m"}}, [&copies] {
        ++copies;
        engine::EngineStats stats;
        stats.seqs = 4;
        stats.staging_slots_used = 3;
        stats.staging_slots_total = 10;
        stats.pools.push_back(
            {.model = 0, .group = 0, .pages_total = 12, .pages_used = 5, .pages_free = 7});
        stats.models.emplace_back();
        stats.models[0].kv_bytes_read_total = 99;
        stats.batch_rows.Observe(8);
        return stats;
      });
  const std::string text = metrics.Scrape();
  EXPECT_EQ(copies, 1);
  EXPECT_THAT(text, HasSubstr("fp8kvd_seqs 4\n"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_pages{model="m",group="0",state="used"} 5)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_pages{model="m",group="0",state="free"} 7)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_staging_slots{state="free"} 7)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_kv_read_bytes_total{model="m"} 99)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_batch_rows_bucket{le="8"} 1)"));
}

}  // namespace
}  // namespace fp8kvd::ops
