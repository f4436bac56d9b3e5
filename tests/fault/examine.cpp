#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <latch>
#include <stdexcept>
#include <thread>

#include "base/concat.h"
#include "base/error.h"
#include "base/unique_fd.h"
#include "fault/cases.h"
#include "fault/errno_injection.h"
#include "os/file.h"
#include "os/process.h"
#include "store/server.h"
#include "support/leak_oracle.h"
#include "support/stack_dump.h"

namespace convoy::fault {
namespace {

using namespace std::chrono_literals;

// Of what the ranks do together: an error by then is an error, not a hang.
constexpr auto kPatience = 1500ms;
// Of what must succeed: the undisturbed second time, and faults that must not matter.
constexpr auto kLongPatience = 30s;
std::chrono::milliseconds patience_for(const Case& one) {
  return one.fault.demand == Fault::Demand::kSuccess ? kLongPatience : kPatience;
}
constexpr auto kHang = 150s;
constexpr std::size_t kAtOnce = 4;
// Of a process: threads that wait use none, those that spin for the whole patience use more.
constexpr auto kMostProcessorTime = 1200ms;
constexpr std::size_t kSample = 15;
constexpr int kRanks = 2;

struct WrongValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Shared with the process that makes it up; written by it and read after its end.
struct Slot {
  std::array<char, 4000> finding;  // empty: none
  std::array<char, 400> error;     // that a rank got; empty: none
  std::array<char, 8000> left;     // what it holds in the end, one a line
  std::array<long, 100> counts;
  long failed;
  bool ended;
};

class Slots {
 public:
  Slots() {
    void* const memory = ::mmap(nullptr, kRanks * sizeof(Slot), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail_errno("memory for the reports");
    slots_ = static_cast<Slot*>(memory);
  }
  Slots(Slots&& other) noexcept : slots_(std::exchange(other.slots_, nullptr)) {}
  Slots& operator=(Slots&&) = delete;
  ~Slots() {
    if (slots_) ::munmap(slots_, kRanks * sizeof(Slot));
  }
  Slot& operator[](int i) const { return slots_[i]; }

 private:
  Slot* slots_ = nullptr;
};

template <std::size_t Size>
void put(std::array<char, Size>& to, const std::string& text) {
  const std::size_t bytes = std::min(text.size(), Size - 1);
  std::memcpy(to.data(), text.data(), bytes);
  to[bytes] = '\0';
}

// What of a holding does not change from run to run: names of temporary files, numbers and ids do.
std::string describe(const test::Holding& holding) {
  std::string text = concat(static_cast<int>(holding.kind), " ");
  const std::string& key = holding.kind == test::HoldingKind::kThread ? holding.note : holding.key;
  if (key.starts_with(std::getenv("TMPDIR"))) return text + "in the temporary folder";
  for (const char c : key.substr(0, key.find(' '))) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) text += c;
  }
  return text;
}

// Memory that stays for later use is judged by Scenario::held.
bool is_pool(const test::Holding& holding) {
  return holding.key.find("convoy:arena") != std::string::npos ||
         holding.key.find("convoy:share") != std::string::npos;
}

std::vector<std::string> holdings() {
  std::vector<std::string> found;
  for (const auto& holding : test::take_holdings(test::LeakScope::kProcess)) {
    if (!is_pool(holding)) found.push_back(describe(holding));
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

std::vector<std::string> beyond(const std::vector<std::string>& usual) {
  std::vector<std::string> more;
  const auto now = holdings();
  std::set_difference(now.begin(), now.end(), usual.begin(), usual.end(), std::back_inserter(more));
  return more;
}

// What this process does besides what the undisturbed one leaves; waits for what is on its way.
std::string left_behind(const Scenario& scenario, const std::vector<std::string>& usual) {
  const auto limit = Deadline::after(5s);
  for (;;) {
    const std::string more =
        joined(beyond(usual)) + (scenario.held ? scenario.held() : std::string());
    if (more.empty() || limit.expired()) return more;
    ::poll(nullptr, 0, 5);
  }
}

// How a rank's turn ended.
struct Ending {
  std::string finding;
  std::string error;
};

Ending take_turn(const Scenario& scenario, const Turn& turn, Fault::Demand demand) {
  try {
    scenario.run(turn);
    return {};
  } catch (const Error& error) {
    const std::string text = concat(to_string(error.kind()), ": ", error.what());
    if (demand == Fault::Demand::kSuccess) return {concat("rank ", turn.rank, " got ", text), text};
    if (error.kind() == ErrorKind::kInternal) return {"an internal error: " + text, text};
    if (text.find('\n') != std::string::npos) return {"an error of several lines: " + text, text};
    return {"", text};
  } catch (const WrongValue& error) {
    return {concat("rank ", turn.rank, " has a wrong value: ", error.what()), ""};
  } catch (const std::exception& error) {
    return {concat("rank ", turn.rank, " got another exception than Error: ", error.what()), ""};
  }
}

// The ranks of one process, by number: each in a thread of its own that is there before.
class Ranks {
 public:
  Ranks(const Scenario& scenario, std::vector<int> ranks)
      : scenario_(scenario), ranks_(std::move(ranks)) {}

  std::vector<Ending> take_turns(const std::shared_ptr<Store>& store, const char* prefix,
                                 std::chrono::milliseconds patience, const Case* injected) {
    const auto demand = injected ? injected->fault.demand : Fault::Demand::kSuccess;
    std::vector<Ending> endings(ranks_.size());
    std::latch started(1);
    std::atomic<int> ended{0};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([&, i] {
        convoy_inject_exempt(1);
        started.wait();
        const Turn turn{ranks_[i], with_prefix(store, prefix), Deadline::after(patience)};
        convoy_inject_exempt(0);
        endings[i] = take_turn(scenario_, turn, demand);
        convoy_inject_exempt(1);
        ended.fetch_add(1);
      });
    }
    if (injected) {
      const auto& fault = injected->fault;
      convoy_inject_arm(injected->first > 0 ? fault.call : nullptr, fault.error, injected->first,
                        injected->times);
    }
    started.count_down();
    // What lacks is there again after a while: nobody may wait for it for longer than that.
    const auto lasts = Deadline::after(2 * patience);
    while (injected && ended.load() < static_cast<int>(threads.size()) && !lasts.expired()) {
      ::poll(nullptr, 0, 2);
    }
    if (injected && ended.load() < static_cast<int>(threads.size())) convoy_inject_disarm();
    for (auto& thread : threads) thread.join();
    return endings;
  }

 private:
  const Scenario& scenario_;
  std::vector<int> ranks_;
};

std::chrono::microseconds processor_time() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto of = [](const timeval& time) {
    return std::chrono::seconds(time.tv_sec) + std::chrono::microseconds(time.tv_usec);
  };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

struct Job {
  const Scenario* scenario;
  Case one;
  std::vector<std::string> usual[kRanks];  // holdings of the undisturbed run
  bool baseline = false;
};

void note(Slot& slot, const std::vector<Ending>& endings, const char* front) {
  for (const auto& ending : endings) {
    if (slot.finding[0] == '\0' && !ending.finding.empty()) {
      put(slot.finding, front + ending.finding);
    }
    if (slot.error[0] == '\0') put(slot.error, ending.error);
  }
}

// The process of one rank, or of both.
void run_process(const Job& job, Slot& slot, const std::vector<int>& ranks, bool injected,
                 const std::function<std::shared_ptr<Store>()>& make_store) {
  convoy_inject_exempt(1);
  Ranks threads(*job.scenario, ranks);
  {
    const auto store = make_store();
    store->barrier("first/start", static_cast<int>(kRanks / ranks.size()),
                   Deadline::after(kLongPatience));
    Case clean = job.one;
    clean.first = 0;
    const auto before = processor_time();
    note(slot,
         threads.take_turns(store, "first", patience_for(job.one), injected ? &job.one : &clean),
         "");
    const auto used = processor_time() - before;
    for (int call = 0; call < convoy_inject_calls(); ++call) {
      slot.counts[static_cast<std::size_t>(call)] = convoy_inject_count(call);
    }
    slot.failed = convoy_inject_disarm();
    if (used > kMostProcessorTime && slot.finding[0] == '\0') {
      put(slot.finding, concat(used.count() / 1000, " ms of processor time: something spins"));
    }
  }
  // A connection of its own: the first one may be broken.
  {
    const auto store = make_store();
    store->barrier("second/start", static_cast<int>(kRanks / ranks.size()),
                   Deadline::after(kLongPatience));
    std::array<char, sizeof slot.error> error = slot.error;
    note(slot, threads.take_turns(store, "second", kLongPatience, nullptr),
         "the second time, undisturbed: ");
    slot.error = error;
  }
  if (job.baseline) {
    ::poll(nullptr, 0, 200);  // what is on its way is no part of what is usual
    put(slot.left, joined(holdings()));
  } else if (slot.finding[0] == '\0') {
    const std::string more = left_behind(*job.scenario, job.usual[ranks[0]]);
    if (!more.empty()) put(slot.finding, "left behind:\n" + more);
  }
  slot.ended = true;
}

std::shared_ptr<Store> meet_at(const std::string& path) {
  const auto deadline = Deadline::after(kLongPatience);
  for (;;) {
    try {
      return connect_store(path, deadline);
    } catch (const Error&) {  // it does not listen yet
      if (deadline.expired()) throw;
    }
    ::poll(nullptr, 0, 1);
  }
}

// Of a folder and those in it: files with the memory of tensors that have names.
std::string files_in(const std::string& folder) {
  std::string names;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    if (it->is_regular_file()) names += it->path().string() + "\n";
  }
  return names;
}

void run_rank(const Job& job, Slot& slot, int rank, const std::string& store) {
  // A folder of its own: the other rank's files are no leak of this one's.
  const TempFolder own("rank");
  ::setenv("TMPDIR", own.path().c_str(), 1);
  try {
    run_process(job, slot, {rank}, !job.baseline && rank == job.scenario->victim,
                [&] { return meet_at(store); });
  } catch (const std::exception& error) {
    put(slot.finding, concat("rank ", rank, " did not get that far: ", error.what()));
  }
}

void run_processes(const Job& job, const Slots& slots, const std::string& folder) {
  std::array<pid_t, kRanks> children{};
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t child = ::fork();
    children[static_cast<std::size_t>(rank)] = child;
    if (child != 0) continue;
    run_rank(job, slots[rank], rank, folder + "/s");
    ::_exit(0);
  }
  StoreServer server;
  server.listen(folder, "s");
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    ::waitpid(children[static_cast<std::size_t>(rank)], &status, 0);
    if (status == 0 || slots[rank].finding[0] != '\0') continue;
    const ExitStatus ending{WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                            WIFSIGNALED(status) ? WTERMSIG(status) : 0};
    put(slots[rank].finding, concat("rank ", rank, " ended by ", ending.to_string()));
  }
}

