#include "config/read_tree.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "config/keys.h"
#include "config/suggest.h"

namespace fp8kvd::config {
namespace {

// "batchRowsMax", as protobuf's JSON writes it, to "batch_rows_max".
std::string SnakeCase(absl::string_view name) {
  std::string snake;
  for (const char c : name) {
    if (absl::ascii_isupper(static_cast<unsigned char>(c))) snake.push_back('_');
    snake.push_back(absl::ascii_tolower(static_cast<unsigned char>(c)));
  }
  return snake;
}

// Puts what a file says into Options.
class FileReader {
 public:
  FileReader(std::string name, Options* options, Sources* sources)
      : name_(std::move(name)), options_(options), sources_(sources) {}

  absl::Status Read(const Tree& root) {
    if (root.kind != Tree::Kind::kObject) {
      return absl::InvalidArgumentError(absl::StrCat(name_, ":", root.line,
                                                     ": the configuration is ", KindName(root.kind),
                                                     ", allowed is an object; write { … }"));
    }
    std::vector<std::string> sections = {"models", "tenants"};
    for (const Key<Options>& key : Keys()) {
      if (sections.back() != key.section) sections.push_back(key.section);
    }
    for (const Tree& section : root.children) {
      const std::string name = SnakeCase(section.name);
      if (std::find(sections.begin(), sections.end(), name) == sections.end()) {
        return Refuse(section, absl::StrCat("unknown key ", Quoted(section.name),
                                            OtherSection(name, sections)));
      }
      const absl::Status status = name == "models"    ? ReadModels(section)
                                  : name == "tenants" ? ReadTenants(section)
                                                      : ReadSection(section, name);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  static std::string Quoted(absl::string_view text) {
    constexpr size_t kShown = 80;
    return absl::StrCat("\"", absl::CEscape(text.substr(0, kShown)), "\"");
  }

  // A key that stands at the top, but belongs into a section.
  static std::string OtherSection(const std::string& name,
                                  const std::vector<std::string>& sections) {
    if (const Key<Options>* key = FindKey(name); key != nullptr) {
      return absl::StrCat("; it belongs into ", key->section);
    }
    return Suggestion(name, sections);
  }

  absl::Status Refuse(const Tree& at, absl::string_view text) const {
    return absl::InvalidArgumentError(absl::StrCat(name_, ":", at.line, ": ", text));
  }

  absl::Status WrongKind(const Tree& tree, absl::string_view name, const char* allowed) const {
    return Refuse(tree, absl::StrCat(name, " is ", KindName(tree.kind), ", allowed is ", allowed,
                                     "; see --help for its form"));
  }

  // Written once as here and once as protobuf's JSON does.
  absl::Status Twice(const Tree& tree, absl::string_view name) const {
    return Refuse(tree, absl::StrCat(absl::CEscape(name), " stands twice; remove one"));
  }

  absl::Status ReadSection(const Tree& section, const std::string& name) {
    if (section.kind == Tree::Kind::kNull) return absl::OkStatus();
    if (section.kind != Tree::Kind::kObject) return WrongKind(section, name, "an object");
    std::set<std::string> seen;
    for (const Tree& entry : section.children) {
      if (!seen.insert(SnakeCase(entry.name)).second) return Twice(entry, SnakeCase(entry.name));
      std::vector<std::string> known;
      const Key<Options>* found = nullptr;
      for (const Key<Options>& key : Keys()) {
        if (name != key.section) continue;
        known.emplace_back(key.name);
        if (SnakeCase(entry.name) == key.name) found = &key;
      }
      if (found == nullptr) {
        return Refuse(entry, absl::StrCat("unknown key ", Quoted(entry.name),
                                          OtherSection(SnakeCase(entry.name), known)));
      }
      const absl::Status status = ReadValue(entry, *found, *options_);
      if (!status.ok()) return status;
      (*sources_)[PathOf(*found)] = "file";
    }
    return absl::OkStatus();
  }

  template <typename Owner>
  absl::Status ReadValue(const Tree& entry, const Key<Owner>& key, Owner& owner) {
    using Kind = Tree::Kind;
    if (entry.kind == Kind::kNull) return absl::OkStatus();
    const bool text = entry.kind == Kind::kText;  // JSON writes words and may write numbers so
    switch (KindOf(key)) {
      case ValueKind::kText:
        if (!text) return WrongKind(entry, key.name, "a text in quotes");
        break;
      case ValueKind::kBool:
        if (entry.kind != Kind::kBool) return WrongKind(entry, key.name, "true or false");
        break;
      case ValueKind::kNumber:
        if (entry.kind != Kind::kNumber && !text) return WrongKind(entry, key.name, "a number");
        break;
      case ValueKind::kEnum:
        if (entry.kind != Kind::kWord && !text) return WrongKind(entry, key.name, "a word");
        break;
    }
    const absl::Status status = SetValue(key, entry.text, owner);
    return status.ok() ? status : Refuse(entry, status.message());
  }

  // The entries of an object into `owner`; one named `nested`, if not null, goes to `read_nested`.
  template <typename Owner, typename ReadNested>
  absl::Status ReadOwner(const Tree& object, absl::string_view what,
                         absl::Span<const Key<Owner>> keys, const char* nested,
                         const ReadNested& read_nested, Owner& owner) {
    if (object.kind != Tree::Kind::kObject) return WrongKind(object, what, "an object");
    std::set<std::string> seen;
    for (const Tree& entry : object.children) {
      const std::string name = SnakeCase(entry.name);
      absl::Status status;
      if (!seen.insert(name).second) return Twice(entry, name);
      const auto key = std::find_if(keys.begin(), keys.end(),
                                    [&](const Key<Owner>& k) { return name == k.name; });
      if (key != keys.end()) {
        status = ReadValue(entry, *key, owner);
      } else if (nested != nullptr && name == nested) {
        status = read_nested(entry);
      } else {
        std::vector<std::string> known;
        for (const Key<Owner>& k : keys) known.emplace_back(k.name);
        if (nested != nullptr) known.emplace_back(nested);
        status = Refuse(entry,
                        absl::StrCat("unknown key ", Quoted(entry.name), Suggestion(name, known)));
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status ReadModels(const Tree& models) {
    if (models.kind == Tree::Kind::kNull) return absl::OkStatus();
    if (models.kind != Tree::Kind::kArray) return WrongKind(models, "models", "an array");
    for (const Tree& entry : models.children) {
      if (options_->models.size() == kModelsMax) {
        return Refuse(entry, absl::StrCat("models are more than ", kModelsMax,
                                          ", which is all that one daemon serves; remove some"));
      }
      ModelOptions model;
      const absl::Status status = ReadOwner<ModelOptions>(
          entry, "models", ModelKeys(), "layer_rules",
          [&](const Tree& rules) { return ReadRules(rules, &model); }, model);
      if (!status.ok()) return status;
      options_->models.push_back(std::move(model));
    }
    return absl::OkStatus();
  }

  absl::Status ReadTenants(const Tree& tenants) {
    if (tenants.kind == Tree::Kind::kNull) return absl::OkStatus();
    if (tenants.kind != Tree::Kind::kArray) return WrongKind(tenants, "tenants", "an array");
    for (const Tree& entry : tenants.children) {
      if (options_->tenants.size() == kTenantsMax) {
        return Refuse(entry,
                      absl::StrCat("tenants are more than ", kTenantsMax,
                                   ", which is all that one daemon tells apart; merge some"));
      }
      TenantOptions tenant;
      const absl::Status status = ReadOwner<TenantOptions>(
          entry, "tenants", TenantKeys(), nullptr,
          [](const Tree& /*entry*/) { return absl::OkStatus(); }, tenant);
      if (!status.ok()) return status;
      options_->tenants.push_back(std::move(tenant));
    }
    return absl::OkStatus();
  }

  absl::Status ReadRules(const Tree& rules, ModelOptions* model) {
    if (rules.kind == Tree::Kind::kNull) return absl::OkStatus();
    if (rules.kind != Tree::Kind::kArray) return WrongKind(rules, "layer_rules", "an array");
    for (const Tree& entry : rules.children) {
      if (model->layer_rules.size() == kLayersMax) {
        return Refuse(entry, absl::StrCat("layer_rules are more than ", kLayersMax,
                                          ", one for each layer at most; merge some"));
      }
      LayerRule rule;
      const absl::Status status = ReadOwner<LayerRule>(
          entry, "layer_rules", LayerRuleKeys(), nullptr,
          [](const Tree& /*entry*/) { return absl::OkStatus(); }, rule);
      if (!status.ok()) return status;
      model->layer_rules.push_back(std::move(rule));
    }
    return absl::OkStatus();
  }

  const std::string name_;
  Options* const options_;
  Sources* const sources_;
};

}  // namespace

absl::Status ReadTree(const Tree& root, const std::string& name, Options* options,
                      Sources* sources) {
  return FileReader(name, options, sources).Read(root);
}

}  // namespace fp8kvd::config
