#include "client/cc/ctl/svg.h"

#include "absl/strings/str_format.h"

namespace fp8kvd::ctl {

const char kSvgStyle[] =
    "text{font-family:system-ui,sans-serif}"
    ".ink{fill:#1f2328}.muted{fill:#656d76}.paper{fill:#ffffff}"
    ".ink-l{stroke:#1f2328}.grid-l{stroke:#d8dee4}"
    ".s0{fill:#0969da}.s0-l{stroke:#0969da}.s1{fill:#bc4c00}.s1-l{stroke:#bc4c00}"
    ".s2{fill:#1a7f37}.s2-l{stroke:#1a7f37}.s3{fill:#8250df}.s3-l{stroke:#8250df}"
    ".s4{fill:#cf222e}.s4-l{stroke:#cf222e}.s5{fill:#9a6700}.s5-l{stroke:#9a6700}"
    "@media(prefers-color-scheme:dark){"
    ".ink{fill:#e6edf3}.muted{fill:#8d96a0}.paper{fill:#0d1117}"
    ".ink-l{stroke:#e6edf3}.grid-l{stroke:#30363d}"
    ".s0{fill:#58a6ff}.s0-l{stroke:#58a6ff}.s1{fill:#f0883e}.s1-l{stroke:#f0883e}"
    ".s2{fill:#3fb950}.s2-l{stroke:#3fb950}.s3{fill:#bc8cff}.s3-l{stroke:#bc8cff}"
    ".s4{fill:#ff7b72}.s4-l{stroke:#ff7b72}.s5{fill:#d29922}.s5-l{stroke:#d29922}}";

std::string EscapeXml(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return out;
}

Svg::Svg(double width, double height) : width_(width), height_(height) {}

void Svg::Open(absl::string_view element, absl::string_view style, bool stroke) {
  const bool colour = !style.empty() && style[0] == '#';
  absl::StrAppendFormat(&body_, "<%s ", element);
  if (colour) {
    absl::StrAppendFormat(&body_, "%s=\"%s\" ", stroke ? "stroke" : "fill", style);
  } else {
    absl::StrAppendFormat(&body_, "class=\"%s%s\" ", style, stroke ? "-l" : "");
  }
}

void Svg::Rect(double x, double y, double width, double height, absl::string_view style) {
  Open("rect", style, /*stroke=*/false);
  absl::StrAppendFormat(&body_, "x=\"%.5g\" y=\"%.5g\" width=\"%.5g\" height=\"%.5g\"/>\n", x, y,
                        width, height);
}

void Svg::Line(double x1, double y1, double x2, double y2, absl::string_view style,
               double thickness) {
  Open("line", style, /*stroke=*/true);
  absl::StrAppendFormat(&body_,
                        "stroke-width=\"%.3g\" x1=\"%.5g\" y1=\"%.5g\" x2=\"%.5g\" y2=\"%.5g\"/>\n",
                        thickness, x1, y1, x2, y2);
}

void Svg::Path(const std::vector<std::pair<double, double>>& points, absl::string_view style,
               double thickness) {
  Open("polyline", style, /*stroke=*/true);
  absl::StrAppendFormat(&body_, "fill=\"none\" stroke-width=\"%.3g\" points=\"", thickness);
  for (const auto& [x, y] : points) absl::StrAppendFormat(&body_, "%.5g,%.5g ", x, y);
  body_ += "\"/>\n";
}

void Svg::Dot(double x, double y, absl::string_view style, absl::string_view tip) {
  Open("circle", style, /*stroke=*/false);
  absl::StrAppendFormat(&body_, "cx=\"%.5g\" cy=\"%.5g\" r=\"4\"><title>%s</title></circle>\n", x,
                        y, EscapeXml(tip));
}

void Svg::Text(double x, double y, absl::string_view text, Anchor anchor, absl::string_view style,
               int size) {
  constexpr const char* kAnchors[] = {"start", "middle", "end"};
  Open("text", style, /*stroke=*/false);
  absl::StrAppendFormat(&body_,
                        "x=\"%.5g\" y=\"%.5g\" text-anchor=\"%s\" font-size=\"%d\">%s</text>\n", x,
                        y, kAnchors[static_cast<int>(anchor)], size, EscapeXml(text));
}

std::string Svg::str() const {
  return absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.5g %.5g\" width=\"%.5g\" "
      "height=\"%.5g\" role=\"img\">\n<style>%s</style>\n"
      "<rect class=\"paper\" width=\"100%%\" height=\"100%%\"/>\n%s</svg>\n",
      width_, height_, width_, height_, kSvgStyle, body_);
}

}  // namespace fp8kvd::ctl
