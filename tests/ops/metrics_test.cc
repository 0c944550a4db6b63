#include "server/ops/metrics.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fp8kvd::ops {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Metrics, CountsCallsByMethodAndCodeInTheBucketsOfGrpc) {
  Metrics metrics;
  MethodMetrics* const decode = metrics.Method("Decode");
  EXPECT_EQ(metrics.Method("Decode"), decode);
  decode->Observe(0, 10);  // on the bound: within
  decode->Observe(0, 11);
  decode->Observe(8, 200'000'000);
  metrics.Method("Append");  // never called: not shown
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_calls_total{method="Decode",code="OK"} 2)"));
  EXPECT_THAT(text, HasSubstr(R"(code="RESOURCE_EXHAUSTED"} 1)"));
  const std::string bucket = R"(fp8kvd_call_seconds_bucket{method="Decode",code="OK",le=)";
  EXPECT_THAT(text, HasSubstr(bucket + "\"1e-05\"} 1\n"));
  EXPECT_THAT(text, HasSubstr(bucket + "\"5e-05\"} 2\n"));
  EXPECT_THAT(text, HasSubstr(bucket + "\"0.0003\"} 2\n"));
  EXPECT_THAT(text, HasSubstr(R"(code="RESOURCE_EXHAUSTED",le="100"} 0)"));
  EXPECT_THAT(text, HasSubstr(R"(code="RESOURCE_EXHAUSTED",le="+Inf"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_call_seconds_count{method="Decode",code="OK"} 2)"));
  EXPECT_THAT(text, Not(HasSubstr("Append")));
}

TEST(Metrics, CountsBytesByMethodAndAllCalls) {
  Metrics metrics;
  MethodMetrics* const decode = metrics.Method("Decode");
  MethodMetrics* const append = metrics.Method("Append");
  decode->Received(100);
  decode->Sent(40);
  decode->Observe(0, 7);
  append->Received(5);
  append->Observe(3, 9);
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_call_received_bytes_total{method="Decode"} 100)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_call_sent_bytes_total{method="Decode"} 40)"));
  const CallTotals totals = metrics.Calls();
  EXPECT_EQ(totals.received_bytes, 105U);
  EXPECT_EQ(totals.sent_bytes, 40U);
  EXPECT_EQ(totals.calls, 2U);
  EXPECT_EQ(totals.calls_failed, 1U);
  EXPECT_EQ(totals.decode.count, 1U);
  EXPECT_EQ(totals.decode.sum_us, 7U);
}

TEST(Metrics, ACodeOutsideOfGrpcsIsUnknown) {
  Metrics metrics;
  metrics.Method("Decode")->Observe(99, 1);
  EXPECT_THAT(metrics.Scrape(), HasSubstr(R"(code="UNKNOWN"} 1)"));
}

