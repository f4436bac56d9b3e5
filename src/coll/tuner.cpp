#include "coll/tuner.h"

#include <algorithm>
#include <span>

namespace convoy::coll {
namespace {

std::span<const Way> ways_of(Route route) {
  static constexpr std::array kMoving = {Way::kCached, Way::kStreaming, Way::kRead};
  static constexpr std::array kCombining = {Way::kCached, Way::kStreaming, Way::kMixed};
  if (route == Route::kMoved) return kMoving;
  if (route == Route::kCombined) return kCombining;
  return std::span(kMoving).first(2);
}

}  // namespace

// By what fits where: second-level caches, third-level caches, neither.
std::size_t Tuner::class_of(std::size_t bytes) {
  constexpr std::size_t kMega = std::size_t{1} << 20;
  constexpr std::array kEnds = {kMega / 2, 2 * kMega, 8 * kMega, 32 * kMega};
  std::size_t found = 0;
  for (const std::size_t end : kEnds) found += bytes > end ? 1 : 0;
  return found;
}

float Tuner::Notes::cost() const {
  return *std::min_element(recent.begin(), recent.begin() + std::min(tries, kRecent));
}

Way Tuner::choose(int kind, Route route, std::size_t bytes) {
  const Class& seen = find(kind, route, bytes);
  const auto notes = [&](Way way) -> const Notes& {
    return seen.notes[static_cast<std::size_t>(way)];
  };
  const std::span<const Way> ways = ways_of(route);
  // First each of them some times, beginning with the guess: one try may have been disturbed.
  const Way first = route == Route::kDirect ? Way::kStreaming : guess_;
  if (notes(first).tries < kFirstTries) return first;
  for (const Way way : ways) {
    if (notes(way).tries < kFirstTries) return way;
  }
  // What was not tried for long seems better and better, until it is tried again: soon if it was
  // nearly as good, late if it was much worse. So trying costs less than a hundredth of the time.
  return *std::ranges::min_element(ways, {}, [&](Way way) {
    const auto age = static_cast<float>(seen.operations - notes(way).last);
    return notes(way).cost() / (1 + age / kPatience);
  });
}

void Tuner::record(int kind, Route route, std::size_t bytes, Way way,
                   std::chrono::nanoseconds took) {
  if (bytes == 0) return;
  Class& seen = find(kind, route, bytes);
  Notes& notes = seen.notes[static_cast<std::size_t>(way)];
  notes.recent[notes.tries % kRecent] =
      static_cast<float>(took.count()) / static_cast<float>(bytes) + 1e-9F;
  ++notes.tries;
  notes.last = ++seen.operations;
}

}  // namespace convoy::coll