// In a process that was forked for it.
void run_job(const Job& job, const Slots& slots) {
  const TempFolder folder("errno");
  const TempFolder named("named");
  ::setenv("TMPDIR", folder.path().c_str(), 1);
  ::setenv("CONVOY_SHARE_FOLDER", named.path().c_str(), 1);
  if (job.scenario->processes) {
    run_processes(job, slots, folder.path());
  } else {
    const auto local = make_local_store();
    int made = 0;
    run_process(job, slots[0], {0, 1}, !job.baseline,
                [&] { return with_prefix(local, std::to_string(made++)); });
  }
  const std::string files = files_in(named.path());
  if (!files.empty() && slots[0].finding[0] == '\0') put(slots[0].finding, "left files:\n" + files);
}

// A job in its process.
class Running {
 public:
  explicit Running(const Job& job)
      : job_(job), output_(::memfd_create("output", MFD_CLOEXEC)), limit_(Deadline::after(kHang)) {
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::setpgid(0, 0);
      ::dup2(output_.get(), STDERR_FILENO);
      ::close_range(3, ~0U, 0);  // those of the other runs
      run_job(job_, slots_);
      ::_exit(0);
    }
    ::setpgid(pid_, pid_);
    pidfd_ = open_pidfd(pid_);
  }
  Running(Running&&) = default;
  ~Running() = default;

  int pidfd() const { return pidfd_.get(); }
  const Job& job() const { return job_; }
  const Slots& slots() const { return slots_; }

  // True: it has ended, and finding() says how.
  bool look() {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == 0) {
      if (!limit_.expired()) return false;
      for (const pid_t child : descendants_of(pid_)) test::request_stacks(child);
      test::request_stacks(pid_);
      ::poll(nullptr, 0, 500);
      ::kill(-pid_, SIGKILL);
      ::waitpid(pid_, &status, 0);
      finding_ = "hangs\n" + output();
      return true;
    }
    const int ranks = job_.scenario->processes ? kRanks : 1;
    for (int i = 0; i < ranks && finding_.empty(); ++i) {
      finding_ = slots_[i].finding.data();
      if (finding_.empty() && !slots_[i].ended) finding_ = concat("rank ", i, " did not end");
      if (!finding_.empty() && !slots_[i].ended) finding_ += "\n" + output();
    }
    if (finding_.empty() && status != 0) finding_ = concat("status ", status, "\n", output());
    return true;
  }
  const std::string& finding() const { return finding_; }

 private:
  std::string output() const {
    std::string text = read_file(concat("/proc/self/fd/", output_.get())).value_or("");
    return text.size() > 6000 ? text.substr(0, 6000) : text;
  }

  Job job_;
  Slots slots_;
  UniqueFd output_;
  Deadline limit_;
  pid_t pid_ = -1;
  UniqueFd pidfd_;
  std::string finding_;
};

