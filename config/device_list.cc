#include "config/device_list.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "config/base/limits.h"
#include "config/layer_list.h"

namespace fp8kvd::config {
namespace {

constexpr int32_t kIndexMax = 63;  // of a device on one machine

}  // namespace

absl::StatusOr<std::vector<int32_t>> ParseDeviceList(absl::string_view text) {
  if (text.empty()) return std::vector<int32_t>();
  absl::StatusOr<std::vector<int32_t>> list = ParseLayerList(text, kIndexMax + 1);
  if (list.ok() && list->size() <= kDevicesMax) return list;
  return absl::InvalidArgumentError(absl::StrCat(
      "devices is \"", text, "\", allowed are ", kDevicesMax, " numbers from 0 to ", kIndexMax,
      " at most; write for example \"0,2\" or \"0-3\", or nothing for all"));
}

int32_t DevicesNamed(const EngineOptions& options) {
  const absl::StatusOr<std::vector<int32_t>> list = ParseDeviceList(options.devices);
  return list.ok() ? std::max(1, static_cast<int32_t>(list->size())) : 1;
}

ModelOptions OnOneOf(int32_t devices, ModelOptions model) {
  model.expected_seqs = (model.expected_seqs + devices - 1) / devices;
  return model;
}

CacheOptions OnOneOf(int32_t devices, CacheOptions cache) {
  cache.pool_bytes /= devices;
  return cache;
}

}  // namespace fp8kvd::config
