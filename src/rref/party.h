#pragma once

#include <cstddef>
#include <deque>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "agent/seen_numbers.h"
#include "rref/entry.h"
#include "rref/link.h"

// Included by the files that implement Machine.
namespace convoy::rref {

// One incarnation of a worker, as the machine knows it.
struct Party {
  Party(WorkerId which, Incarnation number, const Link& begins)
      : worker(which), incarnation(number), link(begins) {}

  const WorkerId worker;
  const Incarnation incarnation;
  std::string name;
  bool met = false;
  bool lost = false;
  std::string why;  // it is lost
  Link link;
  Party* named_by = nullptr;  // who told of it first; until it is met
  std::size_t named = 0;      // workers that it told of, and that nobody has met
  std::size_t answers = 0;    // to its records, since it last said that it has taken some

  // Numbers that we give.
  std::uint64_t next_creation = 1;  // of values that we create there
  std::uint64_t next_fork = 1;      // of our references to values there
  std::uint64_t next_early = 1;     // of its references to values here that we tell it of
  std::uint64_t next_passage = 1;   // of references that we send to it

  // Those of its creations that have come, or will not be taken any more.
  agent::SeenNumbers created;
  // Those of its passages that have come, or will not be taken any more.
  agent::SeenNumbers taken;
  // Of these: what became of them is not known yet. Whether it wants to be told.
  std::unordered_map<std::uint64_t, bool> unsettled;
  std::set<std::uint64_t> doubted;  // it asked for these, and their calls were over
  std::size_t expected = 0;         // values that it is to create here, by what others say

  // Our references to values there.
  std::unordered_map<RRefId, Entry*, RRefIdHash> users;
  // Those of them that it has not confirmed, by number.
  std::unordered_map<std::uint64_t, Entry*> requests;
  // References that we send to it.
  struct Sent {
    Entry* entry = nullptr;  // pinned; nullptr if it is a value here: see `fork`
    RRefId id = {};
    std::uint64_t fork = 0;
    std::uint64_t call = 0;  // goes with the answer to it
  };
  std::unordered_map<std::uint64_t, Sent> passages;
  std::deque<std::pair<Time, std::uint64_t>> to_ask;  // those with answers
};

// What one worker can make another one keep. More is nonsense: a worker has at most so many calls
// under way.
inline constexpr std::size_t kMostKept = agent::SeenNumbers::kMostRanges;
// Workers that one can tell of, and that nobody has met.
inline constexpr std::size_t kMostNamed = 1024;
// References of one worker to one value.
inline constexpr std::size_t kMostForks = 1024;

// Numbers of references that the owner tells their worker of.
inline constexpr std::uint64_t kEarlyFork = std::uint64_t{1} << 63;

}  // namespace convoy::rref
