#include "launch/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/concat.h"

namespace convoy::launch {
namespace {

constexpr double kLongestSeconds = 10.0 * 365 * 24 * 3600;

std::string trimmed(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return concat(std::round(value * scale) / scale);
}

// Letters to insert, drop, replace or swap with a neighbour.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) cost[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) cost[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({replaced, cost[i - 1][j] + 1, cost[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

std::optional<std::chrono::nanoseconds> parse_duration(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value) || value < 0) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  double seconds = 0;
  if (unit.empty() || unit == "s") {
    seconds = value;
  } else if (unit == "ms") {
    seconds = value / 1000;
  } else if (unit == "m" || unit == "min") {
    seconds = value * 60;
  } else if (unit == "h") {
    seconds = value * 3600;
  } else {
    return std::nullopt;
  }
  if (seconds > kLongestSeconds) return std::nullopt;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

std::string format_bytes(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 1024) return concat(bytes, " B");
  if (bytes < 1024 * 1024) return concat(trimmed(value / 1024, 1), " KiB");
  if (bytes < 1024 * 1024 * 1024) return concat(trimmed(value / (1024 * 1024), 1), " MiB");
  if (bytes < std::uint64_t{1} << 40) {
    return concat(trimmed(value / (1024.0 * 1024 * 1024), 1), " GiB");
  }
  return concat(trimmed(value / (1024.0 * 1024 * 1024 * 1024), 1), " TiB");
}

std::optional<int> parse_int(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string format_ranks(std::vector<int> ranks) {
  if (ranks.empty()) return "no rank";
  std::sort(ranks.begin(), ranks.end());
  std::string list;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!list.empty()) list += ", ";
    list += std::to_string(ranks[i]);
    if (last > i) list += concat(last == i + 1 ? ", " : "-", ranks[last]);
    i = last + 1;
  }
  return concat(ranks.size() == 1 ? "rank " : "ranks ", list);
}

std::optional<std::string> nearest(std::string_view text,
                                   const std::vector<std::string>& candidates) {
  std::optional<std::string> best;
  // A third of the letters may be wrong, at least one and at most three.
  std::size_t limit = std::clamp<std::size_t>(text.size() / 3, 1, 3);
  for (const auto& candidate : candidates) {
    const std::size_t distance = edit_distance(text, candidate);
    if (distance > limit || (best && distance == limit)) continue;
    best = candidate;
    limit = distance;
  }
  return best;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const auto at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

}  // namespace convoy::launch
