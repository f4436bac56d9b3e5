#include "convoy/deadline.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace convoy {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using Clock = Deadline::Clock;

TEST(DeadlineTest, AfterIsThatFarAway) {
  const auto before = Clock::now();
  const auto deadline = Deadline::after(seconds(10));
  const auto after = Clock::now();
  EXPECT_GE(deadline.when(), before + seconds(10));
  EXPECT_LE(deadline.when(), after + seconds(10));
  EXPECT_FALSE(deadline.expired());
  EXPECT_FALSE(deadline.is_never());
  EXPECT_LE(deadline.remaining(), seconds(10));
  EXPECT_GT(deadline.remaining(), seconds(5));
}

TEST(DeadlineTest, ZeroAndNegativeAreExpired) {
  for (const auto timeout : {nanoseconds(0), nanoseconds(-1), nanoseconds::min()}) {
    const auto deadline = Deadline::after(timeout);
    EXPECT_TRUE(deadline.expired());
    EXPECT_EQ(deadline.remaining(), nanoseconds(0));
    EXPECT_EQ(deadline.poll_timeout_ms(), 0);
  }
}

TEST(DeadlineTest, TooLargeForTheClockIsNever) {
  EXPECT_TRUE(Deadline::after(nanoseconds::max()).is_never());
  // These overflow when they are converted to nanoseconds.
  EXPECT_TRUE(Deadline::after(milliseconds::max()).is_never());
  EXPECT_TRUE(Deadline::after(hours::max()).is_never());
  EXPECT_TRUE(Deadline::after(std::chrono::duration<double>(1e300)).is_never());
  EXPECT_TRUE(Deadline::after(milliseconds::min()).expired());
  EXPECT_FALSE(Deadline::after(hours(24 * 365 * 50)).is_never());
}

TEST(DeadlineTest, TakesEveryUnit) {
  EXPECT_GT(Deadline::after(std::chrono::duration<double>(1.5)).remaining(), milliseconds(500));
  EXPECT_GT(Deadline::after(std::chrono::minutes(1)).remaining(), seconds(30));
}

TEST(DeadlineTest, Never) {
  const auto never = Deadline::never();
  EXPECT_TRUE(never.is_never());
  EXPECT_FALSE(never.expired());
  EXPECT_EQ(never.remaining(), nanoseconds::max());
  EXPECT_EQ(never.poll_timeout_ms(), -1);
}

TEST(DeadlineTest, AtTheBeginningOfTimeIsExpired) {
  const auto deadline = Deadline::at(Clock::time_point::min());
  EXPECT_TRUE(deadline.expired());
  EXPECT_EQ(deadline.remaining(), nanoseconds(0));  // not an overflow to "soon"
  EXPECT_EQ(deadline.poll_timeout_ms(), 0);
}

TEST(DeadlineTest, PollTimeoutRoundsUp) {
  // Rounded down, a wait would return early and spin through the last millisecond.
  const auto deadline = Deadline::after(milliseconds(50));
  const int ms = deadline.poll_timeout_ms();
  const auto left = deadline.remaining();
  EXPECT_GE(milliseconds(ms), left);
  EXPECT_LE(ms, 50);
  EXPECT_EQ(Deadline::at(Clock::now() + nanoseconds(999'999'999)).poll_timeout_ms(), 1000);
}

TEST(DeadlineTest, PollTimeoutFitsAnInt) {
  EXPECT_EQ(Deadline::after(hours(24 * 365 * 50)).poll_timeout_ms(), 1'000'000'000);
}

TEST(DeadlineTest, ADurationConverts) {
  const auto left = [](const Deadline& deadline) { return deadline.remaining(); };
  EXPECT_GT(left(std::chrono::hours(1)), std::chrono::minutes(59));
  EXPECT_LE(left(std::chrono::hours(1)), std::chrono::hours(1));
  EXPECT_EQ(left(std::chrono::hours::max()), std::chrono::nanoseconds::max());
}

TEST(TimeoutTest, ADurationBeginsWithTheCall) {
  const Timeout hour = std::chrono::hours(1);
  EXPECT_TRUE(hour.is_set());
  EXPECT_FALSE(hour.is_deadline());
  EXPECT_EQ(hour.left(), std::chrono::hours(1));
  EXPECT_GT(hour.deadline(Deadline::never()).remaining(), std::chrono::minutes(59));
  EXPECT_TRUE(Timeout(std::chrono::hours::max()).deadline(std::chrono::hours(1)).is_never());
}

TEST(TimeoutTest, ADeadlineStaysWhereItIs) {
  const auto soon = Deadline::after(std::chrono::hours(1));
  const Timeout until = soon;
  EXPECT_TRUE(until.is_deadline());
  EXPECT_EQ(until.deadline(Deadline::never()), soon);
  EXPECT_LE(*until.left(), std::chrono::hours(1));
  EXPECT_EQ(Timeout(Deadline::never()).left(), std::chrono::nanoseconds::max());
}

TEST(TimeoutTest, NotSetIsWhatTheCalleeHas) {
  const Timeout none;
  EXPECT_FALSE(none.is_set());
  EXPECT_EQ(none.left(), std::nullopt);
  EXPECT_TRUE(none.deadline(Deadline::never()).is_never());
}

TEST(DeadlineTest, Orders) {
  const auto early = Deadline::at(Clock::time_point(seconds(1)));
  const auto late = Deadline::at(Clock::time_point(seconds(2)));
  EXPECT_LT(early, late);
  EXPECT_LT(late, Deadline::never());
  EXPECT_EQ(early, Deadline::at(early.when()));
}

}  // namespace
}  // namespace convoy
