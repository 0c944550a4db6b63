// Bytes as a configuration in both formats and as a model's config.json. Beyond not breaking: what
// is accepted has groups that hold every layer once and finite numbers, and what the report prints
// of it loads again to the same.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

#include "config/base/check.h"
#include "config/hf_config.h"
#include "config/load.h"
#include "config/model.h"
#include "config/report.h"

namespace fp8kvd::config {
namespace {

void CheckGeometry(const ModelGeometry& geometry) {
  FP8KVD_CHECK(geometry.layer.size() == static_cast<size_t>(geometry.layers));
  FP8KVD_CHECK(std::isfinite(geometry.sm_scale) && geometry.sm_scale > 0);
  int32_t placed = 0;
  for (size_t g = 0; g < geometry.groups.size(); ++g) {
    const LayerGroup& group = geometry.groups[g];
    for (size_t i = 0; i < group.layers.size(); ++i) {
      const LayerGeometry& layer = geometry.layer.at(group.layers[i]);
      FP8KVD_CHECK(layer.group == static_cast<int32_t>(g));
      FP8KVD_CHECK(layer.group_layer == static_cast<int32_t>(i));
      FP8KVD_CHECK(layer.window == group.window);
      ++placed;
    }
  }
  FP8KVD_CHECK(placed == geometry.layers);
}

void TryConfig(absl::string_view text, Format format) {
  const auto loaded = LoadText(text, format, "file", "", CommandLine(), {});
  if (!loaded.ok()) {
    FP8KVD_CHECK(!loaded.status().message().empty());
    return;
  }
  for (const PlannedModel& model : loaded->models) {
    CheckGeometry(model.geometry);
    FP8KVD_CHECK(std::isfinite(model.decision.predicted_speedup));
  }
  const auto report = CheckReport(*loaded, int64_t{1} << 40, PlainBlockBytes);
  FP8KVD_CHECK(report.ok() || loaded->options.cache.pool_fraction > 0);
  const std::string printed = EffectiveConfig(*loaded);
  auto again = LoadText(printed, Format::kTextproto, "file", "", CommandLine(), {});
  FP8KVD_CHECK(again.ok());
  again->sources = loaded->sources;  // which only the comments show
  FP8KVD_CHECK(EffectiveConfig(*again) == printed);
}

void TryHfConfig(absl::string_view text) {
  const auto model = ImportHfConfig(text);
  if (!model.ok()) return;
  const auto geometry = MakeGeometry(model->shape, Precision::kFp8Kv);
  FP8KVD_CHECK(geometry.ok());
  CheckGeometry(*geometry);
  FP8KVD_CHECK(std::isfinite(model->weights.BytesPerStep(1024)));
  FP8KVD_CHECK(model->weights.BytesPerStep(1024) >= 0);
}

}  // namespace
}  // namespace fp8kvd::config

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  fp8kvd::config::TryConfig(text, fp8kvd::config::Format::kTextproto);
  fp8kvd::config::TryConfig(text, fp8kvd::config::Format::kJson);
  fp8kvd::config::TryHfConfig(text);
  return 0;
}
