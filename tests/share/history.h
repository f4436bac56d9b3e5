#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/concat.h"

namespace convoy::share::test {

// A call of a bounded queue as a thread saw it. Times are places in one order of all beginnings and
// ends.
struct Call {
  enum Kind { kPut, kGet };
  static constexpr std::uint64_t kNever = UINT64_MAX;

  Kind kind = kPut;
  std::uint64_t begin = 0;
  std::uint64_t end = kNever;     // kNever: its process ended in it
  std::optional<int> value = {};  // kPut: always. kGet: nullopt: there was none
  bool done = true;               // kPut: false: there was no room
};

// Whether the calls can be put into one order, in which each lies between its beginning and its
// end, and in which a simple queue answers as they did (Wing and Gong's search, with the states
// that were seen before left out). Calls that did not end may have happened or not. At most 30 of
// them.
class LinearizabilityCheck {
 public:
  LinearizabilityCheck(std::vector<Call> calls, std::size_t capacity)
      : calls_(std::move(calls)), capacity_(capacity) {}

  bool holds() { return search(0, {}); }

 private:
  bool search(std::uint32_t done, const std::deque<int>& queue) {
    std::uint64_t first_end = Call::kNever;
    bool left = false;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      if (((done >> i) & 1) != 0) continue;
      first_end = std::min(first_end, calls_[i].end);
      left = left || calls_[i].end != Call::kNever;
    }
    if (!left) return true;
    std::string state = concat(done, ":");
    for (const int value : queue) state += concat(value, ",");
    if (!seen_.insert(state).second) return false;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      const Call& call = calls_[i];
      // Who began after another ended comes after it.
      if (((done >> i) & 1) != 0 || call.begin > first_end) continue;
      std::deque<int> next = queue;
      if (apply(call, next) && search(done | (std::uint32_t{1} << i), next)) return true;
    }
    return false;
  }

  bool apply(const Call& call, std::deque<int>& queue) const {
    const bool unknown = call.end == Call::kNever;
    if (call.kind == Call::kPut) {
      const bool room = queue.size() < capacity_;
      if (!unknown && call.done != room) return false;
      if (room) queue.push_back(*call.value);
      return true;
    }
    if (unknown || call.value) {
      if (queue.empty() || (!unknown && queue.front() != *call.value)) return false;
      queue.pop_front();
      return true;
    }
    return queue.empty();
  }

  const std::vector<Call> calls_;
  const std::size_t capacity_;
  std::set<std::string> seen_;
};

}  // namespace convoy::share::test
