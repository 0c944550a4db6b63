// config/tree.h: what a file said, before anybody knows what it means: names, texts and the lines
// where they stood. Made by json.h and textproto.h, read by load.h and hf_config.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace fp8kvd::config {

// One value. A tree is as deep as kTreeDepthMax at most.
struct Tree {
  enum class Kind : uint8_t { kNull, kBool, kNumber, kText, kWord, kArray, kObject };

  Kind kind = Kind::kNull;
  int line = 0;                // 1-based
  std::string name;            // in its object; empty in an array
  std::string text;            // bool, number and word (an enumerator) as written, a text decoded
  std::vector<Tree> children;  // of an array or an object, in the order of the file

  // The member of that name, or null if there is none or this is no object.
  const Tree* Find(absl::string_view member) const {
    if (kind != Kind::kObject) return nullptr;
    for (const Tree& child : children) {
      if (child.name == member) return &child;
    }
    return nullptr;
  }
};

inline constexpr int kTreeDepthMax = 32;

// "a text", "an object", …: for errors.
inline const char* KindName(Tree::Kind kind) {
  constexpr const char* kNames[] = {"null",   "true or false", "a number", "a text",
                                    "a word", "an array",      "an object"};
  return kNames[static_cast<int>(kind)];
}

}  // namespace fp8kvd::config
