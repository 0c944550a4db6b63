// client/cc/ctl/accuracy.h: what fp8kvctl accuracy knows of a capture: the format's errors beside
// those of other ways, the kernel's check, and the error that was expected, where that is known.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cc/client.h"
#include "client/cc/ctl/capture.h"
#include "client/cc/ctl/kernel_check.h"
#include "kernels/reference/accuracy.h"

namespace fp8kvd::ctl {

// An attention output off by no more is taken for near-lossless.
inline constexpr double kNearLosslessMax = 0.08;

struct LayerAccuracy {
  std::string file;
  Capture capture;  // without its tensors
  kernels::reference::Accuracy accuracy;
  std::optional<KernelCheck> kernel;  // none where a daemon measured
  std::optional<double> expected_op;

  double op() const { return accuracy.of(kernels::reference::Way::kRow).op; }
  bool near_lossless() const { return op() <= kNearLosslessMax; }
  // Within 2 % of what was expected, or nothing was.
  bool as_expected() const;
  bool held() const { return (!kernel.has_value() || kernel->held) && as_expected(); }
};

// errors_path: as --errors of the command; empty: the file beside the capture, if it is there.
// daemon: measures the rows; null: this process does, and checks its kernels on them.
absl::StatusOr<LayerAccuracy> MeasureCapture(const std::string& path,
                                             const std::string& errors_path,
                                             client::Client* daemon = nullptr);

// "12.50 %" of 0.125.
std::string Percent(double share);

// A whole HTML page, without anything from elsewhere.
std::string AccuracyHtml(const std::vector<LayerAccuracy>& layers);

}  // namespace fp8kvd::ctl
