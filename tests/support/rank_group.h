#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/store.h"
#include "os/process.h"

namespace convoy::test {

enum class RankMode {
  kThreads,    // ranks share every mapping, so ThreadSanitizer sees them
  kProcesses,  // the test program executed again, once a rank; killable
  kMpi,        // this process is one of those that mpirun started; only there
};
std::ostream& operator<<(std::ostream& out, RankMode mode);

// INSTANTIATE_TEST_SUITE_P(Modes, AllReduce, rank_modes(), rank_mode_name);
// Threads and processes; in a program that mpirun started, that.
std::vector<RankMode> all_rank_modes();
inline auto rank_modes() { return testing::ValuesIn(all_rank_modes()); }
std::string to_name(RankMode mode);
inline std::string rank_mode_name(const testing::TestParamInfo<RankMode>& info) {
  return to_name(info.param);
}

class RankLink;

// What a rank's function sees. Its methods may be called from any thread of the rank.
class Rank {
 public:
  Rank(int id, int size, RankMode mode, const Deadline& deadline, RankLink& link)
      : id_(id), size_(size), mode_(mode), deadline_(deadline), link_(&link) {}

  int id() const { return id_; }
  int size() const { return size_; }
  RankMode mode() const { return mode_; }
  // When the group's time limit ends.
  const Deadline& deadline() const { return deadline_; }
  // One store for all ranks and the test; keys under "harness/" are taken.
  std::shared_ptr<Store> store() const;

  // Tells the test how far this rank is: RankGroup::wait_mark.
  void mark(const std::string& text) const;
  // Waits for RankGroup::post of this text.
  void wait_for(const std::string& text) const;
  // All ranks, through the store.
  void barrier();

 private:
  int id_;
  int size_;
  RankMode mode_;
  Deadline deadline_;
  RankLink* link_;
  int barriers_ = 0;
};

using RankFunction = std::function<void(Rank&)>;

// A failed (or skipping) assertion of a rank.
struct RankFailure {
  enum class Kind { kNonFatal, kFatal, kSkip };

  Kind kind = Kind::kNonFatal;
  std::string file;
  int line = 0;
  std::string text;
};

struct RankResult {
  ExitStatus status;                  // of a thread: exit code 0, or 1 if it failed
  std::string output;                 // stdout and stderr of a process, its last part if long
  std::vector<RankFailure> failures;  // of its assertions, exceptions and leaks
  bool returned = false;              // its function came to an end
  bool signalled = false;             // by RankGroup::kill
  bool timed_out = false;             // and was killed for it

  bool skipped() const;
  bool failed() const;  // an assertion failed, or it ended in a way nobody asked for
};

struct RankGroupOptions {
  std::chrono::milliseconds limit = std::chrono::seconds(60);
  std::vector<std::string> environment = {};  // "NAME=value", for ranks that are processes
};

// Runs a function as n ranks.
//
//   RankGroup(4, GetParam()).run([](Rank& r) { ... EXPECT_EQ(...); });
//
// or, to interfere while the ranks run:
//
//   RankGroup group(4, RankMode::kProcesses);
//   group.start([](Rank& r) { r.mark("ready"); r.wait_for("go"); ... });
//   group.wait_mark("ready");
//   group.kill(2, SIGKILL);
//   group.post("go");
//   group.join();
//
// A process rank is this program executed again for the current test: it runs the body from its
// beginning to this start(), runs the function, and leaves the body by an exception. There, groups
// before this one do nothing and return results of success; assertions about them count for
// nothing, but must let the body go on (EXPECT, not ASSERT). What the function captures is what the
// body of the rank's own process made.
//
// Processes are started from the test's own thread, and die with it. Not thread-safe.
class RankGroup {
 public:
  using Options = RankGroupOptions;

  RankGroup(int size, RankMode mode, const Options& options = {});
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;
  // Ranks that were not joined are killed (processes) or waited for (threads), and the test fails.
  ~RankGroup();

  // start() and join().
  void run(const RankFunction& function);

  void start(const RankFunction& function);

  // Waits until every rank, or one, has marked. Throws kPeerLost with the rank's output if it ends
  // without, kTimeout at the end of the group's limit.
  void wait_mark(const std::string& text, std::optional<int> rank = std::nullopt);
  // Lets wait_for return in every rank, or in one.
  void post(const std::string& text, std::optional<int> rank = std::nullopt);

  // Processes only. A rank that was sent a signal may end in any way.
  void kill(int rank, int signal);
  // Returns when every thread of the rank stands still.
  void stop(int rank);
  void resume(int rank);
  pid_t pid(int rank) const;

  // The store that the ranks have. Not valid after join().
  std::shared_ptr<Store> store();

  // Waits for all ranks and gives every failure of theirs to the current test, with the output of
  // all. At the end of the time limit it shows what each rank is doing, kills the processes and
  // fails the test; hanging threads cannot be ended, so it then ends the program.
  std::vector<RankResult> join();
  // As join(), but judges nothing: for tests in which ranks are meant to fail.
  std::vector<RankResult> collect();

  class Runner;

 private:
  int size_;
  RankMode mode_;
  Options options_;
  std::unique_ptr<Runner> runner_;
};

// The path of a store's socket: a test gives it to the ranks that it starts by mpirun, which run
// this program's tests whose names end in Mpi.
inline constexpr const char* kMpiStoreVariable = "CONVOY_TEST_MPI_STORE";
bool under_mpi();

// True in a rank's process, where the body runs only to reach the rank's group.
bool in_rank();

// Runs the function as a group of one process: for what would harm the test's own (resource limits,
// fork, a change of user).
void run_in_process(const std::function<void()>& function);

// Gives the failures to the current test.
void report(const std::vector<RankResult>& results);

}  // namespace convoy::test
