#include "support/rank_group.h"

#include <signal.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <ostream>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "support/rank_child.h"
#include "support/rank_runner.h"

namespace convoy::test {
namespace {

// In a rank's process: stands for a group that is not the rank's own.
class AbsentRunner final : public RankGroup::Runner {
 public:
  explicit AbsentRunner(int size) : results_(static_cast<std::size_t>(size)) {}

  void start(const RankFunction&) override {}
  void wait_mark(const std::string&, std::optional<int>) override {}
  void post(const std::string&, std::optional<int>) override {}
  void kill(int, int) override {}
  pid_t pid(int) const override { return -1; }
  std::shared_ptr<Store> store() override { return make_local_store(); }
  std::vector<RankResult> collect() override { return results_; }
  void abandon() override {}

 private:
  std::vector<RankResult> results_;
};

// Whether every thread of the process is stopped.
bool stands_still(pid_t pid) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(concat("/proc/", pid, "/task"), error), end;
       !error && it != end; it.increment(error)) {
    const auto state = process_state(static_cast<pid_t>(std::stol(it->path().filename().string())));
    if (state && *state != 'T') return false;
  }
  return true;
}

void give_to_gtest(std::size_t rank, std::size_t size, const RankFailure& failure) {
  const auto kind = failure.kind == RankFailure::Kind::kSkip
                        ? testing::TestPartResult::kSkip
                        : testing::TestPartResult::kNonFatalFailure;
  testing::internal::AssertHelper(kind, failure.file.c_str(), failure.line,
                                  concat("rank ", rank, " of ", size, ": ").c_str()) =
      testing::Message() << failure.text;
}

std::string describe(std::size_t rank, const RankResult& result) {
  std::string text = concat("rank ", rank, ": ");
  if (result.timed_out) text += "did not end within the time limit and was killed; ";
  text += result.status.to_string();
  if (!result.returned) text += ", before its function returned";
  if (result.output.empty()) return text + ", no output\n";
  text += ", output:\n";
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) text += concat("[", rank, "] ", line, "\n");
  return text;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, RankMode mode) {
  switch (mode) {
    case RankMode::kThreads: return out << "threads";
    case RankMode::kProcesses: return out << "processes";
    case RankMode::kMpi: return out << "mpi";
  }
  return out;
}

std::string to_name(RankMode mode) {
  switch (mode) {
    case RankMode::kThreads: return "Threads";
    case RankMode::kProcesses: return "Processes";
    case RankMode::kMpi: return "Mpi";
  }
  return "";
}

std::vector<RankMode> all_rank_modes() {
  if (under_mpi()) return {RankMode::kMpi};
  return {RankMode::kThreads, RankMode::kProcesses};
}

std::shared_ptr<Store> Rank::store() const { return link_->store(); }
void Rank::mark(const std::string& text) const { link_->mark(text); }
void Rank::wait_for(const std::string& text) const { link_->wait_for(text, deadline_); }
void Rank::barrier() {
  store()->barrier(concat("harness/barrier/", barriers_++), size_, deadline_);
}

bool RankResult::skipped() const {
  return std::any_of(failures.begin(), failures.end(), [](const RankFailure& failure) {
    return failure.kind == RankFailure::Kind::kSkip;
  });
}

bool RankResult::failed() const {
  const bool asserted = std::any_of(failures.begin(), failures.end(), [](const auto& failure) {
    return failure.kind != RankFailure::Kind::kSkip;
  });
  return asserted || timed_out || (!signalled && !status.success());
}

RankGroup::RankGroup(int size, RankMode mode, const Options& options)
    : size_(size), mode_(mode), options_(options) {
  if (size < 1) fail(ErrorKind::kInvalidArgument, "a group of ", size, " ranks");
}

RankGroup::~RankGroup() {
  if (!runner_) return;
  const bool unwinding = std::uncaught_exceptions() > 0;
  runner_->abandon();
  const auto results = runner_->collect();
  if (unwinding || testing::Test::HasFatalFailure()) return;
  ADD_FAILURE() << "a RankGroup was started but not joined";
  report(results);
}

void RankGroup::run(const RankFunction& function) {
  start(function);
  join();
}

