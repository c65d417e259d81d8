#include "coordinator/status/loss_plot.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <vector>

namespace oomb::status {

namespace {

struct Point {
  double step = 0, value = 0;
};

struct Curves {
  std::vector<Point> loss, held_out;
};

Curves read_curves(std::istream& in) {
  Curves curves;
  for (std::string text; std::getline(in, text);) {
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number()) continue;
    const double step = line["step"].get<double>();
    const auto add = [&](const char* key, std::vector<Point>& points) {
      if (line.contains(key) && line[key].is_number()) points.push_back({step, line[key].get<double>()});
    };
    add("loss", curves.loss);
    add("eval_loss", curves.held_out);
  }
  return curves;
}

// Pixels of the picture and of the frame in it.
constexpr double kWidth = 640, kHeight = 240, kLeft = 48, kRight = 16, kTop = 28, kBottom = 32;

class Frame {
 public:
  explicit Frame(const std::vector<Point>& points) {
    low_ = high_ = points.front().value;
    for (const Point& p : points) {
      low_ = std::min(low_, p.value);
      high_ = std::max(high_, p.value);
      last_ = std::max(last_, p.step);
    }
    low_ = std::floor(low_ * 2) / 2;
    high_ = std::max(std::ceil(high_ * 2) / 2, low_ + 0.5);
  }
  double x(double step) const { return kLeft + step / last_ * (kWidth - kLeft - kRight); }
  double y(double value) const { return kTop + (high_ - value) / (high_ - low_) * (kHeight - kTop - kBottom); }
  double low() const { return low_; }
  double high() const { return high_; }
  double last() const { return last_; }

 private:
  double low_ = 0, high_ = 1, last_ = 1;
};

void draw_axes(std::ostream& out, const Frame& frame) {
  const double step = frame.high() - frame.low() > 3 ? 1.0 : 0.5;
  for (double value = frame.low(); value <= frame.high() + 1e-9; value += step) {
    out << "<line x1='" << kLeft << "' x2='" << kWidth - kRight << "' y1='" << frame.y(value) << "' y2='"
        << frame.y(value) << "' stroke='#ddd'/><text x='" << kLeft - 6 << "' y='" << frame.y(value) + 4
        << "' text-anchor='end'>" << value << "</text>\n";
  }
  for (int i = 0; i <= 4; ++i) {
    const double at = std::round(frame.last() * i / 4);
    out << "<text x='" << frame.x(at) << "' y='" << kHeight - kBottom + 18 << "' text-anchor='middle'>" << at
        << "</text>\n";
  }
}

void draw_curve(std::ostream& out, const Frame& frame, const std::vector<Point>& points, const char* colour) {
  out << "<polyline fill='none' stroke='" << colour << "' stroke-width='1.5' points='";
  for (const Point& p : points) out << frame.x(p.step) << "," << frame.y(p.value) << " ";
  out << "'/>\n";
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

bool write_loss_plot(const std::filesystem::path& metrics, const std::filesystem::path& svg, const std::string& title) {
  std::ifstream in(metrics);
  const Curves curves = read_curves(in);
  if (curves.loss.empty()) return false;
  const Frame frame(curves.loss);
  std::ostringstream out;
  out.precision(4);
  out << "<svg xmlns='http://www.w3.org/2000/svg' width='" << kWidth << "' height='" << kHeight
      << "' font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n<text x='"
      << kLeft << "' y='18'>" << escaped(title) << "</text>\n";
  draw_axes(out, frame);
  draw_curve(out, frame, curves.loss, "#1f77b4");
  if (!curves.held_out.empty()) draw_curve(out, frame, curves.held_out, "#d62728");
  out << "</svg>\n";

  std::filesystem::path temporary = svg;
  temporary += ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << out.str();
  file.close();
  std::error_code error;
  if (!file) {
    std::filesystem::remove(temporary, error);
    return false;
  }
  std::filesystem::rename(temporary, svg, error);
  return !error;
}

}  // namespace oomb::status
