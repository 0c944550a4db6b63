// config/device_list.h: the devices that a configuration names, and what each of several gets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "config/options.h"

namespace fp8kvd::config {

// The numbers in engine.devices, ascending and distinct; none for an empty text. INVALID_ARGUMENT
// for another form, numbers above 63, or more than kDevicesMax.
absl::StatusOr<std::vector<int32_t>> ParseDeviceList(absl::string_view text);

// How many there will be as far as the configuration tells: 1 where it says "all".
int32_t DevicesNamed(const EngineOptions& options);

// What a model's pools are planned by on each of so many devices: its part of the expected
// sequences, rounded up so that all find a place, and of pool_bytes.
ModelOptions OnOneOf(int32_t devices, ModelOptions model);
CacheOptions OnOneOf(int32_t devices, CacheOptions cache);

}  // namespace fp8kvd::config
