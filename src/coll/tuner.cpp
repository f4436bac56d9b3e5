#include "coll/tuner.h"

#include <algorithm>

namespace convoy::coll {

// By what fits where: second-level caches, third-level caches, neither.
std::size_t Tuner::class_of(std::size_t bytes) {
  constexpr std::size_t kMega = std::size_t{1} << 20;
  constexpr std::array kEnds = {kMega / 2, 2 * kMega, 8 * kMega, 32 * kMega};
  std::size_t found = 0;
  for (const std::size_t end : kEnds) found += bytes > end ? 1 : 0;
  return found;
}

Way Tuner::choose(int kind, Route route, std::size_t bytes) {
  const Class& seen = find(kind, route, bytes);
  const auto ways = static_cast<std::uint32_t>(route == Route::kMoved ? 3 : 2);
  // First each of them once, beginning with the guess.
  const auto first = static_cast<std::uint32_t>(route == Route::kDirect ? Way::kStreaming : guess_);
  for (std::uint32_t i = 0; i < ways; ++i) {
    const std::uint32_t way = (first + i) % ways;
    if (seen.cost[way] == 0) return static_cast<Way>(way);
  }
  const auto best = static_cast<std::uint32_t>(
      std::min_element(seen.cost.begin(), seen.cost.begin() + ways) - seen.cost.begin());
  if (seen.operations % kPause != 0) return static_cast<Way>(best);
  const std::uint32_t turn = 1 + seen.operations / kPause % (ways - 1);
  return static_cast<Way>((best + turn) % ways);
}

void Tuner::record(int kind, Route route, std::size_t bytes, Way way,
                   std::chrono::nanoseconds took) {
  if (bytes == 0) return;
  Class& seen = find(kind, route, bytes);
  ++seen.operations;
  float& cost = seen.cost[static_cast<std::size_t>(way)];
  const auto now = static_cast<float>(took.count()) / static_cast<float>(bytes) + 1e-9F;
  // What is better than expected counts at once; what is worse may have been a disturbance.
  cost = cost == 0 || now < cost ? now : 0.75F * cost + 0.25F * now;
}

}  // namespace convoy::coll
