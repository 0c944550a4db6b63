// client/cc/ctl/output.h: what the subcommands print: tables for people, JSON for machines.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace fp8kvd::ctl {

// Columns as wide as they must be, numbers to the right, words to the left.
class Table {
 public:
  explicit Table(std::vector<std::string> head) : rows_{std::move(head)} {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  void Print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the first is the head
};

// Writes one JSON value in the order of the calls. Commas and escapes are its own business; that
// every Begin has its End, and every value in an object its Key, is the caller's.
class Json {
 public:
  Json& BeginObject() { return Open('{'); }
  Json& EndObject() { return Close('}'); }
  Json& BeginArray() { return Open('['); }
  Json& EndArray() { return Close(']'); }
  Json& Key(absl::string_view name);
  Json& Text(absl::string_view value);
  Json& Number(double value);  // not finite: null, since JSON has no word for it
  Json& Count(uint64_t value);
  Json& Bool(bool value);

  const std::string& str() const { return text_; }

 private:
  Json& Open(char bracket);
  Json& Close(char bracket);
  Json& Value(const std::string& literal);

  std::string text_;
  bool first_ = true;  // no comma before the next value
};

// "1.50 MiB"
std::string HumanBytes(double bytes);
// `value` with so many digits after the point.
std::string Fixed(double value, int digits);
// Control characters become '?', so that no server and no file writes to a terminal on its own.
std::string Printable(absl::string_view text);
// The value below which `share` of them lie (nearest rank). Sorts; 0 of nothing.
double Quantile(std::vector<double>& values, double share);

}  // namespace fp8kvd::ctl