TEST(Metrics, AScrapeIsOneCopyOfTheEngine) {
  Metrics metrics;
  int copies = 0;
  metrics.SetEngines(
      {.version = "1",
       .incarnation = "a",
       .device = "cpu",
       .devices = {{.name = "cpu:0", .model = "a processor"}},
       .models = {{.name = "m", .group_precisions = {"fp8_kv"}}},
       .tenants = {"team-a"}},
      [&copies] {
        ++copies;
        engine::EngineStats stats;
        stats.seqs = 4;
        stats.staging_slots_used = 3;
        stats.staging_slots_total = 10;
        stats.pools.push_back({.model = 0,
                               .group = 0,
                               .pages_total = 12,
                               .pages_used = 5,
                               .pages_free = 7,
                               .pages_reserved = 2,
                               .page_evictions_total = 11});
        stats.tenants.push_back(
            {.requests_refused_total = 6,
             .seqs = 3,
             .pools = {
                 {.model = 0, .group = 0, .pages_total = 8, .pages_used = 5, .pages_free = 3}}});
        stats.models.emplace_back();
        stats.models[0].kv_bytes_read_total = 99;
        stats.batch_rows.Observe(8);
        return std::vector<engine::EngineStats>{stats};
      },
      [](int32_t) { return LoadSample{.batch = 2.5, .tokens = 300, .cache_share = 0.25}; });
  const std::string text = metrics.Scrape();
  EXPECT_EQ(copies, 1);
  EXPECT_THAT(text, HasSubstr("fp8kvd_seqs 4\n"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_pages{model="m",group="0",state="used"} 5)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_pages{model="m",group="0",state="free"} 7)"));
  EXPECT_THAT(
      text,
      HasSubstr(R"(fp8kvd_tenant_pages{tenant="team-a",model="m",group="0",state="free"} 3)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_tenant_seqs{tenant="team-a"} 3)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_tenant_requests_refused_total{tenant="team-a"} 6)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_pages_reserved{model="m",group="0"} 2)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_page_evictions_total{model="m",group="0"} 11)"));
  EXPECT_THAT(text,
              HasSubstr(R"(fp8kvd_layer_group_info{model="m",group="0",precision="fp8_kv"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_staging_slots{state="free"} 7)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_kv_read_bytes_total{model="m"} 99)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_batch_rows_bucket{le="8"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_cache_share_ratio{model="m"} 0.25)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_step_seqs{model="m"} 2.5)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_step_seq_tokens{model="m"} 300)"));
}

engine::EngineStats StatsOf(int64_t pages_used, uint64_t rows) {
  engine::EngineStats stats;
  stats.seqs = pages_used;
  stats.rows_total = rows;
  stats.decode_launches_total = 1;
  stats.kernel_us.Observe(16);
  stats.pools.push_back(
      {.pages_total = 12, .pages_used = pages_used, .pages_free = 12 - pages_used});
  stats.tenants.push_back(
      {.requests_refused_total = 6, .queue_items = 2, .seqs = pages_used, .pools = {}});
  stats.models.emplace_back();
  return stats;
}

TEST(Metrics, HasEachDeviceAndAllTogether) {
  Metrics metrics;
  metrics.SetEngines(
      {.devices = {{.name = "cuda:0", .model = "A"}, {.name = "cuda:2", .model = "B"}},
       .models = {{.name = "m", .group_precisions = {"bf16"}}}},
      [] {
        return std::vector<engine::EngineStats>{StatsOf(5, 30), StatsOf(1, 12)};
      });
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_device_info{device="cuda:2",device_name="B"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_device_seqs{device="cuda:0"} 5)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_device_rows_total{device="cuda:2"} 12)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_device_launches_total{device="cuda:2",kind="decode"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_device_kernel_seconds_count{device="cuda:0"} 1)"));
  EXPECT_THAT(
      text,
      HasSubstr(R"(fp8kvd_device_pages{device="cuda:2",model="m",group="0",state="free"} 11)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_pages{model="m",group="0",state="used"} 6)"));
  EXPECT_THAT(text, HasSubstr("fp8kvd_rows_total 42\n"));
  EXPECT_THAT(text, HasSubstr("fp8kvd_kernel_seconds_count 2\n"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_tenant_seqs{tenant="default"} 6)"));
  // The queue's bound is one for all devices, which each of them tells.
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_tenant_queue_items{tenant="default"} 2)"));
}

// Cardinality: what clients do can add no series beyond gRPC's codes.
TEST(Metrics, SeriesAreBoundedWhateverCodesComeIn) {
  Metrics metrics;
  MethodMetrics* const decode = metrics.Method("Decode");
  for (int code = -300; code < 300; ++code) decode->Observe(code, code);
  const std::string text = metrics.Scrape();
  size_t lines = 0;
  for (size_t at = 0; (at = text.find("fp8kvd_calls_total{", at)) != std::string::npos; ++at) {
    ++lines;
  }
  EXPECT_EQ(lines, MethodMetrics::kCodes);
}

}  // namespace
}  // namespace fp8kvd::ops
