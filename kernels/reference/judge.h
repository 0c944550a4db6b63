// kernels/reference/judge.h: the accuracy contract of the kernels as one function. Against double
// precision on the same codes and scales:
//   relative L2 of all outputs <= 2e-3 (fp32) or 3e-3 (bf16);
//   each element within 1.1 * 2^-8 * (sum p |v| / l, plus |out| with bf16 output) + 2^-100: P *
//   v_scale
//     is rounded to bf16 (half a unit is 2^-9 of it), the output once more, and a tenth for the
//     sums;
//   lse within 2^-18 of the scores' own scale + 2^-16 |lse| + 1e-5: a sum of head_dim fp32
//   products.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/params.h"
#include "kernels/reference/decode.h"

namespace fp8kvd::kernels::reference {

// What a backend answered, all rows of a launch one after the other, and what is right.
struct Answer {
  std::vector<float> out;  // bf16 output widened
  std::vector<float> lse;  // empty: not asked for
};

struct Verdict {
  bool holds = true;
  double relative_l2 = 0.0;
  double worst_element = 0.0;  // error as a share of what is allowed
  std::string why;             // empty when it holds; at most five elements by index, then a count
};

Verdict Judge(const Answer& answer, const DecodeOutput& right, OutType out_type);

// CPU against GPU: relative L2 <= 4e-3.
Verdict JudgeTwoBackends(const std::vector<float>& a, const std::vector<float>& b);

// Joins b's rows behind a's.
void AppendTo(DecodeOutput& a, const DecodeOutput& b);

}  // namespace fp8kvd::kernels::reference
