#include "base/duration.h"

#include <cmath>

#include "base/concat.h"

namespace convoy {
namespace {

std::string trimmed(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return concat(std::round(value * scale) / scale);
}

}  // namespace

std::string format_duration(std::chrono::nanoseconds duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.01) return concat(trimmed(seconds, 3), " s");
  if (seconds < 1) return concat(trimmed(seconds, 2), " s");
  if (seconds < 120) return concat(trimmed(seconds, 1), " s");
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 2LL * 3600) return concat(whole / 60, " min ", whole % 60, " s");
  return concat(whole / 3600, " h ", whole / 60 % 60, " min");
}

}  // namespace convoy
