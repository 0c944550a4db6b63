#include "config/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fp8kvd::config {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

Tree Parsed(absl::string_view text) {
  const auto tree = ParseJson(text);
  EXPECT_TRUE(tree.ok()) << text << ": " << tree.status();
  return tree.value_or(Tree{});
}

std::string Refusal(absl::string_view text) {
  const auto tree = ParseJson(text);
  EXPECT_EQ(tree.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(tree.status().message());
}

TEST(Json, KeepsNamesTextsAndLines) {
  const Tree tree = Parsed("{\n \"a\": 1.5e3,\n\n \"b\": [true, null, \"x\"],\n \"c\":\n {}}");
  ASSERT_EQ(tree.children.size(), 3u);
  EXPECT_EQ(tree.Find("a")->text, "1.5e3");
  EXPECT_EQ(tree.Find("a")->line, 2);
  ASSERT_EQ(tree.Find("b")->children.size(), 3u);
  EXPECT_EQ(tree.Find("b")->line, 4);
  EXPECT_EQ(tree.Find("b")->children[0].kind, Tree::Kind::kBool);
  EXPECT_EQ(tree.Find("b")->children[1].kind, Tree::Kind::kNull);
  EXPECT_EQ(tree.Find("b")->children[2].text, "x");
  EXPECT_EQ(tree.Find("c")->line, 5);  // where its name stands
  EXPECT_EQ(tree.Find("d"), nullptr);
}

TEST(Json, DecodesEscapes) {
  EXPECT_EQ(Parsed(R"("\"\\\/\b\f\n\r\t")").text, "\"\\/\b\f\n\r\t");
  EXPECT_EQ(Parsed(R"("\u0041\u00e9\u20AC\ud83d\ude00")").text,
            "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
}

TEST(Json, TakesTheNumbersOfTheGrammarAndPythonsThree) {
  for (const char* good :
       {"0", "-0", "10", "1.25", "1e5", "1E-5", "-1.5e+10", "NaN", "Infinity", "-Infinity"}) {
    EXPECT_EQ(Parsed(good).kind, Tree::Kind::kNumber) << good;
  }
  for (const char* bad : {"01", "+1", ".5", "1.", "1e", "1e+", "--1", "0x10", "1_0", "nan", "-"}) {
    EXPECT_THAT(Refusal(bad), StartsWith("line 1: expected a value")) << bad;
  }
}

TEST(Json, AnErrorNamesItsLine) {
  EXPECT_THAT(Refusal("{\n\n\"a\" 1}"), StartsWith("line 3: expected ':'"));
  EXPECT_THAT(Refusal("{\"a\": 1\n \"b\": 2}"), StartsWith("line 2: expected ',' or '}'"));
  EXPECT_THAT(Refusal("[1,\n2\n"), StartsWith("line 3: expected ',' or ']', got the end"));
  EXPECT_THAT(Refusal("{\"a\": 1,}"), HasSubstr("expected a name in quotes"));
  EXPECT_THAT(Refusal("[1] 2"), HasSubstr("text after the value"));
  EXPECT_THAT(Refusal(""), HasSubstr("got the end of the file"));
  EXPECT_THAT(Refusal("{\"a\": \"x\ny\"}"), HasSubstr("does not end on its line"));
  EXPECT_THAT(Refusal("\"abc"), HasSubstr("does not end on its line"));
}

TEST(Json, ANameThatAnObjectHasTwiceIsRefused) {
  EXPECT_THAT(Refusal("{\"a\": 1,\n \"a\": 2}"), StartsWith("line 2: \"a\" stands twice"));
}

TEST(Json, BrokenEscapesAreRefused) {
  for (const char* bad : {R"("\x")", R"("\u12")", R"("\u12g4")", R"("\ud83d")", R"("\ud83dx")",
                          R"("\ud83d\u0041")", R"("\ude00")", "\"\\"}) {
    EXPECT_THAT(Refusal(bad), StartsWith("line 1: ")) << bad;
  }
}

TEST(Json, BytesThatAreNotUtf8AreRefusedWithTheirLine) {
  for (const char* bad : {"\xFF", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82"}) {
    EXPECT_THAT(Refusal("{\n\"a\": \"" + std::string(bad) + "\"}"), StartsWith("line 2: bytes"))
        << bad;
  }
}

TEST(Json, NestingIsBounded) {
  EXPECT_EQ(Parsed(std::string(kTreeDepthMax, '[') + std::string(kTreeDepthMax, ']')).kind,
            Tree::Kind::kArray);
  EXPECT_THAT(Refusal(std::string(1 << 20, '[')), HasSubstr("nested deeper than 32"));
}

TEST(Json, AZeroByteIsNoText) {
  EXPECT_THAT(Refusal(std::string("\"a\0b\"", 5)), HasSubstr("does not end on its line"));
  EXPECT_THAT(Refusal(std::string("\"\\\0\"", 4)), HasSubstr("a backslash"));
}

}  // namespace
}  // namespace fp8kvd::config
