#include "base/log.h"

#include <gtest/gtest.h>
#include <regex.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <thread>
#include <vector>

#include "base/log_limit.h"
#include "os/process.h"
#include "support/capture.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

using test::StderrCapture;

// POSIX's, since GCC warns about the inside of std::regex.
bool matches(const std::string& text, const std::string& pattern) {
  regex_t compiled{};
  EXPECT_EQ(::regcomp(&compiled, ("^" + pattern + "$").c_str(), REG_EXTENDED | REG_NOSUB), 0);
  const bool found = ::regexec(&compiled, text.c_str(), 0, nullptr, 0) == 0;
  ::regfree(&compiled);
  return found;
}
constexpr const char* kTime = "[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}";

class LogTest : public testing::Test {
 protected:
  ~LogTest() override {
    set_log_level(level_);
    set_log_name("");
    for (const char* name : kNames) ::unsetenv(name);
  }
  static constexpr const char* kNames[] = {"CONVOY_LOG", "CONVOY_DEBUG", "TORCH_DISTRIBUTED_DEBUG"};

  LogLevel level_ = log_level();
};

TEST_F(LogTest, LevelsLetMoreAndMoreThrough) {
  const LogLevel all[] = {LogLevel::kOff, LogLevel::kError, LogLevel::kWarn, LogLevel::kInfo,
                          LogLevel::kDebug};
  for (int level = 0; level < 5; ++level) {
    StderrCapture capture;
    set_log_level(all[level]);
    EXPECT_EQ(log_level(), all[level]);
    log_error("an error");
    log_warn("a warning");
    log_info("an info");
    log_debug("a detail");
    log(LogLevel::kOff, "never");
    const std::string text = capture.text();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), level) << text;
    EXPECT_EQ(text.find("never"), std::string::npos);
  }
}

TEST_F(LogTest, LineSaysLevelTimeNameAndPid) {
  StderrCapture capture;
  set_log_level(LogLevel::kWarn);
  log_warn("plain ", 7);
  set_log_name("rank 3");
  log_error("named");
  std::istringstream lines(capture.text());
  std::string first, second;
  std::getline(lines, first);
  std::getline(lines, second);
  const std::string pid = std::to_string(::getpid());
  EXPECT_TRUE(matches(first, concat("\\[convoy W ", kTime, " pid ", pid, "\\] plain 7"))) << first;
  EXPECT_TRUE(matches(second, concat("\\[convoy E ", kTime, " rank 3 pid ", pid, "\\] named")))
      << second;
}

TEST_F(LogTest, TimeIsLocalTime) {
  StderrCapture capture;
  const auto minutes = [](time_t when) {
    tm local{};
    ::localtime_r(&when, &local);
    return local.tm_hour * 60 + local.tm_min;
  };
  const int before = minutes(::time(nullptr));
  write_log(LogLevel::kError, "x");
  const int after = minutes(::time(nullptr));
  int hour = 0;
  int minute = 0;
  ASSERT_EQ(std::sscanf(capture.text().c_str(), "[convoy E %d:%d:", &hour, &minute), 2);
  const int shown = hour * 60 + minute;
  EXPECT_TRUE(shown == before || shown == after) << capture.text();
}

TEST_F(LogTest, KeepsErrno) {
  StderrCapture capture;
  errno = EDOM;
  write_log(LogLevel::kError, "something");
  EXPECT_EQ(errno, EDOM);
}

TEST_F(LogTest, LinesOfManyThreadsDoNotMix) {
  StderrCapture capture;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < 50; ++i) {
          set_log_name(concat("thread ", t));  // readers beside writers: for ThreadSanitizer
          write_log(LogLevel::kError, std::string(100, static_cast<char>('a' + t)));
        }
      });
    }
  }
  std::istringstream lines(capture.text());
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    EXPECT_TRUE(matches(line, "\\[convoy E [^]]*\\] (a+|b+|c+|d+)")) << line;
  }
  EXPECT_EQ(count, 200);
}

TEST_F(LogTest, ParsesLevels) {
  EXPECT_EQ(parse_log_level("off"), LogLevel::kOff);
  EXPECT_EQ(parse_log_level("error"), LogLevel::kError);
  EXPECT_EQ(parse_log_level("warn"), LogLevel::kWarn);
  EXPECT_EQ(parse_log_level("INFO"), LogLevel::kInfo);
  EXPECT_EQ(parse_log_level("Debug"), LogLevel::kDebug);
  EXPECT_EQ(parse_log_level(""), LogLevel::kWarn);
  EXPECT_EQ(parse_log_level("\xff\xfe"), LogLevel::kWarn);
}

struct Case {
  const char* log;
  const char* debug;
  const char* torch;
  LogLevel level;
};

TEST_F(LogTest, EnvironmentChoosesTheLevel) {
  const Case cases[] = {
      {nullptr, nullptr, nullptr, LogLevel::kWarn}, {"off", nullptr, nullptr, LogLevel::kOff},
      {"error", "info", nullptr, LogLevel::kInfo},  {nullptr, "DETAIL", nullptr, LogLevel::kDebug},
      {"debug", "info", nullptr, LogLevel::kDebug},  // raises only
      {"info", "off", nullptr, LogLevel::kInfo},    {nullptr, nullptr, "INFO", LogLevel::kInfo},
      {nullptr, "off", "DETAIL", LogLevel::kWarn},  // ours, where it is set
      {nullptr, "", "DETAIL", LogLevel::kDebug},
  };
  for (const Case& one : cases) {
    const char* values[] = {one.log, one.debug, one.torch};
    for (int i = 0; i < 3; ++i) {
      if (values[i]) {
        ::setenv(kNames[i], values[i], 1);
      } else {
        ::unsetenv(kNames[i]);
      }
    }
    EXPECT_EQ(log_level_from_environment(), one.level)
        << (one.log ? one.log : "-") << " " << (one.debug ? one.debug : "-") << " "
        << (one.torch ? one.torch : "-");
  }
}

TEST(LogLimitTest, AFewLinesThenOneASecond) {
  LogLimit limit;
  auto now = LogLimit::Clock::now();
  int written = 0;
  std::string last;
  const auto try_one = [&] {
    std::string note;
    if (!limit.allow(note, now)) return;
    ++written;
    last = note;
  };
  for (int i = 0; i < 1000; ++i) try_one();
  EXPECT_EQ(written, 5);
  EXPECT_EQ(last, "");
  now += std::chrono::seconds(1);
  for (int i = 0; i < 1000; ++i) try_one();
  EXPECT_EQ(written, 6);
  EXPECT_EQ(last, " (995 such lines were left out)");
  now += std::chrono::hours(1);
  for (int i = 0; i < 1000; ++i) try_one();
  EXPECT_EQ(written, 11) << "what was not used does not add up";
}

TEST(LogEnvironmentTest, IsReadAtFirstUse) {
  test::RankGroup group(1, test::RankMode::kProcesses, {.environment = {"CONVOY_LOG=info"}});
  group.start([](test::Rank&) {
    EXPECT_EQ(log_level(), LogLevel::kInfo);
    log_info("from the rank");
    log_debug("too much");
  });
  const auto results = group.join();
  EXPECT_NE(results.at(0).output.find("] from the rank\n"), std::string::npos);
  EXPECT_EQ(results.at(0).output.find("too much"), std::string::npos);
}

}  // namespace
}  // namespace convoy
