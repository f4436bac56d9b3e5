#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace convoy {

using Variables = std::map<std::string, std::string>;
// Of this process, now.
Variables current_variables();

// What the caller or a URL says, which wins over the environment.
struct GivenRank {
  std::optional<int> rank = std::nullopt;
  std::optional<int> size = std::nullopt;

  bool complete() const { return rank && size; }
};

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
// "host:port", with brackets around an IPv6 address.
std::string to_string(const Endpoint& endpoint);

// Who started this process, and as which rank of what.
struct LaunchEnvironment {
  std::string launcher = "none";  // as Meeting::launcher
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  bool one_host = false;  // the launcher says so
  // Equal in all ranks and in no other job of this user on this host; empty: nothing there names
  // the job.
  std::string job;
  bool agent_store = false;  // torchrun serves the TCP store: no rank does
  std::string restart;       // of torchrun; empty: it does not count
};

// Where the ranks meet.
enum class MeetingPlace {
  kAlone,          // one rank
  kLauncherStore,  // of `convoy run`
  kTcp,            // at MASTER_ADDR and MASTER_PORT
  kJobSocket,      // a Unix socket of rank 0, named after `job`
};

// Pure: reads nothing but `variables`. `launched_by_us`: this process has a connection to the store
// of `convoy run`, which is proof; other launchers' variables are then leftovers. Throws
// kInvalidArgument for variables that are incomplete, garbage or contradict each other, unless
// `given` makes them irrelevant.
LaunchEnvironment read_launch_environment(const Variables& variables, const GivenRank& given,
                                          bool launched_by_us);

// MASTER_ADDR and MASTER_PORT, or PET_MASTER_*; throws kInvalidArgument if one is missing.
std::optional<Endpoint> read_master(const Variables& variables);

// Throws kInvalidArgument, saying what to set, when there is none.
MeetingPlace meeting_place(const LaunchEnvironment& environment, const Variables& variables);

// How many tasks run on node `node`: "2(x3),1" says 2 on nodes 0 to 2 and 1 on node 3. nullopt for
// garbage and for a node beyond the list.
std::optional<int> tasks_on_node(const std::string& list, int node);

// A whole decimal number that fits; nullopt for anything else.
std::optional<int> parse_whole(std::string_view text);

}  // namespace convoy
