// Flight records from outside: of a running job, of a dead rank, and for PyTorch's own tool.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <thread>

#include "base/concat.h"
#include "launch/json.h"
#include "launch/launched.h"
#include "os/file.h"
#include "os/flight_log.h"

namespace convoy::launch {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;

// Three ranks of which the second does not come to the third all_reduce; returns when the others
// wait for it there.
Launched stuck_job(std::vector<std::string> options) {
  options.insert(options.end(), {"-n", "3"});
  auto job = Launched::run(
      options, {"all-reduce", "2", "pid", "only", "1", "wait", "all", "all-reduce", "1", "wait"});
  EXPECT_TRUE(job.wait_for("pid ", 3));
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  const auto waiting = [&] {
    int count = 0;
    for (const auto& log : flight::read_job(job.job_id())) {
      const auto* latest = log.latest();
      if (latest && latest->number == 3 && latest->under_way()) ++count;
    }
    return count == 2;
  };
  while (!waiting() && !deadline.expired()) std::this_thread::yield();
  EXPECT_FALSE(deadline.expired());
  return job;
}

TEST(Record, ShowsARunningJob) {
  auto job = stuck_job({});
  const auto text = run_convoy({"record", "--last", "1", job.job_id()});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(
      text.out,
      AllOf(HasSubstr(concat("rank 0, pid ", job.pid_of_rank(0),
                             ": it is in all_reduce #3 of group \"world\" (probe.cpp:40)")),
            HasSubstr("  | all_reduce #3 of group \"world\", 4 x f32, under way for "),
            HasSubstr(concat("rank 1, pid ", job.pid_of_rank(1), ": it is in user code for ")),
            HasSubstr("  | all_reduce #2 of group \"world\", 4 x f32, completed in "),
            HasSubstr("  waited for by ranks 0, 2 in all_reduce #3 of group \"world\" "
                      "(probe.cpp:40)\n")));
  // By the number of the launcher, and of one rank.
  EXPECT_EQ(count_of(run_convoy({"record", std::to_string(job.pid())}).out, "rank "),
            count_of(run_convoy({"record", job.job_id()}).out, "rank "));
  EXPECT_THAT(run_convoy({"record", std::to_string(job.pid_of_rank(1))}).out,
              StartsWith("rank 1, pid "));
  const auto json = Json::parse(run_convoy({"record", "--json", job.job_id()}).out);
  ASSERT_TRUE(json);
  const auto* ranks = std::get_if<Json::Array>(&json->value);
  ASSERT_TRUE(ranks);
  ASSERT_EQ(ranks->size(), 3U);
  for (const auto& rank : *ranks) {
    EXPECT_EQ(*rank.member("version")->text(), "2.10");
    EXPECT_GE(std::get<Json::Array>(rank.member("entries")->value).size(), 2U);
  }
  job.kill(SIGTERM);
  job.finish();
}

TEST(Record, ListsTheJobsThatRun) {
  auto job = stuck_job({});
  const auto list = run_convoy({"record"});
  EXPECT_EQ(list.code, 0) << list.err;
  EXPECT_THAT(list.out, AllOf(HasSubstr(concat(job.job_id(), ": 3 ranks, pids ", job.pid_of_rank(0),
                                               ", ", job.pid_of_rank(1), ", ")),
                              HasSubstr("rank_probe"), HasSubstr("'convoy record JOB'")));
  job.kill(SIGTERM);
  job.finish();
}

// Ranks 0 and 1 are in the operation, which needs rank 2: nobody waits for those two.
TEST(Record, NobodyIsLateWhoHasArrived) {
  auto job = Launched::run({"-n", "3"}, {"all-reduce", "1", "pid", "only", "2", "wait", "all",
                                         "all-reduce", "1", "wait"});
  ASSERT_TRUE(job.wait_for("pid ", 3));
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  const auto arrived = [&] {
    int count = 0;
    for (const auto& log : flight::read_job(job.job_id())) {
      const auto* latest = log.latest();
      if (latest && latest->number == 2 && latest->under_way()) ++count;
    }
    return count == 2;
  };
  while (!arrived() && !deadline.expired()) std::this_thread::yield();
  ASSERT_FALSE(deadline.expired());
  const auto text = run_convoy({"record", job.job_id()}).out;
  EXPECT_EQ(count_of(text, "waited for by"), 1) << text;
  const auto late = text.find("rank 2, pid ");
  ASSERT_NE(late, std::string::npos);
  EXPECT_THAT(text.substr(late),
              HasSubstr("waited for by ranks 0, 1 in all_reduce #2 of group \"world\""));
  job.kill(SIGTERM);
  job.finish();
}

TEST(Record, SaysWhenThereIsNoSuchJob) {
  const auto none = run_convoy({"record", "no-such-job"});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, HasSubstr("no rank of a job 'no-such-job' is running here"));
  EXPECT_EQ(run_convoy({"record", "a", "b"}).code, 2);
  EXPECT_THAT(run_convoy({"help", "record"}).out, HasSubstr("torchfrtrace"));
}

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen((command + " 2>&1").c_str(), "r"),
                                                   &::pclose);
  std::string text;
  std::array<char, 4096> buffer;
  while (const auto n = std::fread(buffer.data(), 1, buffer.size(), pipe.get())) {
    text.append(buffer.data(), n);
  }
  return text;
}

