// tests/kernels/judge.h: the judge of kernels/reference under the names of the cases.
#pragma once

#include "kernels/reference/judge.h"

namespace fp8kvd::kernels::cases {

using reference::Answer;
using reference::AppendTo;
using reference::Judge;
using reference::JudgeTwoBackends;
using reference::Verdict;

}  // namespace fp8kvd::kernels::cases
