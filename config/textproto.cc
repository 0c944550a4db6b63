#include "config/textproto.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"

#include "config/config.pb.h"
#include "config/suggest.h"
#include "config/utf8.h"

namespace fp8kvd::config {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

// The first error, with the name that was meant when a key is unknown.
class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int /*column*/, const std::string& message) override {
    if (!text_.empty()) return;
    text_ = absl::StrCat("line ", std::max(line, 0) + 1, ": ", Explained(message));
  }
  void AddWarning(int /*line*/, int /*column*/, const std::string& /*message*/) override {}

  const std::string& text() const { return text_; }

 private:
  // Protobuf says: Message type "fp8kvd.config.v1.Server" has no field named "port".
  static std::string Explained(const std::string& message) {
    const std::vector<std::string> parts = absl::StrSplit(message, '"');
    if (parts.size() != 5 || !absl::StrContains(parts[2], "has no field named")) return message;
    const Descriptor* type =
        google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(parts[1]);
    if (type == nullptr) return message;
    std::vector<std::string> known;
    known.reserve(type->field_count());
    for (int i = 0; i < type->field_count(); ++i) known.push_back(type->field(i)->name());
    return absl::StrCat("unknown key ", parts[3], Suggestion(parts[3], known));
  }

  std::string text_;
};

// The text of a scalar, as a flag would write it.
std::string ScalarText(const Message& message, const FieldDescriptor* field) {
  const Reflection* get = message.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(get->GetInt32(message, field));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(get->GetInt64(message, field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return absl::StrFormat("%.17g", get->GetDouble(message, field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return absl::StrFormat("%.9g", get->GetFloat(message, field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return get->GetBool(message, field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_ENUM:
      return get->GetEnum(message, field)->name();
    default:
      return get->GetString(message, field);
  }
}

Tree::Kind ScalarKind(const FieldDescriptor* field) {
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return Tree::Kind::kBool;
    case FieldDescriptor::CPPTYPE_ENUM:
      return Tree::Kind::kWord;
    case FieldDescriptor::CPPTYPE_STRING:
      return Tree::Kind::kText;
    default:
      return Tree::Kind::kNumber;
  }
}

Tree ToTree(const Message& message, TextFormat::ParseInfoTree* places);

Tree FieldTree(const Message& message, const FieldDescriptor* field,
               TextFormat::ParseInfoTree* places) {
  const Reflection* get = message.GetReflection();
  Tree tree;
  if (field->is_repeated()) {
    tree.kind = Tree::Kind::kArray;
    for (int i = 0; i < get->FieldSize(message, field); ++i) {
      Tree child =
          ToTree(get->GetRepeatedMessage(message, field, i), places->GetTreeForNested(field, i));
      child.line = places->GetLocation(field, i).line + 1;
      tree.children.push_back(std::move(child));
    }
    if (!tree.children.empty()) tree.line = tree.children.front().line;
  } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    tree = ToTree(get->GetMessage(message, field), places->GetTreeForNested(field, -1));
    tree.line = places->GetLocation(field, -1).line + 1;
  } else {
    tree.kind = ScalarKind(field);
    tree.text = ScalarText(message, field);
    tree.line = places->GetLocation(field, -1).line + 1;
  }
  tree.name = field->name();
  return tree;
}

Tree ToTree(const Message& message, TextFormat::ParseInfoTree* places) {
  Tree tree;
  tree.kind = Tree::Kind::kObject;
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    tree.children.push_back(FieldTree(message, field, places));
  }
  return tree;
}

}  // namespace

absl::StatusOr<Tree> ParseTextproto(absl::string_view text) {
  if (const absl::Status status = CheckUtf8(text); !status.ok()) return status;
  FirstError errors;
  TextFormat::ParseInfoTree places;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  parser.WriteLocationsTo(&places);
  parser.SetRecursionLimit(kTreeDepthMax);
  v1::Config config;
  if (!parser.ParseFromString(std::string(text), &config)) {
    return absl::InvalidArgumentError(errors.text().empty() ? "not in protobuf's text format"
                                                            : errors.text());
  }
  return ToTree(config, &places);
}

}  // namespace fp8kvd::config