// After a death the launcher tells what the rank did last and who waited; what all of them did is
// in the log folder, for torchfrtrace, which finds the rank that did not come.
TEST(Record, OutlivesARank) {
  const TempFolder folder("record");
  auto job = stuck_job({"--log-dir", folder.path()});
  ASSERT_EQ(::kill(job.pid_of_rank(1), SIGKILL), 0);
  EXPECT_EQ(job.finish().shell_code(), 137);
  EXPECT_THAT(job.err(),
              AllOf(HasSubstr("  last operations of rank 1:\n"
                              "    | all_reduce #1 of group \"world\", 4 x f32, completed in "),
                    HasSubstr("    | all_reduce #2 of group \"world\", 4 x f32, completed in "),
                    HasSubstr("  waited for it: ranks 0, 2 in all_reduce #3 of group \"world\" "
                              "(probe.cpp:40)\n")));
  for (const char* name : {"rank_0", "rank_1", "rank_2", "0.json"}) {
    EXPECT_TRUE(read_file(concat(folder.path(), "/flight/", name))) << name;
  }
  if (::access(CONVOY_TORCHFRTRACE, X_OK) != 0) {
    GTEST_SKIP() << "no torchfrtrace at " << CONVOY_TORCHFRTRACE;
  }
  EXPECT_THAT(
      output_of(concat(CONVOY_TORCHFRTRACE, " ", folder.path(), "/flight")),
      AllOf(HasSubstr("Not all ranks joining collective, sequence number: 3"),
            HasSubstr("missing ranks: {1}"), HasSubstr("main at /src/probe.cpp:40"),
            testing::Not(HasSubstr("sequence number: 1")), testing::Not(HasSubstr("Traceback"))));
}

// --- calls ---

// worker2 calls train_step of worker0, which never answers, after a call that it did answer.
// Returns when it runs.
Launched job_with_a_stuck_call(std::vector<std::string> options) {
  options.insert(options.end(), {"-n", "3"});
  auto job = Launched::run(options, {"meet", "pid", "only", "2", "call-echo", "0",
                                     "call-train-step", "0", "all", "wait"});
  EXPECT_TRUE(job.wait_for("pid ", 3));
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  const auto runs = [&] {
    for (const auto& log : flight::read_job(job.job_id())) {
      for (const auto& call : log.calls) {
        if (call.served && call.operation == "train_step" && call.under_way()) return true;
      }
    }
    return false;
  };
  while (!runs() && !deadline.expired()) std::this_thread::yield();
  EXPECT_FALSE(deadline.expired());
  return job;
}

constexpr const char* kWaits =
    "worker2 \\(rank 2\\): waits since [0-9.]+ s for worker0: train_step, "
    "call 2; it runs there since [0-9.]+ s\n";

// Every arrow has two ends, of which the second is not before the first, and joins two processes.
// Returns how many there are.
std::size_t check_arrows(const Json& trace) {
  struct End {
    double time = -1;
    double process = -1;
  };
  std::map<double, std::pair<End, End>> arrows;
  const auto number = [](const Json& event, const char* name) {
    const Json* const found = event.member(name);
    return found ? std::get<double>(found->value) : -1;
  };
  for (const Json& event : std::get<Json::Array>(trace.member("traceEvents")->value)) {
    const std::string phase = *event.member("ph")->text();
    if (phase != "s" && phase != "f") continue;
    auto& [begin, end] = arrows[number(event, "id")];
    End& one = phase == "s" ? begin : end;
    EXPECT_LT(one.time, 0) << "twice: " << number(event, "id");
    one = {number(event, "ts"), number(event, "pid")};
  }
  for (const auto& [id, arrow] : arrows) {
    EXPECT_GT(arrow.first.time, 0) << id;
    EXPECT_GE(arrow.second.time, arrow.first.time) << id;
    EXPECT_NE(arrow.first.process, arrow.second.process) << id;
  }
  return arrows.size();
}

