#include "server/ops/log.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

namespace fp8kvd::ops {
namespace {

// Known fault: log injection by client strings.
TEST(Escaped, ControlsAndBrokenBytesBecomeText) {
  EXPECT_EQ(Escaped("plain \"text\" \\"), "plain \"text\" \\");
  EXPECT_EQ(Escaped("a\nb\tc\r\x1B[31m"), "a\\nb\\tc\\x0d\\x1b[31m");
  EXPECT_EQ(Escaped(std::string("\0", 1)), "\\x00");
  EXPECT_EQ(Escaped("\x7F\xC2\x85\xE2\x80\xA8"), "\\x7f\\xc2\\x85\\xe2\\x80\\xa8");  // DEL, NEL, LS
  EXPECT_EQ(Escaped("\xFF\xC0\xAF\xED\xA0\x80"), "\\xff\\xc0\\xaf\\xed\\xa0\\x80");
  EXPECT_EQ(Escaped("gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80"), "gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80");
  EXPECT_EQ(Escaped("cut \xF0\x9F\x98"), "cut \\xf0\\x9f\\x98");
}

TEST(JsonEscaped, IsTheInsideOfAString) {
  EXPECT_EQ(JsonEscaped("a\"b\\c\nd\x01"), "a\\\"b\\\\c\\nd\\u0001");
  EXPECT_EQ(JsonEscaped("\xFF"), "\\u00ff");
}

std::string Logged(config::LogFormat format, const std::string& message) {
  SetUpLog({.log_level = config::LogLevel::kInfo, .log_format = format});
  testing::internal::CaptureStderr();
  spdlog::info("model \"{}\" is unknown", message);
  spdlog::debug("not shown");
  return testing::internal::GetCapturedStderr();
}

TEST(Log, AClientCannotForgeALine) {
  const std::string evil = "x\n2026-01-01T00:00:00Z error forged\",\"level\":\"error";
  for (const config::LogFormat format : {config::LogFormat::kText, config::LogFormat::kJson}) {
    const std::string text = Logged(format, evil);
    EXPECT_EQ(text.find('\n'), text.size() - 1) << text;
  }
  EXPECT_THAT(Logged(config::LogFormat::kJson, evil),
              testing::HasSubstr(R"("message":"model \"x\n2026)"));
  EXPECT_THAT(Logged(config::LogFormat::kText, evil), testing::HasSubstr(R"(info model "x\n2026)"));
}

}  // namespace
}  // namespace fp8kvd::ops
