#pragma once

#include <string>
#include <vector>

#include "support/rank_group.h"

namespace convoy::test {

// The side of a rank's own process.

// How a rank's process learns what it is.
struct RankIdentity {
  int rank;
  int size;
  int group;         // which RankGroup of processes in the test, from 1
  int control;       // descriptor of its end of the socket pair
  long deadline_ns;  // of the monotonic clock, which all processes share
};
std::vector<std::string> to_environment(const RankIdentity& identity);

// True in a process that is a rank.
bool is_rank_process();
// Runs the one test up to the rank's group and its function. The exit code of the process.
int run_rank_program();
// Counts the groups of each test; in the test's own process.
void install_group_counter();

enum class GroupClaim {
  kStart,   // this process is no rank, or a rank that starts threads: start the group
  kOwn,     // this process is a rank of it
  kAbsent,  // the group is somebody else's business
};
// To be called once for each start of a group.
GroupClaim claim_group(RankMode mode, int size);
// The number that claim_group gave to the last group of processes.
int last_group_number();

// Runs the function as this process's rank and leaves the test's body by an exception.
[[noreturn]] void run_as_rank(const RankFunction& function);

}  // namespace convoy::test