std::size_t spans_of(const Json& trace, const std::string& name) {
  std::size_t count = 0;
  for (const Json& event : std::get<Json::Array>(trace.member("traceEvents")->value)) {
    if (*event.member("ph")->text() == "X" && *event.member("name")->text() == name) ++count;
  }
  return count;
}

TEST(Record, ShowsWhoWaitsForWhomInACall) {
  const TempFolder folder("record");
  auto job = job_with_a_stuck_call({});
  const auto text = run_convoy({"record", job.job_id()});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out,
              AllOf(HasSubstr(concat("rank 2, pid ", job.pid_of_rank(2),
                                     ": 1 call and 0 handlers under way\n"
                                     "  | worker2 (rank 2): called worker0: echo, call 1, "
                                     "answered in ")),
                    ContainsRegex(kWaits),
                    ContainsRegex("worker0 \\(rank 0\\): runs since [0-9.]+ s for worker2: "
                                  "train_step, call 2\n")));
  // The same for machines.
  const auto json = run_convoy({"record", "--json", job.job_id()}).out;
  ASSERT_TRUE(Json::parse(json));
  EXPECT_THAT(json,
              HasSubstr("\"function\": \"train_step\", \"number\": 2, \"state\": \"running\""));
  const std::string file = folder.path() + "/trace.json";
  EXPECT_EQ(run_convoy({"record", "--trace", file, job.job_id()}).code, 0);
  const auto trace = Json::parse(read_file(file).value());
  ASSERT_TRUE(trace);
  EXPECT_EQ(check_arrows(*trace), 3U);  // echo's call and answer, train_step's call
  EXPECT_EQ(spans_of(*trace, "train_step -> worker0"), 1U);
  EXPECT_EQ(spans_of(*trace, "train_step <- worker2"), 1U);
  job.kill(SIGTERM);
  job.finish();
}

TEST(Record, CallsOutliveAWorker) {
  const TempFolder folder("record");
  auto job = job_with_a_stuck_call({"--log-dir", folder.path()});
  ASSERT_EQ(::kill(job.pid_of_rank(0), SIGKILL), 0);
  EXPECT_EQ(job.finish().shell_code(), 137);
  EXPECT_THAT(job.err(),
              AllOf(ContainsRegex("  calls under way of rank 0:\n"
                                  "    \\| worker0 \\(rank 0\\): runs since [0-9.]+ s for worker2: "
                                  "train_step, call 2\n"),
                    ContainsRegex("  waited for it: worker2 \\(rank 2\\) since [0-9.]+ s: "
                                  "train_step, call 2, which ran there\n")));
  const auto trace = read_file(folder.path() + "/flight/trace.json");
  ASSERT_TRUE(trace);
  EXPECT_TRUE(Json::parse(*trace));
}

// One that hangs is stopped by a person, or by the clock.
TEST(Record, TellsOfCallsWhenAJobIsEnded) {
  auto job = Launched::run({"-n", "3", "--timeout", "3s"},
                           {"meet", "only", "2", "call-echo", "0", "call-train-step", "0", "only",
                            "1", "shutdown", "all", "wait"});
  EXPECT_EQ(job.finish().shell_code(), 124);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("  calls under way:\n    | "), ContainsRegex(kWaits),
                               ContainsRegex("worker1 \\(rank 1\\): waits since [0-9.]+ s for "
                                             "others: shutdown; worker0, worker2 have not "
                                             "come\n")));
}

TEST(Record, ATraceOfAWholeJob) {
  const TempFolder folder("record");
  const std::string file = folder.path() + "/trace.json";
  constexpr std::size_t kMany = 3000;  // more than a flight record has by itself
  auto job = Launched::run(
      {"-n", "2", "--trace", file},
      {"meet", "only", "1", "call-often", std::to_string(kMany), "all", "barrier", "end"});
  EXPECT_EQ(job.finish().shell_code(), 0) << job.err();
  const auto trace = Json::parse(read_file(file).value());
  ASSERT_TRUE(trace);
  EXPECT_EQ(spans_of(*trace, "echo -> worker0"), kMany);
  EXPECT_EQ(spans_of(*trace, "echo <- worker1"), kMany);
  EXPECT_EQ(check_arrows(*trace), 2 * kMany);
  EXPECT_THAT(
      run_convoy({"run", "-n", "1", "--trace", folder.path() + "/no/such/file", "true"}).err,
      HasSubstr("/no/such/file"));
}

}  // namespace
}  // namespace convoy::launch