std::vector<std::string> lines_of(const char* text) {
  std::vector<std::string> lines;
  std::string rest(text);
  for (std::size_t end = 0; (end = rest.find('\n')) != std::string::npos;) {
    lines.push_back(rest.substr(0, end));
    rest.erase(0, end + 1);
  }
  return lines;
}

void wait_for_one(std::vector<std::unique_ptr<Running>>& running,
                  const std::function<void(Running&)>& ended) {
  std::vector<pollfd> items;
  for (const auto& one : running) items.push_back({one->pidfd(), POLLIN, 0});
  ::poll(items.data(), items.size(), 200);
  std::erase_if(running, [&](const auto& one) {
    if (!one->look()) return false;
    ended(*one);
    return true;
  });
}

// Counts by the number of the call.
std::vector<Case> all_cases(const long* counts) {
  std::vector<Case> cases;
  for (const auto& fault : all_faults()) {
    for (int call = 0; call < convoy_inject_calls(); ++call) {
      if (std::strcmp(convoy_inject_name(call), fault.call) != 0) continue;
      const auto some = cases_for(fault, counts[call]);
      cases.insert(cases.end(), some.begin(), some.end());
    }
  }
  return cases;
}

void count(Findings& findings, const Running& run) {
  ++findings.runs;
  const int ranks = run.job().scenario->processes ? kRanks : 1;
  bool failed = false;
  std::string error;
  for (int i = 0; i < ranks; ++i) {
    failed = failed || run.slots()[i].failed > 0;
    if (error.empty()) error = run.slots()[i].error.data();
  }
  findings.failed_calls += failed ? 1 : 0;
  findings.errors += error.empty() ? 0 : 1;
  if (std::getenv("CONVOY_TEST_VERBOSE")) {
    std::printf("%s: %s%s\n", to_string(run.job().one).c_str(), failed ? "" : "(not met) ",
                error.c_str());
  }
  if (!run.finding().empty()) {
    findings.texts.push_back(concat(to_string(run.job().one), ": ", run.finding()));
  }
}

}  // namespace