void RankGroup::start(const RankFunction& function) {
  CONVOY_CHECK(!runner_, "this RankGroup runs already");
  if (mode_ == RankMode::kMpi) {
    runner_ = make_mpi_runner(size_, options_);
    runner_->start(function);
  } else if (const auto own = claim_group(mode_, size_); own == GroupClaim::kOwn) {
    run_as_rank(function);
  } else if (own == GroupClaim::kAbsent) {
    runner_ = std::make_unique<AbsentRunner>(size_);
  } else {
    runner_ = mode_ == RankMode::kThreads ? make_thread_runner(size_, options_)
                                          : make_process_runner(size_, options_);
    runner_->start(function);
  }
}

void RankGroup::wait_mark(const std::string& text, std::optional<int> rank) {
  runner_->wait_mark(text, rank);
}
void RankGroup::post(const std::string& text, std::optional<int> rank) {
  runner_->post(text, rank);
}
void RankGroup::kill(int rank, int signal) { runner_->kill(rank, signal); }
pid_t RankGroup::pid(int rank) const { return runner_->pid(rank); }
std::shared_ptr<Store> RankGroup::store() { return runner_->store(); }

void RankGroup::stop(int rank) {
  kill(rank, SIGSTOP);
  const pid_t process = pid(rank);
  const auto deadline = Deadline::after(options_.limit);
  while (process > 0 && !stands_still(process)) {
    if (deadline.expired()) fail(ErrorKind::kTimeout, "rank ", rank, " does not stop");
    std::this_thread::yield();
  }
}
void RankGroup::resume(int rank) { kill(rank, SIGCONT); }

std::vector<RankResult> RankGroup::collect() {
  CONVOY_CHECK(runner_, "this RankGroup does not run");
  auto results = runner_->collect();
  runner_.reset();
  return results;
}

std::vector<RankResult> RankGroup::join() {
  auto results = collect();
  report(results);
  return results;
}

bool in_rank() { return is_rank_process(); }

void run_in_process(const std::function<void()>& function) {
  RankGroup(1, RankMode::kProcesses).run([&](Rank&) { function(); });
}

void report(const std::vector<RankResult>& results) {
  bool failed = false;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    for (const auto& failure : results[rank].failures) {
      give_to_gtest(rank, results.size(), failure);
    }
    failed = failed || results[rank].failed();
  }
  if (!failed) return;
  std::string text;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    text += describe(rank, results[rank]);
  }
  ADD_FAILURE() << "ranks failed; all " << results.size() << " ranks:\n" << text;
}

RankFailure to_failure(const testing::TestPartResult& part) {
  using Kind = RankFailure::Kind;
  return {.kind = part.skipped()          ? Kind::kSkip
                  : part.fatally_failed() ? Kind::kFatal
                                          : Kind::kNonFatal,
          .file = part.file_name() ? part.file_name() : "",
          .line = part.line_number(),
          .text = part.message()};
}

std::optional<RankFailure> call_rank(const RankFunction& function, Rank& rank) {
  RankFailure failure{.kind = RankFailure::Kind::kFatal, .file = "", .line = -1, .text = ""};
  try {
    function(rank);
    return std::nullopt;
  } catch (const Error& error) {
    failure.text = concat("threw convoy::Error (", to_string(error.kind()), "): ", error.what());
  } catch (const std::exception& error) {
    failure.text = concat("threw ", typeid(error).name(), ": ", error.what());
  } catch (...) {
    failure.text = "threw something that is not a std::exception";
  }
  return failure;
}

std::optional<int> await_mark(Guarded<std::vector<RankProgress>>& progress, const std::string& text,
                              std::optional<int> rank, const Deadline& deadline) {
  auto ranks = progress.lock();
  const std::size_t first = rank ? static_cast<std::size_t>(*rank) : 0;
  const std::size_t last = rank ? first + 1 : ranks->size();
  for (std::size_t i = first; i < last; ++i) {
    auto& one = ranks->at(i);
    if (!ranks.wait(deadline, [&] { return one.marks.contains(text) || one.ended; })) {
      fail(ErrorKind::kTimeout, "rank ", i, " did not mark '", text, "' within the time limit");
    }
    if (!one.marks.contains(text)) return static_cast<int>(i);
  }
  return std::nullopt;
}

}  // namespace convoy::test
