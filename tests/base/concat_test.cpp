#include "base/concat.h"

#include <gtest/gtest.h>

namespace convoy {
namespace {

TEST(ConcatTest, StreamsPartsOneAfterAnother) {
  EXPECT_EQ(concat("a", 1, ' ', std::string("b"), 2.5, std::string_view("c")), "a1 b2.5c");
}

TEST(ConcatTest, KeepsZeroBytes) { EXPECT_EQ(concat(std::string("a\0b", 3)).size(), 3u); }

TEST(QuotedTest, KeepsPlainText) { EXPECT_EQ(in_quotes("rank 3: 'x'"), "'rank 3: 'x''"); }

TEST(QuotedTest, ShowsWhatCannotBePrinted) {
  EXPECT_EQ(in_quotes(std::string_view("a\0\n\x1b\xff", 5)), "'a\\x00\\x0a\\x1b\\xff'");
}

TEST(QuotedTest, CutsLongText) {
  EXPECT_EQ(in_quotes("abcdef", 3), "'abc'... (6 bytes)");
  EXPECT_EQ(in_quotes("abc", 3), "'abc'");
  EXPECT_EQ(in_quotes(""), "''");
}

}  // namespace
}  // namespace convoy
