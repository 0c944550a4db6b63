#include "config/values.h"

#include <cstddef>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "config/suggest.h"
#include "config/utf8.h"

namespace fp8kvd::config {
namespace {

constexpr size_t kTextMax = 4096;
constexpr size_t kNameMax = 128;

// A rule of one key that its text broke: "allowed is …".
absl::Status Refuse(const char* name, absl::string_view text, absl::string_view allowed,
                    absl::string_view advice) {
  constexpr size_t kShown = 80;
  std::string shown = absl::CEscape(text.substr(0, kShown));
  if (text.size() > kShown) shown += "…";
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is \"", shown, "\", allowed is ", allowed, "; ", advice));
}

constexpr const char* kSetWithin = "set it within, or leave it out for the default";

bool InRange(double value, const Bounds& bounds) {
  return value >= bounds.min && value <= bounds.max;  // false for NaN
}

bool IsPort(absl::string_view text) {
  int32_t port = 0;
  return !text.empty() && text.size() <= 5 &&
         text.find_first_not_of("0123456789") == absl::string_view::npos &&
         absl::SimpleAtoi(text, &port) && port <= 65535;
}

bool IsAddress(absl::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 || !IsPort(text.substr(colon + 1))) {
    return false;
  }
  absl::string_view host = text.substr(0, colon);
  const bool bracketed = host.front() == '[' && host.back() == ']' && host.size() > 2;
  if (bracketed) host = host.substr(1, host.size() - 2);
  for (const char c : host) {
    const bool allowed = absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
                         c == '-' || c == '_' || (bracketed && (c == ':' || c == '%'));
    if (!allowed) return false;
  }
  return true;
}

bool IsName(absl::string_view text) {
  if (text.empty() || text.size() > kNameMax) return false;
  for (const char c : text) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) &&
        !absl::StrContains("._-/", {&c, 1})) {
      return false;
    }
  }
  return true;
}

bool IsText(absl::string_view text) {
  for (const char c : text) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) return false;
  }
  return text.size() <= kTextMax && IsUtf8(text);
}

template <typename Number>
absl::Status ParseWhole(const Bounds& bounds, absl::string_view text, Number* value) {
  int64_t number = 0;
  const bool digits = !text.empty() && text.find_first_not_of("-0123456789") == text.npos;
  if (!digits || !absl::SimpleAtoi(text, &number) ||
      !InRange(static_cast<double>(number), bounds)) {
    return Refuse(bounds.name, text, absl::StrCat("a whole number, ", RangeText(bounds)),
                  kSetWithin);
  }
  *value = static_cast<Number>(number);
  return absl::OkStatus();
}

template <typename Number>
absl::Status ParseReal(const Bounds& bounds, absl::string_view text, Number* value) {
  double number = 0;
  const bool digits = !text.empty() && text.find_first_not_of("-+.0123456789eE") == text.npos;
  if (!digits || !absl::SimpleAtod(text, &number) || !InRange(number, bounds)) {
    return Refuse(bounds.name, text, absl::StrCat("a number, ", RangeText(bounds)), kSetWithin);
  }
  *value = static_cast<Number>(number);
  return absl::OkStatus();
}

}  // namespace

std::string RangeText(const Bounds& bounds) {
  return absl::StrCat(PrintValue(bounds.min), " to ", PrintValue(bounds.max),
                      *bounds.unit ? " " : "", bounds.unit);
}

absl::Status ParseValue(const Bounds& bounds, absl::string_view text, std::string* value) {
  if (!IsText(text)) {
    return Refuse(bounds.name, text, "UTF-8 of at most 4096 bytes without control characters",
                  "write it so");
  }
  if (bounds.form == Form::kName && !IsName(text)) {
    return Refuse(bounds.name, text, "1 to 128 letters, digits, '.', '_', '-' and '/'",
                  "choose such a name");
  }
  const bool address =
      bounds.form == Form::kAddress || (bounds.form == Form::kAddressOrEmpty && !text.empty());
  if (address && !IsAddress(text)) {
    return Refuse(bounds.name, text, "host:port with a port from 0 to 65535",
                  "write for example \"127.0.0.1:50051\" or \"[::1]:0\"");
  }
  *value = std::string(text);
  return absl::OkStatus();
}

absl::Status ParseValue(const Bounds& bounds, absl::string_view text, bool* value) {
  if (text != "true" && text != "false") {
    return Refuse(bounds.name, text, "true or false", "write one of them");
  }
  *value = text == "true";
  return absl::OkStatus();
}

absl::Status ParseValue(const Bounds& bounds, absl::string_view text, int32_t* value) {
  return ParseWhole(bounds, text, value);
}

absl::Status ParseValue(const Bounds& bounds, absl::string_view text, int64_t* value) {
  return ParseWhole(bounds, text, value);
}

absl::Status ParseValue(const Bounds& bounds, absl::string_view text, float* value) {
  return ParseReal(bounds, text, value);
}

absl::Status ParseValue(const Bounds& bounds, absl::string_view text, double* value) {
  return ParseReal(bounds, text, value);
}

absl::Status ParseWord(const Bounds& bounds, absl::string_view text,
                       absl::Span<const char* const> names, size_t* index) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (text == names[i]) {
      *index = i;
      return absl::OkStatus();
    }
  }
  const std::string near = NearestWord(text, std::vector<std::string>(names.begin(), names.end()));
  return Refuse(bounds.name, text, absl::StrJoin(names, ", "),
                near.empty() ? "write one of them" : absl::StrCat("did you mean ", near, "?"));
}

std::string PrintValue(const std::string& value) {
  return absl::StrCat("\"", absl::Utf8SafeCEscape(value), "\"");
}
std::string PrintValue(bool value) { return value ? "true" : "false"; }
std::string PrintValue(int32_t value) { return absl::StrCat(value); }
std::string PrintValue(int64_t value) { return absl::StrCat(value); }
std::string PrintValue(float value) { return absl::StrFormat("%.9g", value); }
std::string PrintValue(double value) {
  const std::string text = absl::StrFormat("%.15g", value);
  double back = 0;
  return absl::SimpleAtod(text, &back) && back == value ? text : absl::StrFormat("%.17g", value);
}

}  // namespace fp8kvd::config
