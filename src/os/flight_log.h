#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "os/flight_ring.h"

namespace convoy::flight {

// What a flight record says, read and checked: the writer may have died at any moment. Times are of
// the steady clock, which is the same in all processes of a host.
struct Entry {
  std::uint64_t ticket = 0;  // counts from 1
  std::string operation;
  std::string type;  // of its elements: "f32"
  std::uint64_t group = 0;
  std::uint64_t number = 0;
  bool message = false;
  int peer = -1;  // of a message, or the root
  std::uint64_t input = 0;
  std::uint64_t output = 0;
  std::uint64_t bytes = 0;
  State state = State::kNone;
  std::chrono::nanoseconds created{};
  std::chrono::nanoseconds started{};  // 0: it has not
  std::chrono::nanoseconds ended{};
  std::string file;
  std::string function;
  unsigned line = 0;    // 0: the place is not known
  bool served = false;  // a call of RPC: another worker's, which runs here
  bool pass = false;    // no call, but a backward pass, or (served) this worker's part in one

  bool under_way() const { return state == State::kStarted; }
  bool over() const { return state == State::kCompleted || state == State::kFailed; }
};

struct GroupEntry {
  std::string name;
  int rank = 0;
  int size = 0;
  std::vector<pid_t> processes;           // by rank; 0: not known
  std::uint64_t session = 0;              // of RPC; 0: it is a group
  std::vector<std::string> workers = {};  // of the session, by rank; empty: not known
};

struct Log {
  pid_t pid = 0;
  std::optional<int> rank;  // in the job
  int size = 0;             // of the job; 0: not known
  std::chrono::nanoseconds steady{};
  std::chrono::nanoseconds wall{};  // the same moment
  std::map<std::uint64_t, GroupEntry> groups;
  std::vector<Entry> entries;  // oldest first
  // Calls of RPC, likewise. `operation` is the function, `peer` the other worker (-1: all of them).
  std::vector<Entry> calls;

  const GroupEntry* group_of(const Entry& entry) const;
  // What the rank does, or did last: the latest that is under way, otherwise what ended last.
  // `rank_of`, if given: only operations of a group of that name, as that rank (ranks that are
  // threads of one process share a record).
  const Entry* latest(const std::optional<std::pair<std::string, int>>& rank_of = {}) const;
};

// nullopt: nobody writes there, or it is of another version.
std::optional<Log> read(const std::byte* memory, std::size_t bytes);
std::optional<Log> read(const Ring& ring, std::size_t bytes = sizeof(Ring));
// What another process of this user writes: descriptor `fd` of it, if it is the memory with that
// inode.
std::optional<Log> read_process(pid_t pid, int fd, std::uint64_t inode);
// All ranks of a running job, by its name, or of the process (or launcher) with that number; in the
// order of ranks.
std::vector<Log> read_job(const std::string& job);
// All jobs of this user that run here, by name, each as read_job() gives it; empty where no rank
// has made a group yet.
std::map<std::string, std::vector<Log>> read_all_jobs();

// "all_reduce #41 of group "world"".
std::string describe(const Log& log, const Entry& entry);
// "train.cpp:40", the last part of the path; empty if it is not known.
std::string describe_place(const Entry& entry);
// What the rank does, as of `now`: "it is in broadcast #7 of group "rows" for 3.2 s
// (train.cpp:41)", "it is in user code for 3.2 s, since all_reduce #41 ... ended (train.cpp:40)".
std::string describe_activity(const Log& log, const Entry* latest, std::chrono::nanoseconds now);

}  // namespace convoy::flight
