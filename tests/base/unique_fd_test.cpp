#include "base/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "support/expect_error.h"

namespace convoy {
namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }
UniqueFd open_null() { return UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)); }

TEST(UniqueFdTest, EmptyOwnsNothing) {
  const UniqueFd fd;
  EXPECT_FALSE(fd);
  EXPECT_EQ(fd.get(), -1);
}

TEST(UniqueFdTest, ClosesAtTheEnd) {
  int number = -1;
  {
    const UniqueFd fd = open_null();
    number = fd.get();
    EXPECT_TRUE(is_open(number));
  }
  EXPECT_FALSE(is_open(number));
}

TEST(UniqueFdTest, ZeroIsADescriptor) {
  const UniqueFd copy = duplicate(0);
  UniqueFd zero(0);
  EXPECT_TRUE(zero);
  EXPECT_EQ(zero.release(), 0);
}

TEST(UniqueFdTest, MovePassesOwnership) {
  UniqueFd a = open_null();
  const int number = a.get();
  UniqueFd b(std::move(a));
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): what a move leaves is the point
  EXPECT_EQ(b.get(), number);
  UniqueFd c = open_null();
  const int old = c.get();
  c = std::move(b);
  EXPECT_EQ(c.get(), number);
  EXPECT_FALSE(is_open(old));
  auto& same = c;
  c = std::move(same);
  EXPECT_TRUE(is_open(number));
}

TEST(UniqueFdTest, ReleaseGivesItAway) {
  UniqueFd a = open_null();
  const int number = a.release();
  EXPECT_FALSE(a);
  EXPECT_TRUE(is_open(number));
  ::close(number);
}

TEST(UniqueFdTest, ResetTakesAnother) {
  UniqueFd a = open_null();
  const int old = a.get();
  a.reset(open_null().release());
  EXPECT_FALSE(is_open(old));
  EXPECT_TRUE(a);
  a.reset();
  EXPECT_FALSE(a);
}

TEST(UniqueFdTest, KeepsErrno) {
  UniqueFd bad(1'000'000);  // closing it sets EBADF
  errno = ENOSPC;
  bad.reset();
  EXPECT_EQ(errno, ENOSPC);
}

TEST(DuplicateTest, IsTheSameFileAndCloseOnExec) {
  const UniqueFd a = open_null();
  const UniqueFd b = duplicate(a.get());
  EXPECT_NE(a.get(), b.get());
  EXPECT_GE(b.get(), 3);
  EXPECT_TRUE(::fcntl(b.get(), F_GETFD) & FD_CLOEXEC);
}

TEST(DuplicateTest, OfNothingThrows) {
  test::expect_error(ErrorKind::kInternal, "duplicating descriptor -1", [] { duplicate(-1); });
}

}  // namespace
}  // namespace convoy
