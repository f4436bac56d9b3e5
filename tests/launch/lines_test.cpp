#include "launch/lines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace convoy::launch {
namespace {

using testing::ElementsAre;

class Lines : public testing::Test {
 protected:
  void feed(std::string_view bytes) { splitter_.feed(bytes, collector()); }
  void flush() { splitter_.flush(collector()); }
  std::function<void(std::string_view, bool)> collector() {
    return [this](std::string_view text, bool continues) {
      seen_.push_back((continues ? "+" : "") + std::string(text));
    };
  }

  LineSplitter splitter_;
  std::vector<std::string> seen_;
};

TEST_F(Lines, AreCutAtNewlines) {
  feed("a\n\nbc");
  EXPECT_THAT(seen_, ElementsAre("a", ""));
  feed("d\n");
  EXPECT_THAT(seen_, ElementsAre("a", "", "bcd"));
  flush();
  EXPECT_EQ(seen_.size(), 3U);
}

TEST_F(Lines, LastOneMayHaveNoNewline) {
  feed("a\nb");
  flush();
  EXPECT_THAT(seen_, ElementsAre("a", "b"));
}

TEST_F(Lines, LongOnesComeInPieces) {
  const std::string piece(LineSplitter::kLongest, 'x');
  feed(piece + piece + "end\nnext\n");
  EXPECT_THAT(seen_, ElementsAre(piece, "+" + piece, "+end", "next"));
}

TEST_F(Lines, OfTheGreatestLengthStayWhole) {
  const std::string line(LineSplitter::kLongest, 'x');
  feed(line);
  EXPECT_TRUE(seen_.empty());
  feed("\n");
  EXPECT_THAT(seen_, ElementsAre(line));
}

TEST_F(Lines, ByteByByteMakesNoDifference) {
  const std::string text = std::string(LineSplitter::kLongest + 10, 'y') + "\nshort\n\nrest";
  feed(text);
  flush();
  const auto at_once = std::exchange(seen_, {});
  for (const char byte : text) feed({&byte, 1});
  flush();
  EXPECT_EQ(seen_, at_once);
}

TEST(LastLines, KeepsTheLast) {
  Tail tail;
  for (int i = 0; i < 30; ++i) tail.add("line " + std::to_string(i));
  const auto lines = tail.lines();
  ASSERT_EQ(lines.size(), Tail::kLines);
  EXPECT_EQ(lines.front(), "line 10");
  EXPECT_EQ(lines.back(), "line 29");
}

// What libtorch prints of an exception: the message, then more frames than fit.
TEST(LastLines, KeepsTheMessageAboveAStackTrace) {
  Tail tail;
  tail.add("terminate called after throwing an instance of 'c10::Error'");
  tail.add("  what():  mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)");
  tail.add("Exception raised from meta at LinearAlgebra.cpp:191 (most recent call first):");
  for (int i = 0; i < 60; ++i) {
    tail.add("frame #" + std::to_string(i) +
             ": at::native::addmm + 0x60 (0x7f in libtorch_cpu.so)");
  }
  tail.add("");
  const auto lines = tail.lines();
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_THAT(lines[1], testing::HasSubstr("mat1 and mat2 shapes cannot be multiplied"));
}

TEST(LastLines, CutsLongOnes) {
  Tail tail;
  tail.add(std::string(5000, 'x'));
  EXPECT_EQ(tail.lines()[0], std::string(Tail::kLineBytes, 'x') + " ...");
}

TEST(LastLines, ShowsTheLastStateOfAProgressBar) {
  Tail tail;
  tail.add("\r10%\r50%\r100%");
  tail.add("dos line\r");
  EXPECT_THAT(tail.lines(), ElementsAre("100%", "dos line"));
}

}  // namespace
}  // namespace convoy::launch
