#include "config/tree_fields.h"

#include <cmath>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace fp8kvd::config {

bool TreeFields::Has(absl::string_view name) const {
  const Tree* member = object_.Find(name);
  return status_.ok() && member != nullptr && member->kind != Tree::Kind::kNull;
}

const Tree* TreeFields::Find(absl::string_view name, Tree::Kind kind) {
  if (!Has(name)) return nullptr;
  const Tree* member = object_.Find(name);
  if (member->kind == kind) return member;
  Refuse(*member, absl::StrCat("\"", name, "\" is ", KindName(member->kind), ", allowed is ",
                               KindName(kind)));
  return nullptr;
}

int64_t TreeFields::Int(std::initializer_list<absl::string_view> names, int64_t fallback,
                        int64_t min, int64_t max) {
  for (const absl::string_view name : names) {
    if (!Has(name)) continue;
    const Tree* member = Find(name, Tree::Kind::kNumber);
    int64_t value = 0;
    if (member == nullptr) return fallback;
    if (absl::SimpleAtoi(member->text, &value) && value >= min && value <= max) return value;
    Refuse(*member, absl::StrCat("\"", name, "\" is ", member->text.substr(0, 40),
                                 ", allowed is a whole number from ", min, " to ", max));
    return fallback;
  }
  return fallback;
}

double TreeFields::Number(absl::string_view name, double fallback) {
  const Tree* member = Find(name, Tree::Kind::kNumber);
  double value = 0;
  if (member == nullptr) return fallback;
  if (absl::SimpleAtod(member->text, &value) && std::isfinite(value)) return value;
  Refuse(*member, absl::StrCat("\"", name, "\" is ", member->text.substr(0, 40),
                               ", allowed is a finite number"));
  return fallback;
}

bool TreeFields::Bool(absl::string_view name, bool fallback) {
  const Tree* member = Find(name, Tree::Kind::kBool);
  return member == nullptr ? fallback : member->text == "true";
}

std::string TreeFields::Text(absl::string_view name) {
  const Tree* member = Find(name, Tree::Kind::kText);
  return member == nullptr ? "" : member->text;
}

const Tree* TreeFields::Array(absl::string_view name) { return Find(name, Tree::Kind::kArray); }
const Tree* TreeFields::Object(absl::string_view name) { return Find(name, Tree::Kind::kObject); }

void TreeFields::Missing(absl::string_view name) {
  Refuse(object_,
         absl::StrCat("\"", name, "\" is missing; give the shape by hand (layers, q_heads, ",
                      "kv_heads, head_dim, …) instead of hf_config"));
}

void TreeFields::Refuse(const Tree& at, absl::string_view text) {
  if (!status_.ok()) return;
  status_ = absl::InvalidArgumentError(absl::StrCat("line ", at.line, ": ", text));
}

}  // namespace fp8kvd::config
