// client/cc/ctl/plan_map.h: the predicted speed-up of a step by fp8_kv over batch and context, as a
// map for the terminal and as an SVG, each with the line from which on fp8_kv is chosen.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cc/ctl/plan_question.h"

namespace fp8kvd::ctl {

struct PlanMap {
  std::vector<int64_t> batches;
  std::vector<int64_t> contexts;                   // tokens, doubling
  std::vector<std::vector<double>> speedups;       // [batches][contexts]
  std::vector<std::optional<int64_t>> crossovers;  // [batches] tokens
};

absl::StatusOr<PlanMap> MakePlanMap(const Question& question);

void PrintPlanMap(const PlanMap& map, std::ostream& out);
std::string PlanMapSvg(const PlanMap& map, const Question& question);

}  // namespace fp8kvd::ctl
