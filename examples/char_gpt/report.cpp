#include "report.h"

#include <algorithm>
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

}  // namespace

std::string progress_line(int step, int steps, double loss, double tokens_per_second,
                          double exposed_share) {
  constexpr int kWidth = 24;
  const int full = kWidth * step / steps;
  std::ostringstream line;
  line << "\r[" << std::string(static_cast<std::size_t>(full), '#')
       << std::string(static_cast<std::size_t>(kWidth - full), '.') << "] " << std::setw(4) << step
       << "/" << steps << std::fixed << std::setprecision(3) << "  loss " << loss
       << std::setprecision(0) << "  " << tokens_per_second << " tokens/s  compute "
       << 100 * (1 - exposed_share) << " %, waiting for gradients " << std::setprecision(1)
       << 100 * exposed_share << " % ";
  return line.str();
}

std::string sparkline(const std::vector<double>& values, int width) {
  static const char* const bars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const auto means = shortened(values, static_cast<std::size_t>(width));
  if (means.empty()) return {};
  const auto [low, high] = std::minmax_element(means.begin(), means.end());
  std::string line;
  for (const double mean : means) {
    const double part = *high > *low ? (mean - *low) / (*high - *low) : 0;
    line += bars[std::clamp(static_cast<int>(part * 8), 0, 7)];
  }
  return line;
}

void write_svg(const std::string& path, const std::vector<double>& losses,
               const std::string& title) {
  constexpr double kWidth = 720, kHeight = 360, kLeft = 60, kTop = 40;
  const auto means = shortened(losses, 300);
  const double high = *std::max_element(means.begin(), means.end());
  const double low = *std::min_element(means.begin(), means.end());
  const auto y_of = [&](double loss) {
    return kTop + (high - loss) / std::max(1e-9, high - low) * kHeight;
  };
  std::ofstream out(path);
  out << std::fixed << std::setprecision(1)
      << "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 820 450' "
         "font-family='sans-serif' font-size='13'>\n<rect width='820' height='450' fill='white'/>\n"
      << "<text x='" << kLeft << "' y='24'>" << title << "</text>\n";
  for (int i = 0; i <= 4; ++i) {
    const double loss = low + (high - low) * i / 4;
    out << "<line x1='" << kLeft << "' x2='" << kLeft + kWidth << "' y1='" << y_of(loss) << "' y2='"
        << y_of(loss) << "' stroke='#ddd'/><text x='8' y='" << y_of(loss) + 4 << "'>"
        << std::setprecision(2) << loss << std::setprecision(1) << "</text>\n";
  }
  out << "<polyline fill='none' stroke='#1f6feb' stroke-width='2' points='";
  for (std::size_t i = 0; i < means.size(); ++i) {
    const double x = kLeft + kWidth * static_cast<double>(i) /
                                 std::max<double>(1, static_cast<double>(means.size() - 1));
    out << x << "," << y_of(means[i]) << " ";
  }
  out << "'/>\n<text x='" << kLeft << "' y='435'>step 1</text><text x='" << kLeft + kWidth
      << "' y='435' text-anchor='end'>step " << losses.size() << "</text>\n</svg>\n";
}
