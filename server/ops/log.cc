#include "server/ops/log.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace fp8kvd::ops {
namespace {

bool IsContinuation(absl::string_view text, size_t at) {
  return at < text.size() && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80;
}

// Bytes of the printable UTF-8 character at `at`, 0 where there is none: controls (C0, DEL, C1),
// line and paragraph separators, and what is no shortest form.
size_t PrintableAt(absl::string_view text, size_t at) {
  const auto byte = static_cast<uint8_t>(text[at]);
  const auto next = at + 1 < text.size() ? static_cast<uint8_t>(text[at + 1]) : uint8_t{0};
  if (byte < 0x80) return byte >= 0x20 && byte != 0x7F ? 1 : 0;
  if (byte >= 0xC2 && byte <= 0xDF) {
    if (byte == 0xC2 && next < 0xA0) return 0;  // C1 controls
    return IsContinuation(text, at + 1) ? 2 : 0;
  }
  const bool two_more = IsContinuation(text, at + 1) && IsContinuation(text, at + 2);
  if (byte >= 0xE0 && byte <= 0xEF) {
    if (!two_more || (byte == 0xE0 && next < 0xA0) || (byte == 0xED && next > 0x9F)) return 0;
    const auto last = static_cast<uint8_t>(text[at + 2]);
    if (byte == 0xE2 && next == 0x80 && (last == 0xA8 || last == 0xA9)) return 0;  // separators
    return 3;
  }
  if (byte >= 0xF0 && byte <= 0xF4) {
    if (!two_more || !IsContinuation(text, at + 3)) return 0;
    if ((byte == 0xF0 && next < 0x90) || (byte == 0xF4 && next > 0x8F)) return 0;
    return 4;
  }
  return 0;
}

template <typename EscapeByte>
std::string EscapeWith(absl::string_view text, EscapeByte escape_byte) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t printable = PrintableAt(text, at);
    if (printable == 0 || text[at] == '"' || text[at] == '\\') {
      out += escape_byte(text[at]);
      ++at;
    } else {
      absl::StrAppend(&out, text.substr(at, printable));
      at += printable;
    }
  }
  return out;
}

// What a pattern's %v would print, escaped.
class EscapedMessage final : public spdlog::custom_flag_formatter {
 public:
  explicit EscapedMessage(bool is_json) : is_json_(is_json) {}

  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& to) override {
    const absl::string_view text(message.payload.data(), message.payload.size());
    const std::string escaped = is_json_ ? JsonEscaped(text) : Escaped(text);
    to.append(escaped.data(), escaped.data() + escaped.size());
  }
  std::unique_ptr<spdlog::custom_flag_formatter> clone() const override {
    return std::make_unique<EscapedMessage>(is_json_);
  }

 private:
  const bool is_json_;
};

spdlog::level::level_enum ToLevel(config::LogLevel level) {
  switch (level) {
    case config::LogLevel::kDebug:
      return spdlog::level::debug;
    case config::LogLevel::kInfo:
      return spdlog::level::info;
    case config::LogLevel::kWarning:
      return spdlog::level::warn;
    case config::LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

std::string Escaped(absl::string_view text) {
  return EscapeWith(text, [](char c) -> std::string {
    if (c == '"' || c == '\\') return {c};
    if (c == '\n') return "\\n";
    if (c == '\t') return "\\t";
    return absl::StrFormat("\\x%02x", static_cast<unsigned char>(c));
  });
}

std::string JsonEscaped(absl::string_view text) {
  return EscapeWith(text, [](char c) -> std::string {
    if (c == '"' || c == '\\') return {'\\', c};
    if (c == '\n') return "\\n";
    if (c == '\t') return "\\t";
    return absl::StrFormat("\\u%04x", static_cast<unsigned char>(c));
  });
}

void SetLogLevel(config::LogLevel level) { spdlog::default_logger()->set_level(ToLevel(level)); }

void SetUpLog(const config::LogOptions& options) {
  const bool is_json = options.log_format == config::LogFormat::kJson;
  auto formatter = std::make_unique<spdlog::pattern_formatter>(spdlog::pattern_time_type::utc);
  formatter->add_flag<EscapedMessage>('*', is_json);
  formatter->set_pattern(is_json ? R"({"time":"%Y-%m-%dT%H:%M:%S.%fZ","level":"%l","message":"%*"})"
                                 : "%Y-%m-%dT%H:%M:%S.%fZ %l %*");
  auto logger =
      std::make_shared<spdlog::logger>("fp8kvd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::move(formatter));
  logger->set_level(ToLevel(options.log_level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace fp8kvd::ops
