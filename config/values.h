// config/values.h: one value between its text in a file, a flag or a variable and its type. Every
// range and form is checked here, so that all places refuse alike.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "config/options.h"

namespace fp8kvd::config {

// What a text must look like.
enum class Form : uint8_t {
  kText,            // UTF-8 without control characters, at most 4096 bytes
  kAddress,         // host:port, [IPv6]:port
  kAddressOrEmpty,  // the same, or nothing
  kName,            // letters, digits, '.', '_', '-', '/'; 1 to 128 of them
};

// What one key allows. Numbers are in [min, max].
struct Bounds {
  const char* name;
  const char* unit;
  double min;
  double max;
  Form form;
};

// "1 to 64 threads".
std::string RangeText(const Bounds& bounds);

// Names of the enumerators, in the order of their values.
constexpr std::array<const char*, 3> Names(DeviceChoice) { return {"auto", "cpu", "cuda"}; }
constexpr std::array<const char*, 3> Names(PrecisionChoice) { return {"auto", "bf16", "fp8_kv"}; }
constexpr std::array<const char*, 4> Names(LogLevel) {
  return {"debug", "info", "warning", "error"};
}
constexpr std::array<const char*, 2> Names(LogFormat) { return {"text", "json"}; }

// Reads `text` into *value. INVALID_ARGUMENT "<name> is "<text>", allowed is …; …".
absl::Status ParseValue(const Bounds& bounds, absl::string_view text, std::string* value);
absl::Status ParseValue(const Bounds& bounds, absl::string_view text, bool* value);
absl::Status ParseValue(const Bounds& bounds, absl::string_view text, int32_t* value);
absl::Status ParseValue(const Bounds& bounds, absl::string_view text, int64_t* value);
absl::Status ParseValue(const Bounds& bounds, absl::string_view text, float* value);
absl::Status ParseValue(const Bounds& bounds, absl::string_view text, double* value);

// The index of `text` among `names`.
absl::Status ParseWord(const Bounds& bounds, absl::string_view text,
                       absl::Span<const char* const> names, size_t* index);

template <typename Enum>
requires std::is_enum_v<Enum> absl::Status ParseValue(const Bounds& bounds, absl::string_view text,
                                                      Enum* value) {
  size_t index = 0;
  const auto names = Names(Enum{});
  const absl::Status status = ParseWord(bounds, text, names, &index);
  if (status.ok()) *value = static_cast<Enum>(index);
  return status;
}

template <typename Value>
absl::Status ParseValue(const Bounds& bounds, absl::string_view text, std::optional<Value>* value) {
  Value given{};
  const absl::Status status = ParseValue(bounds, text, &given);
  if (status.ok()) *value = given;
  return status;
}

// As a .textproto writes it; reading it back gives the same value.
std::string PrintValue(const std::string& value);
std::string PrintValue(bool value);
std::string PrintValue(int32_t value);
std::string PrintValue(int64_t value);
std::string PrintValue(float value);
std::string PrintValue(double value);

template <typename Enum>
requires std::is_enum_v<Enum> std::string PrintValue(Enum value) {
  return Names(value)[static_cast<size_t>(value)];
}

// Empty where it is not set.
template <typename Value>
std::string PrintValue(const std::optional<Value>& value) {
  return value.has_value() ? PrintValue(*value) : "";
}

}  // namespace fp8kvd::config
