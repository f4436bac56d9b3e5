#include "base/error.h"

#include <gtest/gtest.h>

#include <set>

#include "support/expect_error.h"

namespace convoy {
namespace {

using test::expect_error;

TEST(ErrorTest, KindsHaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const auto kind : {ErrorKind::kInvalidArgument, ErrorKind::kUnsupported, ErrorKind::kTimeout,
                          ErrorKind::kPeerLost, ErrorKind::kResource, ErrorKind::kRemote,
                          ErrorKind::kInternal, ErrorKind::kCancelled}) {
    names.insert(to_string(kind));
  }
  EXPECT_EQ(names.size(), 8u);
  EXPECT_EQ(to_string(static_cast<ErrorKind>(99)), "unknown error");
}

TEST(ErrorTest, FailThrowsKindAndText) {
  expect_error(ErrorKind::kRemote, "rank 3 of 4",
               [] { fail(ErrorKind::kRemote, "rank ", 3, " of ", 4); });
}

TEST(ErrorTest, FailErrnoSaysWhatAndWhy) {
  expect_error(ErrorKind::kInvalidArgument, "opening /x: No such file or directory (errno 2)", [] {
    errno = ENOENT;
    fail_errno("opening ", "/x");
  });
}

TEST(ErrorTest, ErrnoTellsWhatTheCallerCanDo) {
  EXPECT_EQ(errno_kind(ENOMEM), ErrorKind::kResource);
  EXPECT_EQ(errno_kind(EMFILE), ErrorKind::kResource);
  EXPECT_EQ(errno_kind(ETOOMANYREFS), ErrorKind::kResource);
  EXPECT_EQ(errno_kind(EFBIG), ErrorKind::kResource);
  EXPECT_EQ(errno_kind(EPIPE), ErrorKind::kPeerLost);
  EXPECT_EQ(errno_kind(ECONNREFUSED), ErrorKind::kPeerLost);
  EXPECT_EQ(errno_kind(EHOSTUNREACH), ErrorKind::kPeerLost);
  EXPECT_EQ(errno_kind(ETIMEDOUT), ErrorKind::kTimeout);
  EXPECT_EQ(errno_kind(EACCES), ErrorKind::kInvalidArgument);
  EXPECT_EQ(errno_kind(ENOTDIR), ErrorKind::kInvalidArgument);
  EXPECT_EQ(errno_kind(ENOSYS), ErrorKind::kUnsupported);
  // The machine's doing, and none of ours.
  EXPECT_EQ(errno_kind(EIO), ErrorKind::kResource);
  EXPECT_EQ(errno_kind(ENOLCK), ErrorKind::kResource);
  EXPECT_EQ(errno_kind(ESRCH), ErrorKind::kPeerLost);
  EXPECT_EQ(errno_kind(ETXTBSY), ErrorKind::kInvalidArgument);
  EXPECT_EQ(errno_kind(ENODEV), ErrorKind::kUnsupported);
  EXPECT_EQ(errno_kind(EBADF), ErrorKind::kInternal);
}

TEST(ErrorTest, ErrnoTextOfAnUnknownNumber) {
  EXPECT_EQ(errno_text(12345), "Unknown error 12345 (errno 12345)");
}

TEST(ErrorTest, CheckNamesConditionPlaceAndParts) {
  const int ranks = 3;
  CONVOY_CHECK(ranks == 3);
  const auto error = test::error_of([&] { CONVOY_CHECK(ranks == 4, "there are ", ranks); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kInternal);
  const std::string text = error->what();
  EXPECT_NE(text.find("check failed: ranks == 4"), std::string::npos) << text;
  EXPECT_NE(text.find("error_test.cpp:"), std::string::npos) << text;
  EXPECT_NE(text.find("there are 3"), std::string::npos) << text;
  expect_error(ErrorKind::kInternal, "ranks < 0", [&] { CONVOY_CHECK(ranks < 0); });
}

TEST(ErrorTest, DcheckIsACheckUnlessNdebug) {
#ifdef NDEBUG
  EXPECT_NO_THROW(CONVOY_DCHECK(false));
#else
  expect_error(ErrorKind::kInternal, "false", [] { CONVOY_DCHECK(false); });
#endif
}

TEST(ErrorTest, IsAnOrdinaryException) {
  try {
    fail(ErrorKind::kTimeout, "late");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "late");
  }
}

}  // namespace
}  // namespace convoy
