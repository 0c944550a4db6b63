// client/cc/ctl/svg.h: a drawing as SVG text, for plots that stand in a file of their own or within
// an HTML report. Colours follow the reader's light or dark preference; texts are escaped.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace fp8kvd::ctl {

// '&', '<', '>' and quotes as entities; control characters become '?'.
std::string EscapeXml(absl::string_view text);

enum class Anchor { kStart, kMiddle, kEnd };

class Svg {
 public:
  // In pixels at its natural size; it scales with its place.
  Svg(double width, double height);

  // style: one of the classes of kSvgStyle ("ink", "muted", "grid", "s0" … "s5"), or "#rrggbb".
  void Rect(double x, double y, double width, double height, absl::string_view style);
  void Line(double x1, double y1, double x2, double y2, absl::string_view style,
            double thickness = 1);
  void Path(const std::vector<std::pair<double, double>>& points, absl::string_view style,
            double thickness = 2);
  // tip: shown when the pointer rests on it.
  void Dot(double x, double y, absl::string_view style, absl::string_view tip);
  void Text(double x, double y, absl::string_view text, Anchor anchor = Anchor::kStart,
            absl::string_view style = "ink", int size = 12);

  // A whole <svg> element, its style included.
  std::string str() const;

 private:
  void Open(absl::string_view element, absl::string_view style, bool stroke);

  double width_;
  double height_;
  std::string body_;
};

// The declarations that every Svg carries.
extern const char kSvgStyle[];

}  // namespace fp8kvd::ctl
