#include "config/json.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "config/utf8.h"

namespace fp8kvd::config {
namespace {

void AppendUtf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (code >> 6)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (code >> 12)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (code >> 18)));
    out->push_back(static_cast<char>(0x80 | ((code >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

// Recursive descent; every function leaves at_ behind what it read and returns false with error_
// set when it could not.
class Reader {
 public:
  explicit Reader(absl::string_view text) : text_(text) {}

  absl::StatusOr<Tree> ReadAll() {
    Tree tree;
    bool good = ReadValue(0, &tree);
    SkipSpace();
    if (good && at_ < text_.size()) good = Fail("text after the value; a file holds one value");
    if (!good) return absl::InvalidArgumentError(absl::StrCat("line ", line_, ": ", error_));
    return tree;
  }

 private:
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void SkipSpace() {
    for (; at_ < text_.size() && absl::StrContains(" \t\r\n", text_.substr(at_, 1)); ++at_) {
      if (text_[at_] == '\n') ++line_;
    }
  }

  std::string Here() const {
    if (at_ >= text_.size()) return "the end of the file";
    return absl::StrCat("\"", absl::CEscape(text_.substr(at_, 10)), "\"");
  }

  bool ReadValue(int depth, Tree* tree) {
    SkipSpace();
    tree->line = line_;
    if (depth > kTreeDepthMax) {
      return Fail(absl::StrCat("nested deeper than ", kTreeDepthMax, "; nothing here is so deep"));
    }
    switch (Peek()) {
      case '{':
        return ReadObject(depth, tree);
      case '[':
        return ReadArray(depth, tree);
      case '"':
        tree->kind = Tree::Kind::kText;
        return ReadText(&tree->text);
      default:
        return ReadBare(tree);
    }
  }

  bool ReadObject(int depth, Tree* tree) {
    tree->kind = Tree::Kind::kObject;
    std::set<std::string> names;
    ++at_;
    SkipSpace();
    if (Take('}')) return true;
    do {
      SkipSpace();
      Tree child;
      if (Peek() != '"') return Fail(absl::StrCat("expected a name in quotes, got ", Here()));
      if (!ReadText(&child.name)) return false;
      if (!names.insert(child.name).second) {
        return Fail(absl::StrCat("\"", absl::CEscape(child.name),
                                 "\" stands twice in its object; remove one"));
      }
      const int line = line_;
      SkipSpace();
      if (!Take(':')) return Fail(absl::StrCat("expected ':' after a name, got ", Here()));
      if (!ReadValue(depth + 1, &child)) return false;
      child.line = line;
      tree->children.push_back(std::move(child));
      SkipSpace();
    } while (Take(','));
    return Take('}') || Fail(absl::StrCat("expected ',' or '}', got ", Here()));
  }

  bool ReadArray(int depth, Tree* tree) {
    tree->kind = Tree::Kind::kArray;
    ++at_;
    SkipSpace();
    if (Take(']')) return true;
    do {
      Tree child;
      if (!ReadValue(depth + 1, &child)) return false;
      tree->children.push_back(std::move(child));
      SkipSpace();
    } while (Take(','));
    return Take(']') || Fail(absl::StrCat("expected ',' or ']', got ", Here()));
  }

  bool ReadText(std::string* out) {
    ++at_;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '"') return true;
      if (absl::ascii_iscntrl(static_cast<unsigned char>(c)) && c != 0x7F) break;
      if (c != '\\') {
        out->push_back(c);
      } else if (!ReadEscape(out)) {
        return false;
      }
    }
    return Fail("a text does not end on its line; close it with a quote");
  }

  bool ReadEscape(std::string* out) {
    constexpr absl::string_view kNames = "\"\\/bfnrt";
    constexpr absl::string_view kMeant = "\"\\/\b\f\n\r\t";
    const char c = Peek();
    ++at_;
    if (const size_t i = kNames.find(c); c != '\0' && i != kNames.npos) {
      out->push_back(kMeant[i]);
      return true;
    }
    uint32_t code = 0;
    if (c != 'u' || !ReadHex4(&code)) return Fail("a backslash with nothing that JSON escapes");
    if (code >= 0xD800 && code < 0xDC00) {  // the first half of a pair
      uint32_t low = 0;
      if (!Take('\\') || !Take('u') || !ReadHex4(&low) || low < 0xDC00 || low > 0xDFFF) {
        return Fail("half of a surrogate pair");
      }
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xDC00 && code <= 0xDFFF) {
      return Fail("half of a surrogate pair");
    }
    AppendUtf8(code, out);
    return true;
  }

  bool ReadHex4(uint32_t* code) {
    for (int i = 0; i < 4; ++i) {
      const char c = absl::ascii_tolower(static_cast<unsigned char>(Peek()));
      if (!absl::ascii_isxdigit(static_cast<unsigned char>(c))) return false;
      *code = *code * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
      ++at_;
    }
    return true;
  }

  // A number or one of the words of JSON.
  bool ReadBare(Tree* tree) {
    const size_t start = at_;
    while (at_ < text_.size() && (absl::ascii_isalnum(static_cast<unsigned char>(text_[at_])) ||
                                  absl::StrContains("+-._", text_.substr(at_, 1)))) {
      ++at_;
    }
    const absl::string_view bare = text_.substr(start, at_ - start);
    tree->text = std::string(bare);
    if (bare == "null") {
      tree->kind = Tree::Kind::kNull;
    } else if (bare == "true" || bare == "false") {
      tree->kind = Tree::Kind::kBool;
    } else if (IsNumber(bare) || bare == "NaN" || bare == "Infinity" || bare == "-Infinity") {
      tree->kind = Tree::Kind::kNumber;
    } else {
      at_ = start;
      return Fail(absl::StrCat("expected a value, got ", Here()));
    }
    return true;
  }

  // -? (0 | [1-9][0-9]*) (. [0-9]+)? ([eE] [+-]? [0-9]+)?
  static bool IsNumber(absl::string_view text) {
    const auto digits = [&text]() {
      const size_t count = std::min(text.find_first_not_of("0123456789"), text.size());
      text.remove_prefix(count);
      return count;
    };
    const auto take = [&text](absl::string_view any_of) {
      const bool found = !text.empty() && absl::StrContains(any_of, text.substr(0, 1));
      if (found) text.remove_prefix(1);
      return found;
    };
    take("-");
    const bool zero = !text.empty() && text[0] == '0';
    const size_t whole = digits();
    if (whole == 0 || (zero && whole > 1)) return false;
    if (take(".") && digits() == 0) return false;
    if (take("eE")) {
      take("+-");
      if (digits() == 0) return false;
    }
    return text.empty();
  }

  const absl::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
  std::string error_;
};

}  // namespace

absl::StatusOr<Tree> ParseJson(absl::string_view text) {
  if (const absl::Status status = CheckUtf8(text); !status.ok()) return status;
  return Reader(text).ReadAll();
}

}  // namespace fp8kvd::config
