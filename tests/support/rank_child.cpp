#include "support/rank_child.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/guarded.h"
#include "os/socket.h"
#include "support/leak_oracle.h"
#include "support/rank_runner.h"
#include "support/rank_wire.h"

namespace convoy::test {
namespace {

constexpr const char* kVariable = "CONVOY_TEST_RANK";
constexpr int kExitFailed = 1;
constexpr int kExitNotReached = 2;

// Thrown by run_as_rank; GoogleTest's own handler ends it, after the test's locals are gone.
struct RankDone {};

// The rank that this process is.
class RankProcess final : public RankLink {
 public:
  explicit RankProcess(const RankIdentity& identity)
      : identity_(identity), control_(UniqueFd(identity.control)) {}

  const RankIdentity& identity() const { return identity_; }

  void send(FrameType type, const std::string& text) {
    const std::string bytes = encode(Frame{type, text});
    const std::lock_guard lock(send_mutex_);
    control_.send(std::as_bytes(std::span(bytes)), Deadline::after(std::chrono::seconds(30)));
  }
  void mark(const std::string& text) override { send(FrameType::kMark, text); }

  // The socket is read by whoever waits; posts for others are kept.
  void wait_for(const std::string& text, const Deadline& deadline) override {
    const std::lock_guard lock(receive_mutex_);
    while (!posted_.contains(text)) {
      if (!wait_ready(control_.fd(), POLLIN, deadline)) {
        fail(ErrorKind::kTimeout, "rank ", identity_.rank, ": '", text, "' was not posted in time");
      }
      std::array<std::byte, 4096> bytes;
      const auto got = control_.try_receive(bytes);
      if (!got) fail(ErrorKind::kPeerLost, "the test's process is gone");
      decoder_.feed(std::span(bytes).first(*got));
      while (const auto frame = decoder_.next()) posted_.insert(frame->text);
    }
  }
  std::shared_ptr<Store> store() override { return launcher_store(); }

  // Written by the thread of the test's body, read by the listener in any thread.
  std::atomic<bool> running{false};
  std::atomic<bool> failed{false};
  bool reached = false;
  int groups_seen = 0;
  Guarded<std::string> before;  // failures before the rank's function

 private:
  const RankIdentity identity_;
  Socket control_;
  std::mutex send_mutex_;
  std::mutex receive_mutex_;
  FrameDecoder decoder_;          // guarded by receive_mutex_
  std::set<std::string> posted_;  // guarded by receive_mutex_
};

std::optional<RankIdentity> identity_from_environment() {
  const char* text = std::getenv(kVariable);
  if (!text) return std::nullopt;
  RankIdentity identity{};
  if (std::sscanf(text, "%d/%d/%d/%d/%ld", &identity.rank, &identity.size, &identity.group,
                  &identity.control, &identity.deadline_ns) != 5) {
    return std::nullopt;
  }
  ::unsetenv(kVariable);  // what this rank starts is no rank
  return identity;
}

RankProcess* this_rank() {
  static RankProcess* const rank = [] {
    const auto identity = identity_from_environment();
    return identity ? new RankProcess(*identity) : nullptr;
  }();
  return rank;
}

int group_number = 0;  // of the running test; only the main thread counts

void tell_failure(RankProcess& rank, const RankFailure& failure) {
  if (failure.kind != RankFailure::Kind::kSkip) {
    rank.failed = true;
    std::fprintf(stderr, "%s:%d: failure in rank %d: %s\n", failure.file.c_str(), failure.line,
                 rank.identity().rank, failure.text.c_str());
  }
  rank.send(FrameType::kFailure, encode(failure));
}

// Sends the failures of the rank's function to the group. In place of GoogleTest's printer.
class RankListener final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (part.passed()) return;
    RankProcess& rank = *this_rank();
    const auto failure = to_failure(part);
    if (rank.running) return tell_failure(rank, failure);
    *rank.before.lock() += concat(failure.file, ":", failure.line, ": ", failure.text, "\n");
  }
};

class GroupCounter final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { group_number = 0; }
};

}  // namespace

std::vector<std::string> to_environment(const RankIdentity& identity) {
  return {concat(kVariable, "=", identity.rank, "/", identity.size, "/", identity.group, "/",
                 identity.control, "/", identity.deadline_ns)};
}

bool is_rank_process() { return this_rank() != nullptr; }

void install_group_counter() {
  testing::UnitTest::GetInstance()->listeners().Append(new GroupCounter);
}

int run_rank_program() {
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new RankListener);
  GTEST_FLAG_SET(catch_exceptions, true);
  GTEST_FLAG_SET(break_on_failure, false);
  GTEST_FLAG_SET(throw_on_failure, false);
  [[maybe_unused]] const int ignored = RUN_ALL_TESTS();
  RankProcess& rank = *this_rank();
  if (!rank.reached) {
    std::fprintf(stderr,
                 "rank %d did not reach RankGroup number %d of the test; the body before it must "
                 "run alike in a rank, with EXPECT and not ASSERT about earlier groups:\n%s",
                 rank.identity().rank, rank.identity().group, rank.before.lock()->c_str());
    return kExitNotReached;
  }
  return rank.failed ? kExitFailed : 0;
}

GroupClaim claim_group(RankMode mode, int size) {
  RankProcess* const rank = this_rank();
  if (mode == RankMode::kThreads) {
    return !rank || rank->running ? GroupClaim::kStart : GroupClaim::kAbsent;
  }
  if (::gettid() != ::getpid() || (rank && rank->running)) {
    fail(ErrorKind::kUnsupported,
         "ranks that are processes can only be started by the test's own "
         "thread: each runs the test again up to this place");
  }
  ++group_number;
  if (!rank) return GroupClaim::kStart;
  if (rank->reached || group_number != rank->identity().group) return GroupClaim::kAbsent;
  CONVOY_CHECK(size == rank->identity().size, "the test's body ran differently in this rank");
  return GroupClaim::kOwn;
}

int last_group_number() { return group_number; }

void run_as_rank(const RankFunction& function) {
  RankProcess& process = *this_rank();
  const RankIdentity& identity = process.identity();
  process.store();  // lives as long as the process: no leak of the function
  LeakOracle::run_warm_ups();
  const auto before = take_holdings(LeakScope::kProcess);
  process.reached = true;
  process.running = true;
  Rank rank(
      identity.rank, identity.size, RankMode::kProcesses,
      Deadline::at(Deadline::Clock::time_point(std::chrono::nanoseconds(identity.deadline_ns))),
      process);
  if (const auto thrown = call_rank(function, rank)) {
    tell_failure(process, *thrown);
  } else {
    process.send(FrameType::kReturned, "");
  }
  const auto leaks =
      settled_difference(before, LeakScope::kProcess, Deadline::after(settle_time()));
  if (!leaks.empty()) {
    tell_failure(process, {.kind = RankFailure::Kind::kNonFatal,
                           .file = "",
                           .line = -1,
                           .text = "the rank's function left behind:\n" + leaks.to_string()});
    end_processes(leaks);
  }
  process.running = false;
  throw RankDone{};  // NOLINT(bugprone-std-exception-baseclass): nobody else may catch it
}

}  // namespace convoy::test
