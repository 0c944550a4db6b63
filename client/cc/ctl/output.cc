#include "client/cc/ctl/output.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace fp8kvd::ctl {
namespace {

// Terminal columns, not bytes: UTF-8 continuation bytes take no room.
size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

bool IsNumber(const std::string& text) {
  return !text.empty() && (std::isdigit(static_cast<unsigned char>(text[0])) != 0 || text == "-");
}

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace

void Table::Print(std::ostream& out) const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  // A column whose first value is a number stands to the right, its head too.
  const std::vector<std::string>& sample = rows_[std::min<size_t>(1, rows_.size() - 1)];
  for (const auto& row : rows_) {
    std::string text;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - Width(row[i]), ' ');
      const bool right = i < sample.size() && IsNumber(sample[i]);
      absl::StrAppend(&text, i == 0 ? "" : "  ", right ? pad : "", row[i], right ? "" : pad);
    }
    out << text.substr(0, text.find_last_not_of(' ') + 1) << '\n';
  }
}

Json& Json::Open(char bracket) {
  Value(std::string(1, bracket));
  first_ = true;
  return *this;
}

Json& Json::Close(char bracket) {
  text_ += bracket;
  first_ = false;
  return *this;
}

Json& Json::Value(const std::string& literal) {
  if (!first_) text_ += ',';
  text_ += literal;
  first_ = false;
  return *this;
}

Json& Json::Key(absl::string_view name) {
  Value(Quoted(name) + ":");
  first_ = true;
  return *this;
}

Json& Json::Text(absl::string_view value) { return Value(Quoted(value)); }
Json& Json::Count(uint64_t value) { return Value(absl::StrCat(value)); }
Json& Json::Bool(bool value) { return Value(value ? "true" : "false"); }

Json& Json::Number(double value) {
  if (!std::isfinite(value)) return Value("null");
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  return Value(std::string(digits, end));
}

std::string HumanBytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(units); ++unit) bytes /= 1024;
  return absl::StrCat(Fixed(bytes, unit == 0 ? 0 : 2), " ", units[unit]);
}

std::string Fixed(double value, int digits) { return absl::StrFormat("%.*f", digits, value); }

std::string Printable(absl::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7F) c = '?';
  }
  return out;
}

double Quantile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  return values[std::min(std::max<size_t>(rank, 1), values.size()) - 1];
}

}  // namespace fp8kvd::ctl
