#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "coll/report.h"
#include "convoy/work.h"
#include "ddp/verdict.h"

namespace convoy {

// One reduction of all gradients on one rank, from its first operation to its verdict: how far it
// has come, and how it stands. What a rank does in it is in Reducer::Impl.
//
// Invariants: the outcome only gets worse, and the text is that of the worst. The first operation
// of a round is the one in which ranks that do different things find that out: issue() lets just
// that one fail; afterwards all ranks issue the same ones.
struct Round {
  using Clock = std::chrono::steady_clock;

  bool open = false;
  bool begun = false;     // its first step is done
  const char* what = "";  // began it
  Clock::time_point entered, last_gradient;
  std::set<std::uint64_t> visited;  // forwards, by backwards of this round
  bool launches_late = false;       // all buckets go at the end
  std::size_t next = 0;             // bucket to launch
  std::size_t arrivals = 0;
  double weight = 1;

  Ending outcome = Ending::kGood;
  std::string text;

  bool first = false;  // no operation was issued yet
  // The first one is under way: the message of a deferred bucket, or `meeting`.
  bool first_in_port = false, first_is_meeting = false;
  bool met = false;              // before hooks
  std::optional<Work> meeting;   // under way
  bool late = false;             // this rank's first one was another: the round's is over
  bool began_elsewhere = false;  // this rank did not begin it

  // `meets`: ranks meet before the first hook.
  void begin(bool meets) {
    open = first = true;
    begun = first_in_port = first_is_meeting = false;
    met = !meets;
    meeting.reset();
    next = arrivals = 0;
    outcome = Ending::kGood;
    text.clear();
  }
  void enter(const char* by) {
    entered = last_gradient = Clock::now();
    what = by;
  }
  void worsen(Ending to, std::string why) {
    if (to <= outcome) return;
    outcome = to;
    text = std::move(why);
  }

  // An operation of the round. False: it was the first one, ranks called different things, and
  // absorb(disagreement) says that they all go on with the next one.
  template <class Function, class Absorb>
  bool issue(Function operation, Absorb absorb) {
    if (std::exchange(late, false)) return false;
    return go_on_if(std::exchange(first, false), operation, absorb);
  }
  // The same for one that may have been the first.
  template <class Function, class Absorb>
  static bool go_on_if(bool was_first, Function operation, Absorb absorb) {
    try {
      operation();
    } catch (const coll::Disagreement& e) {
      if (!was_first || !absorb(e)) throw;
      return false;
    }
    return true;
  }
};

}  // namespace convoy
