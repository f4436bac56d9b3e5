#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <thread>

#include "base/error.h"
#include "base/loop.h"
#include "os/file.h"
#include "os/socket.h"
#include "store/server.h"
#include "store/socket_store.h"
#include "support/programs.h"
#include "support/rank_child.h"
#include "support/rank_runner.h"
#include "support/rank_wire.h"
#include "support/stack_dump.h"

namespace convoy::test {
namespace {

constexpr std::size_t kMaxOutput = std::size_t{256} << 10;
constexpr std::chrono::seconds kDumpTime(1);

// The environment of this process with `changes` (later ones win), and without what would make
// GoogleTest in a rank behave differently.
std::vector<std::string> rank_environment(const std::vector<std::string>& changes) {
  std::map<std::string, std::string> variables;
  const auto set = [&](const std::string& text) {
    const auto equals = text.find('=');
    variables[text.substr(0, equals)] = text;
  };
  for (char** entry = environ; *entry; ++entry) set(*entry);
  for (const auto& change : changes) set(change);
  std::vector<std::string> environment;
  for (const auto& [name, text] : variables) {
    if (!name.starts_with("GTEST_") && !name.starts_with("TEST_")) environment.push_back(text);
  }
  return environment;
}

std::string this_test() {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  CONVOY_CHECK(info, "a RankGroup of processes outside of a test");
  return concat(info->test_suite_name(), ".", info->name());
}

int count_of(std::string_view part, std::string_view text) {
  int count = 0;
  for (auto at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

class ProcessRunner final : public RankGroup::Runner {
 public:
  ProcessRunner(int size, const RankGroupOptions& options)
      : options_(options),
        deadline_(Deadline::after(options.limit)),
        rank_deadline_(Deadline::after(options.limit * 9 / 10)),
        progress_(static_cast<std::size_t>(size)),
        ranks_(static_cast<std::size_t>(size)) {}

  ~ProcessRunner() override {
    abandon();
    pump_.join();  // before the descriptors it watches are closed
  }

  void start(const RankFunction&) override {
    for (std::size_t i = 0; i < ranks_.size(); ++i) start_rank(i);
    pump_.call([this] {
      for (std::size_t i = 0; i < ranks_.size(); ++i) watch_on_loop(i);
    });
  }

  void wait_mark(const std::string& text, std::optional<int> rank) override {
    const auto gone = await_mark(progress_, text, rank, deadline_);
    if (!gone) return;
    drain();
    fail(ErrorKind::kPeerLost, "rank ", *gone, " ended without the mark '", text,
         "'; its output:\n", ranks_[static_cast<std::size_t>(*gone)].result.output);
  }

  void post(const std::string& text, std::optional<int> only) override {
    const std::string bytes = encode(Frame{FrameType::kPost, text});
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (only && static_cast<std::size_t>(*only) != i) continue;
      try {
        ranks_[i].control.send(std::as_bytes(std::span(bytes)), deadline_);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kPeerLost) throw;  // a rank that ended needs no post
      }
    }
  }

  void kill(int rank, int signal) override {
    auto& one = ranks_.at(static_cast<std::size_t>(rank));
    one.signalled = true;
    one.process.kill(signal);
  }
  pid_t pid(int rank) const override {
    return ranks_.at(static_cast<std::size_t>(rank)).process.pid();
  }

  std::shared_ptr<Store> store() override {
    if (!store_) store_ = make_socket_store(Socket(server_.connect()));
    return store_;
  }

  std::vector<RankResult> collect() override {
    if (!await_ends(deadline_)) end_hanging_ranks();
    std::vector<RankResult> results;
    for (auto& rank : ranks_) {
      rank.result.status = rank.process.wait(Deadline::never()).value();
    }
    drain();
    for (auto& rank : ranks_) {
      rank.result.signalled = rank.signalled;
      results.push_back(rank.result);
    }
    return results;
  }
  void abandon() override {
    for (auto& rank : ranks_) {
      rank.signalled = true;
      rank.process.kill(SIGKILL);
    }
  }

 private:
  struct RankState {
    // Used by the test's thread.
    std::unique_ptr<TempFolder> folder;  // its TMPDIR: a killed rank leaves nothing
    ChildProcess process;
    bool signalled = false;
    // Received from by the pump, sent to by the test's thread.
    Socket control;
    // Used by the pump; by the test's thread inside pump_.call and after it.
    UniqueFd output;
    FrameDecoder decoder;
    RankResult result;
  };

  void start_rank(std::size_t i) {
    auto [ours, theirs] = Socket::pair();
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("making a pipe");
    ranks_[i].output.reset(ends[0]);
    const UniqueFd write_end(ends[1]);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    const UniqueFd control = theirs.release();
    const UniqueFd store = server_.connect();

    const RankIdentity identity{.rank = static_cast<int>(i),
                                .size = static_cast<int>(ranks_.size()),
                                .group = last_group_number(),
                                .control = control.get(),
                                .deadline_ns = rank_deadline_.when().time_since_epoch().count()};
    std::vector<std::string> more = to_environment(identity);
    ranks_[i].folder = std::make_unique<TempFolder>("rank");
    more.push_back("TMPDIR=" + ranks_[i].folder->path());
    more.push_back(store_environment(store.get()));
    more.insert(more.end(), options_.environment.begin(), options_.environment.end());

    SpawnOptions spawn;
    spawn.arguments = {this_program(), "--gtest_filter=" + this_test(),
                       "--gtest_also_run_disabled_tests"};
    spawn.environment = rank_environment(more);
    spawn.inherited = {control.get(), store.get()};
    spawn.standard_output = spawn.standard_error = write_end.get();
    spawn.death_signal = SIGKILL;
    ranks_[i].control = std::move(ours);
    ranks_[i].process = ChildProcess::spawn(spawn);
  }

  void watch_on_loop(std::size_t i) {
    auto& rank = ranks_[i];
    const auto watch = [&](int fd, auto handler) {
      auto id = std::make_shared<Loop::WatchId>();
      *id = pump_.loop().watch(fd, EPOLLIN, [this, id, handler](std::uint32_t) {
        if (!handler()) pump_.loop().unwatch(*id);
      });
    };
    watch(rank.output.get(), [this, i] { return read_output_on_loop(i); });
    watch(rank.control.fd(), [this, i] { return read_control_on_loop(i); });
    watch(rank.process.pidfd(), [this, i] {
      read_control_on_loop(i);  // marks that it made before it ended count
      progress_.lock()->at(i).ended = true;
      progress_.notify();
      return false;
    });
  }

  // False: nothing more will come.
  bool read_output_on_loop(std::size_t i) {
    std::string& text = ranks_[i].result.output;
    std::array<char, 16384> buffer;
    for (;;) {
      const ssize_t n = ::read(ranks_[i].output.get(), buffer.data(), buffer.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n < 0 && errno == EAGAIN;
      text.append(buffer.data(), static_cast<std::size_t>(n));
      if (text.size() > kMaxOutput) text.erase(0, text.size() - kMaxOutput);
    }
  }

  bool read_control_on_loop(std::size_t i) {
    std::array<std::byte, 16384> bytes;
    for (;;) {
      const auto got = ranks_[i].control.try_receive(bytes);
      if (!got) return false;
      if (*got == 0) return true;
      ranks_[i].decoder.feed(std::span(bytes).first(*got));
      while (const auto frame = ranks_[i].decoder.next()) take_on_loop(i, *frame);
    }
  }

  void take_on_loop(std::size_t i, const Frame& frame) {
    RankResult& result = ranks_[i].result;
    if (frame.type == FrameType::kFailure) result.failures.push_back(decode_failure(frame.text));
    if (frame.type == FrameType::kReturned) result.returned = true;
    if (frame.type != FrameType::kMark) return;
    progress_.lock()->at(i).marks.insert(frame.text);
    progress_.notify();
  }

  bool await_ends(const Deadline& deadline) {
    auto progress = progress_.lock();
    return progress.wait(deadline, [&] {
      return std::all_of(progress->begin(), progress->end(),
                         [](const RankProgress& rank) { return rank.ended; });
    });
  }

  // What was written before the ranks ended is in the pipes; a grandchild may hold them open.
  void drain() {
    pump_.call([this] {
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        read_control_on_loop(i);
        read_output_on_loop(i);
      }
    });
  }

  void end_hanging_ranks() {
    const auto deadline = Deadline::after(kDumpTime);
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (progress_.lock()->at(i).ended) continue;
      const pid_t pid = ranks_[i].process.pid();
      const std::string state = describe_process(pid);
      if (process_state(pid) != 'T') await_stacks(i, request_stacks(pid), deadline);
      ranks_[i].process.kill(SIGKILL);
      pump_.call([&] {
        ranks_[i].result.timed_out = true;
        ranks_[i].result.output += "at the time limit:\n" + state;
      });
    }
  }

  // The rank writes its stacks into its output: give it time, but do not insist.
  void await_stacks(std::size_t i, int count, const Deadline& deadline) {
    for (int seen = 0; seen < count && !deadline.expired(); std::this_thread::yield()) {
      pump_.call([&] {
        read_output_on_loop(i);
        seen = count_of(kEndOfStack, ranks_[i].result.output);
      });
    }
  }

  const RankGroupOptions options_;
  const Deadline deadline_;
  // A rank's own waits end before the group's, so that it can say what it waited for.
  const Deadline rank_deadline_;
  StoreServer server_;
  std::shared_ptr<Store> store_;
  Guarded<std::vector<RankProgress>> progress_;
  std::vector<RankState> ranks_;
  LoopThread pump_{"rank output"};  // last: its handlers use everything above
};

}  // namespace

std::unique_ptr<RankGroup::Runner> make_process_runner(int size, const RankGroupOptions& options) {
  return std::make_unique<ProcessRunner>(size, options);
}

}  // namespace convoy::test