void wrong(const std::string& what) { throw WrongValue(what); }

Findings examine(const Scenario& scenario, Extent extent) {
  Findings findings;
  const Job usual{.scenario = &scenario,
                  .one = {.fault = {"", 0, Fault::Demand::kSuccess}},
                  .usual = {},
                  .baseline = true};
  Running baseline(usual);
  while (!baseline.look()) ::poll(nullptr, 0, 5);
  if (!baseline.finding().empty()) {
    findings.texts.push_back("undisturbed: " + baseline.finding());
    return findings;
  }
  auto cases = all_cases(baseline.slots()[scenario.processes ? scenario.victim : 0].counts.data());
  if (extent == Extent::kSample) cases = sample_of(cases, kSample);
  cases = wanted(cases);

  Job job{.scenario = &scenario, .one = {}, .usual = {}, .baseline = false};
  for (int i = 0; i < kRanks; ++i) job.usual[i] = lines_of(baseline.slots()[i].left.data());
  std::vector<std::unique_ptr<Running>> running;
  for (const auto& one : cases) {
    job.one = one;
    running.push_back(std::make_unique<Running>(job));
    while (running.size() >= kAtOnce) {
      wait_for_one(running, [&](Running& run) { count(findings, run); });
    }
  }
  while (!running.empty()) {
    wait_for_one(running, [&](Running& run) { count(findings, run); });
  }
  return findings;
}

Findings examine_here(const Scenario& scenario) {
  Findings findings;
  convoy_inject_exempt(1);
  Ranks ranks(scenario, {0, 1});
  const auto take_turns = [&](const Case* one, std::chrono::milliseconds patience, Slot& slot) {
    note(slot, ranks.take_turns(make_local_store(), "turn", patience, one), "");
    if (one) slot.failed = convoy_inject_disarm();
  };
  // Twice, so that everything is there that is made once and stays; counted the second time.
  const Case none{.fault = {"", 0, Fault::Demand::kSuccess}, .first = 0};
  Slot slot{};
  take_turns(nullptr, kLongPatience, slot);
  take_turns(&none, kLongPatience, slot);
  std::array<long, 100> counts{};
  for (int call = 0; call < convoy_inject_calls(); ++call) {
    counts[static_cast<std::size_t>(call)] = convoy_inject_count(call);
  }
  const auto usual = holdings();
  if (slot.finding[0] != '\0')
    findings.texts.push_back(concat("undisturbed: ", slot.finding.data()));
  for (const auto& one : wanted(all_cases(counts.data()))) {
    if (!findings.texts.empty() && findings.texts.size() > 20) break;
    std::printf("%s\n", to_string(one).c_str());
    std::fflush(stdout);
    slot = {};
    take_turns(&one, patience_for(one), slot);
    const std::string error = slot.error.data();
    if (slot.finding[0] == '\0') take_turns(nullptr, kLongPatience, slot);
    if (slot.finding[0] == '\0') put(slot.finding, left_behind(scenario, usual));
    ++findings.runs;
    findings.failed_calls += slot.failed > 0 ? 1 : 0;
    findings.errors += error.empty() ? 0 : 1;
    if (slot.finding[0] != '\0') {
      findings.texts.push_back(concat(to_string(one), ": ", slot.finding.data()));
    }
  }
  return findings;
}

}  // namespace convoy::fault
