// Flight records from outside: of a running job, of a dead rank, and for PyTorch's own tool.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
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

}  // namespace
}  // namespace convoy::launch
