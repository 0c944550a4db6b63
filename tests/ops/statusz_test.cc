#include "server/ops/statusz.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fp8kvd::ops {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string JsonOf(const StatusFacts& facts, State state = State::kReady) {
  Readiness readiness;
  readiness.Set(state);
  Totals totals;
  totals.time_ms = 65'000;
  totals.engine.seqs = 3;
  totals.engine.pools = {
      {.pages_total = 12, .pages_used = 5, .pages_free = 7, .pages_reserved = 2}};
  totals.engine.tenants = {{.queue_items = 4,
                            .seqs = 2,
                            .pools = {{.pages_total = 6, .pages_used = 5}, {.pages_total = 10}}}};
  History history;
  history.Add(totals);
  totals.time_ms += 2000;
  totals.engine.rows_total = 10;
  history.Add(totals);
  return StatusJson(facts, readiness, totals, history);
}

StatusFacts Facts() {
  return {
      .version = "1",
      .incarnation = "a",
      .device_kind = "cpu",
      .device_name = "a \"fast\" one",
      .start_ms = 7000,
      .models = {
          {.name = "m",
           .layers = 2,
           .q_heads = 4,
           .kv_heads = 2,
           .head_dim = 64,
           .precision_reason = "bf16 because",
           .groups = {{.layers = "0-1", .window = 0, .precision = "bf16", .page_bytes = 100}}}}};
}

TEST(StatusJson, HasStateDeviceModelsAndHistory) {
  const std::string json = JsonOf(Facts());
  EXPECT_THAT(json, HasSubstr(R"("state":"ready","why":"ready")"));
  EXPECT_THAT(json, HasSubstr(R"("name":"a \"fast\" one")"));
  EXPECT_THAT(json, HasSubstr(R"("uptime_s":60,)"));
  EXPECT_THAT(json, HasSubstr(R"("reason":"bf16 because")"));
  EXPECT_THAT(json, HasSubstr(R"("pages_total":12,"pages_used":5,"pages_free":7)"));
  EXPECT_THAT(json, HasSubstr(R"("time_ms":[67000])"));
  EXPECT_THAT(json, HasSubstr(R"("rows_per_s":[5])"));
  EXPECT_THAT(json, HasSubstr(R"("queue_p99_s":[null])"));
}

TEST(StatusJson, NamesTenantsWhereTheyAreConfigured) {
  EXPECT_THAT(JsonOf(Facts()), HasSubstr(R"("tenants":[])"));
  StatusFacts facts = Facts();
  facts.tenants = {"team-a"};
  EXPECT_THAT(JsonOf(facts), HasSubstr(R"("tenants":[{"name":"team-a","seqs":2,"queue_items":4,)"
                                       R"("pages_used":5,"pages_total":16}])"));
}

TEST(StatusJson, HasEachDevice) {
  StatusFacts facts = Facts();
  facts.devices = {"cuda:0", "cuda:1"};
  Totals totals;
  totals.devices.resize(2);
  totals.devices[1].seqs = 3;
  totals.devices[1].queue_items = 2;
  totals.devices[1].rows_total = 9;
  totals.devices[1].pools = {{.pages_total = 12, .pages_used = 5}, {.pages_total = 4}};
  EXPECT_THAT(StatusJson(facts, Readiness(), totals, History()),
              HasSubstr(R"({"name":"cuda:1","seqs":3,"queue_items":2,"launches_inflight":0,)"
                        R"("rows_total":9,"pages_used":5,"pages_total":16}])"));
}

TEST(StatusJson, SaysWhyItIsNotReady) {
  EXPECT_THAT(JsonOf(Facts(), State::kDraining),
              HasSubstr(R"("state":"draining","why":"draining: new work is refused")"));
}

// Everything that the page needs comes with it: an operator's network may reach nothing else.
TEST(StatusPage, NamesNoOtherServer) {
  const std::string page = kStatusPage;
  EXPECT_THAT(page, HasSubstr("</html>"));
  for (const char* outside : {"https://", "src=\"", "@import", "url("}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
  const std::string svg = "http://www.w3.org/2000/svg";  // a name, not an address that is asked
  EXPECT_EQ(page.find("http://"), page.find(svg));
  EXPECT_EQ(page.rfind("http://"), page.find(svg));
}

TEST(StatusPage, DrawsEverySeriesThatTheDaemonKeeps) {
  const std::string page = kStatusPage;
  for (const char* series : History::kSeries) EXPECT_THAT(page, HasSubstr(series));
}

}  // namespace
}  // namespace fp8kvd::ops
