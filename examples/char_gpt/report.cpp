#include "report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <numeric>
#include <sstream>

namespace {

// Means of `count` equal parts.
std::vector<double> shortened(const std::vector<double>& values, std::size_t count) {
  std::vector<double> means;
  count = std::min(count, values.size());
  for (std::size_t i = 0; i < count; ++i) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i * values.size() / count);
    const auto end = values.begin() + static_cast<std::ptrdiff_t>((i + 1) * values.size() / count);
    means.push_back(std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin));
  }
  return means;
}

// Where things are in the picture.
struct Frame {
  double left = 70, right = 790, top = 50, bottom = 400;
  double last = 0, low = 0, high = 0;  // seconds; losses

  double x(double seconds) const { return left + (right - left) * seconds / last; }
  double y(double loss) const { return top + (bottom - top) * (high - loss) / (high - low); }
};

Frame frame_of(const std::vector<Curve>& curves) {
  Frame frame;
  frame.low = 1e9;
  for (const auto& curve : curves) {
    for (const double loss : shortened(curve.losses, 300)) {
      frame.low = std::min(frame.low, loss);
      frame.high = std::max(frame.high, loss);
    }
    if (!curve.seconds.empty()) frame.last = std::max(frame.last, curve.seconds.back());
  }
  frame.last = std::max(frame.last, 1e-3);
  const auto steps = ticks(frame.low, frame.high, 8);
  const double step = steps.size() > 1 ? steps[1] - steps[0] : 1;
  frame.low = std::floor(frame.low / step) * step;
  frame.high = std::max(std::ceil(frame.high / step) * step, frame.low + step);
  return frame;
}

void draw_axes(std::ostream& out, const Frame& frame) {
  for (const double loss : ticks(frame.low, frame.high, 8)) {
    out << "<line x1='" << frame.left << "' x2='" << frame.right << "' y1='" << frame.y(loss)
        << "' y2='" << frame.y(loss) << "' stroke='#ddd'/><text x='" << frame.left - 8 << "' y='"
        << frame.y(loss) + 4 << "' text-anchor='end'>" << loss << "</text>\n";
  }
  for (const double second : ticks(0, frame.last, 10)) {
    out << "<line x1='" << frame.x(second) << "' x2='" << frame.x(second) << "' y1='"
        << frame.bottom << "' y2='" << frame.bottom + 5 << "' stroke='#888'/><text x='"
        << frame.x(second) << "' y='" << frame.bottom + 20 << "' text-anchor='middle'>" << second
        << "</text>\n";
  }
  out << "<line x1='" << frame.left << "' x2='" << frame.right << "' y1='" << frame.bottom
      << "' y2='" << frame.bottom << "' stroke='#888'/>\n<text x='"
      << (frame.left + frame.right) / 2 << "' y='" << frame.bottom + 42
      << "' text-anchor='middle'>time of training, seconds</text>\n<text transform='translate(20 "
      << (frame.top + frame.bottom) / 2
      << ") rotate(-90)' text-anchor='middle'>loss, nats per character</text>\n";
}

}  // namespace

double Curve::seconds_per_step() const {
  std::vector<double> steps;
  const std::size_t first = std::max<std::size_t>(1, seconds.size() / 2);
  for (std::size_t i = first; i < seconds.size(); ++i) steps.push_back(seconds[i] - seconds[i - 1]);
  if (steps.empty()) return 0;
  const auto middle = steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2);
  std::nth_element(steps.begin(), middle, steps.end());
  return *middle;
}

std::string progress_line(const Progress& progress) {
  constexpr std::size_t kWidth = 24;
  const double part = std::clamp(progress.seconds / progress.limit, 0.0, 1.0);
  const auto full = static_cast<std::size_t>(std::lround(kWidth * part));
  std::ostringstream line;
  line << "[" << std::string(full, '#') << std::string(kWidth - full, '.') << "] " << std::setw(4)
       << progress.step << " steps, " << std::fixed << std::setprecision(0) << std::setw(3)
       << progress.seconds << " of " << progress.limit << " s, loss " << std::setprecision(3)
       << progress.loss << std::setprecision(0) << ", " << progress.tokens_per_second
       << " tokens/s, waiting for gradients " << std::setprecision(1) << 100 * progress.waiting
       << " % of the step";
  return line.str();
}

std::string sparkline(const std::vector<double>& losses, int width) {
  static constexpr std::array<const char*, 8> kBars = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const auto means = shortened(losses, static_cast<std::size_t>(width));
  if (means.empty()) return {};
  const auto [low, high] = std::minmax_element(means.begin(), means.end());
  std::string line;
  for (const double mean : means) {
    const double part = *high > *low ? (mean - *low) / (*high - *low) : 0;
    line += kBars.at(static_cast<std::size_t>(std::clamp(static_cast<int>(part * 8), 0, 7)));
  }
  return line;
}

std::vector<double> ticks(double low, double high, int most) {
  const double least = std::max(high - low, 1e-9) / std::max(most - 1, 1);
  const double power = std::pow(10, std::floor(std::log10(least)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (factor * power >= least) step = factor * power;
  }
  std::vector<double> found;
  const auto first = static_cast<std::int64_t>(std::ceil(low / step - 1e-9));
  const auto last = static_cast<std::int64_t>(std::floor(high / step + 1e-9));
  for (auto i = first; i <= last; ++i) found.push_back(static_cast<double>(i) * step);
  return found;
}

void write_svg(const std::string& path, const std::vector<Curve>& curves,
               const std::string& title) {
  static constexpr std::array<const char*, 4> kColors = {"#1f6feb", "#d1570f", "#2da44e",
                                                         "#8250df"};
  const Frame frame = frame_of(curves);
  std::ofstream out(path);
  out << std::setprecision(6)
      << "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 820 460' "
         "font-family='sans-serif' font-size='13'>\n<rect width='820' height='460' fill='white'/>\n"
      << "<text x='" << frame.left << "' y='28' font-size='15'>" << title << "</text>\n";
  draw_axes(out, frame);
  for (std::size_t c = 0; c < curves.size(); ++c) {
    const char* color = kColors.at(c % kColors.size());
    const auto losses = shortened(curves[c].losses, 300), times = shortened(curves[c].seconds, 300);
    out << "<polyline fill='none' stroke='" << color << "' stroke-width='2' points='";
    for (std::size_t i = 0; i < losses.size(); ++i) {
      out << frame.x(times[i]) << "," << frame.y(losses[i]) << " ";
    }
    const double y = frame.top + 16 + 20 * static_cast<double>(c);
    out << "'/>\n<line x1='560' x2='590' y1='" << y - 4 << "' y2='" << y - 4 << "' stroke='"
        << color << "' stroke-width='2'/><text x='598' y='" << y << "'>" << curves[c].name
        << "</text>\n";
  }
  out << "</svg>\n";
}
