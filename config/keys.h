// config/keys.h: one table of everything that may be set: key, flag, variable, unit, range, text.
// It makes --help, the checks of every value, and the printed configuration. Defaults are those of
// options.h. A key `k` of section `s` is `s { k: … }` in a file, --k=… as a flag and FP8KVD_K=… in
// the environment; keys of models and tenants are set in files only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "config/options.h"
#include "config/values.h"

namespace fp8kvd::config {

// Where in its owner a key's value lies, and by that its type.
template <typename Owner>
using Field = std::variant<std::string* (*)(Owner&), bool* (*)(Owner&), int32_t* (*)(Owner&),
                           int64_t* (*)(Owner&), float* (*)(Owner&), double* (*)(Owner&),
                           std::optional<bool>* (*)(Owner&), std::optional<int32_t>* (*)(Owner&),
                           std::optional<int64_t>* (*)(Owner&), std::optional<float>* (*)(Owner&),
                           DeviceChoice* (*)(Owner&), PrecisionChoice* (*)(Owner&),
                           LogLevel* (*)(Owner&), LogFormat* (*)(Owner&)>;

template <typename Owner>
struct Key {
  const char* section;  // of Options; empty in a model
  const char* name;
  Field<Owner> field;
  const char* text;  // effect, for --help
  const char* unit = "";
  double min = 0;  // of a number, both included
  double max = 0;
  Form form = Form::kText;
};

absl::Span<const Key<Options>> Keys();
absl::Span<const Key<ModelOptions>> ModelKeys();
absl::Span<const Key<LayerRule>> LayerRuleKeys();
absl::Span<const Key<TenantOptions>> TenantKeys();

// Reads `text` into the key's field. INVALID_ARGUMENT "<key> is <text>, allowed is …; …" without a
// place: the caller knows where the text stood.
template <typename Owner>
absl::Status SetValue(const Key<Owner>& key, absl::string_view text, Owner& owner);

// The key's value as a .textproto writes it; empty where an optional one is not set.
template <typename Owner>
std::string ValueText(const Key<Owner>& key, const Owner& owner);

// Whether the key wants a number, a bool or a text: for errors and for JSON.
enum class ValueKind : uint8_t { kText, kBool, kNumber, kEnum };
template <typename Owner>
ValueKind KindOf(const Key<Owner>& key);

// The key of Options with that name, or null.
const Key<Options>* FindKey(absl::string_view name);

std::string PathOf(const Key<Options>& key);    // "server.poller_threads"
std::string FlagName(const Key<Options>& key);  // "--poller_threads"
std::string EnvName(const Key<Options>& key);   // "FP8KVD_POLLER_THREADS"

// The text of fp8kvd --help.
std::string HelpText();

}  // namespace fp8kvd::config
