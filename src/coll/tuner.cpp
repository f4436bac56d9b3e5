#include "coll/tuner.h"

namespace convoy::coll {
namespace {

StoreHint other(StoreHint hint) {
  return hint == StoreHint::kCached ? StoreHint::kStreaming : StoreHint::kCached;
}
std::size_t index(StoreHint hint) { return static_cast<std::size_t>(hint); }

}  // namespace

// By what fits where: second-level caches, third-level caches, neither.
int Tuner::class_of(std::size_t bytes) {
  constexpr std::size_t kMega = std::size_t{1} << 20;
  constexpr std::array kEnds = {kMega / 2, 2 * kMega, 8 * kMega, 32 * kMega};
  int found = 0;
  for (const std::size_t end : kEnds) found += bytes > end ? 1 : 0;
  return found;
}

StoreHint Tuner::choose(Route route, std::size_t bytes) {
  Class& seen = find(route, bytes);
  const StoreHint first = route == Route::kDirect ? StoreHint::kStreaming : guess_;
  if (seen.cost[index(first)] == 0) return first;
  if (seen.cost[index(other(first))] == 0) return other(first);
  const StoreHint better =
      seen.cost[index(StoreHint::kCached)] < seen.cost[index(StoreHint::kStreaming)]
          ? StoreHint::kCached
          : StoreHint::kStreaming;
  return seen.operations % kPause == 0 ? other(better) : better;
}

void Tuner::record(Route route, std::size_t bytes, StoreHint hint, std::chrono::nanoseconds took) {
  if (bytes == 0) return;
  Class& seen = find(route, bytes);
  ++seen.operations;
  double& cost = seen.cost[index(hint)];
  const double now = static_cast<double>(took.count()) / static_cast<double>(bytes) + 1e-9;
  // What is better than expected counts at once; what is worse may have been a disturbance.
  cost = cost == 0 || now < cost ? now : 0.75 * cost + 0.25 * now;
}

}  // namespace convoy::coll
