#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "base/concat.h"
#include "base/id.h"
#include "fault/errno_injection.h"
#include "fault/scenarios.h"
#include "launch/launched.h"
#include "os/file.h"

namespace convoy::fault {
namespace {

constexpr std::size_t kSampleOfLaunches = 25;
constexpr int kLines = 200;

struct Launch {
  ExitStatus status;
  std::string id;
  std::string out;
  std::string err;
};

// Two ranks that meet in the launcher's store twice, and say much.
Launch launch_with(const std::map<std::string, std::string>& injection) {
  const std::string id = "test-" + Id::random().to_string();
  launch::Launched::Options options;
  options.arguments = {"run",
                       "--job-id",
                       id,
                       "-n",
                       "2",
                       "--grace",
                       "2s",
                       "--",
                       launch::rank_probe(),
                       "barrier",
                       "up",
                       "flood",
                       std::to_string(kLines),
                       "barrier",
                       "over",
                       "say",
                       "done"};
  options.environment = injection;
  options.environment.insert({"LD_PRELOAD", CONVOY_INJECTION_LIBRARY});
  options.environment.insert({CONVOY_INJECT_PROGRAM_VARIABLE, "convoy"});
  launch::Launched launched(std::move(options));
  Launch done;
  done.status = launched.finish();
  done.id = id;
  done.out = launched.out();
  done.err = launched.err();
  return done;
}

bool complete(const Launch& done) {
  return done.status.success() && launch::count_of(done.out, "] done\n") == 2 &&
         launch::count_of(done.out, "\n") == 2 * (kLines + 1);
}

// What is wrong with how it ended; empty: nothing.
std::string judge(const Launch& done, const Case& one) {
  std::string how = concat(done.status.to_string(), "\n", done.err);
  if (done.status.signal != 0) return "ended by a signal: " + how;
  // A rank may end so ("[0] terminate called ..."): its store is gone.
  if (("\n" + done.err).find("\nterminate called") != std::string::npos) return "crashed: " + how;
  if (!launch::processes_of_job(done.id).empty()) {
    launch::expect_nothing_left(done.id);
    if (testing::Test::HasFailure()) return "processes are left: " + how;
  }
  if (complete(done)) return "";
  // Output that cannot be written is dropped, with a note; the ranks go on.
  if (done.status.success() && done.err.empty()) return "output is missing: " + how;
  if (one.fault.demand == Fault::Demand::kSuccess) return "must not matter: " + how;
  if (done.err.empty()) return "no word about what went wrong: " + how;
  if (done.err.find("internal error") != std::string::npos) return how;
  return "";
}

// How often `convoy` makes each call, in the process that makes it most often.
std::map<std::string, long> count_calls() {
  const TempFolder folder("errno");
  const std::string path = folder.path() + "/counts";
  const Launch done = launch_with({{CONVOY_INJECT_COUNTS_VARIABLE, path}});
  EXPECT_TRUE(complete(done)) << "undisturbed: " << done.status.to_string() << "\n" << done.err;
  std::map<std::string, long> counts;
  std::istringstream lines(read_file(path).value_or(""));
  std::string name;
  for (long count = 0; lines >> name >> count;) {
    counts[name] = std::max(counts[name], count);
  }
  std::filesystem::remove(path);
  return counts;
}

std::size_t temporary_files() {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::getenv("TMPDIR"))) {
    static_cast<void>(entry);
    ++files;
  }
  return files;
}

}  // namespace

void expect_clear_launches(Extent extent) {
  const auto counts = count_calls();
  std::vector<Case> cases;
  for (const auto& fault : all_faults()) {
    const auto count = counts.find(fault.call);
    if (count == counts.end()) continue;
    const auto some = cases_for(fault, count->second);
    cases.insert(cases.end(), some.begin(), some.end());
  }
  EXPECT_GT(cases.size(), 50U) << "hardly a call was counted: is the library in front?";
  if (extent == Extent::kSample) cases = sample_of(cases, kSampleOfLaunches);
  cases = wanted(cases);
  const std::size_t files = temporary_files();
  int errors = 0;
  for (const auto& one : cases) {
    const Launch done =
        launch_with({{CONVOY_INJECT_VARIABLE, concat(one.fault.call, ":", one.fault.error, ":",
                                                     one.first, ":", one.times)}});
    const std::string finding = judge(done, one);
    EXPECT_EQ(finding, "") << to_string(one);
    EXPECT_EQ(temporary_files(), files) << to_string(one) << " left files";
    if (!done.status.success()) ++errors;
    if (std::getenv("CONVOY_TEST_VERBOSE")) {
      std::printf("%s: %s %s\n", to_string(one).c_str(), done.status.to_string().c_str(),
                  done.err.c_str());
    }
  }
  std::printf("%zu runs, %d with an error\n", cases.size(), errors);
}

}  // namespace convoy::fault
