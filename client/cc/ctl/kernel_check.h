// client/cc/ctl/kernel_check.h: the CPU kernels on given rows against double precision on the same
// codes and scales: contract (a) of the numerics, on a user's own data. Broken scales go through
// the same judge, which must refuse them: else it would prove nothing.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

#include "kernels/reference/accuracy.h"

namespace fp8kvd::ctl {

struct KernelCheck {
  int64_t pairs = 0;             // (row, KV head) compared: 64 at least, at earlier positions too
  double rel_l2_fp32 = 0;        // with fp32 output, at most 2e-3
  double rel_l2_bf16 = 0;        // with bf16 output, at most 3e-3
  double worst_element = 0;      // of both, as a share of what is allowed
  double control_v_scale = 0;    // relative L2 where V's scales are 1.05 times too large
  double control_one_scale = 0;  // and where every token has the first one's scales
  bool controls_refused = false;
  bool held = false;  // the kernel within its bounds, and the controls refused
  std::string why;    // where not
};

// UNIMPLEMENTED for a shape without a kernel.
absl::StatusOr<KernelCheck> CheckKernel(const kernels::reference::AttentionRows& rows);

}  // namespace fp8kvd::ctl
