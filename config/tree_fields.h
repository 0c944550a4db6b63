// config/tree_fields.h: typed members of an object of a Tree. The first error is kept and
// everything after it reads as absent, so that a reader of many fields asks once, at its end.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "config/tree.h"

namespace fp8kvd::config {

class TreeFields {
 public:
  // `object` outlives this.
  explicit TreeFields(const Tree& object) : object_(object) {}

  // The member, null included; null if there is none.
  const Tree* Member(absl::string_view name) const { return object_.Find(name); }

  // Whether the member is there and not null.
  bool Has(absl::string_view name) const;

  // The first of these members that is there and not null, else `fallback`. INVALID_ARGUMENT when
  // it is of another type, no whole number, or not in [min, max].
  int64_t Int(std::initializer_list<absl::string_view> names, int64_t fallback, int64_t min,
              int64_t max);

  double Number(absl::string_view name, double fallback);
  bool Bool(absl::string_view name, bool fallback);
  std::string Text(absl::string_view name);

  // The array of that name, or null.
  const Tree* Array(absl::string_view name);
  const Tree* Object(absl::string_view name);

  // Records that a member that must be there is not.
  void Missing(absl::string_view name);
  void Refuse(const Tree& at, absl::string_view text);

  const absl::Status& status() const { return status_; }

 private:
  const Tree* Find(absl::string_view name, Tree::Kind kind);

  const Tree& object_;
  absl::Status status_;
};

}  // namespace fp8kvd::config
