#pragma once

#include <set>

#include "base/guarded.h"
#include "support/rank_group.h"

namespace convoy::test {

// A rank's way to its group.
class RankLink {
 public:
  virtual ~RankLink() = default;
  virtual void mark(const std::string& text) = 0;
  virtual void wait_for(const std::string& text, const Deadline& deadline) = 0;
  virtual std::shared_ptr<Store> store() = 0;
};

// What a RankGroup does in one mode.
class RankGroup::Runner {
 public:
  virtual ~Runner() = default;
  virtual void start(const RankFunction& function) = 0;
  virtual void wait_mark(const std::string& text, std::optional<int> rank) = 0;
  virtual void post(const std::string& text, std::optional<int> rank) = 0;
  virtual void kill(int rank, int signal) = 0;
  virtual pid_t pid(int rank) const = 0;
  virtual std::shared_ptr<Store> store() = 0;
  virtual std::vector<RankResult> collect() = 0;
  // Before a collect() that nobody asked for: ends what can be ended.
  virtual void abandon() = 0;
};

std::unique_ptr<RankGroup::Runner> make_thread_runner(int size, const RankGroupOptions& options);
std::unique_ptr<RankGroup::Runner> make_process_runner(int size, const RankGroupOptions& options);
std::unique_ptr<RankGroup::Runner> make_mpi_runner(int size, const RankGroupOptions& options);

// What the ranks have told the test so far.
struct RankProgress {
  std::set<std::string> marks;
  bool ended = false;
};
// Waits until each rank (or one) has marked; see RankGroup::wait_mark. The rank that ended without,
// or nullopt.
std::optional<int> await_mark(Guarded<std::vector<RankProgress>>& progress, const std::string& text,
                              std::optional<int> rank, const Deadline& deadline);

// Calls the function; what it throws becomes a failure. Exceptions are named with rank and kind.
std::optional<RankFailure> call_rank(const RankFunction& function, Rank& rank);

RankFailure to_failure(const testing::TestPartResult& part);

}  // namespace convoy::test
