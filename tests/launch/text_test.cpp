#include "launch/text.h"

#include <gtest/gtest.h>

namespace convoy::launch {
namespace {

using namespace std::chrono_literals;

TEST(Text, ParsesDurations) {
  EXPECT_EQ(parse_duration("5"), 5s);
  EXPECT_EQ(parse_duration("5s"), 5s);
  EXPECT_EQ(parse_duration("500ms"), 500ms);
  EXPECT_EQ(parse_duration("1.5s"), 1500ms);
  EXPECT_EQ(parse_duration("2m"), 2min);
  EXPECT_EQ(parse_duration("2min"), 2min);
  EXPECT_EQ(parse_duration("1h"), 1h);
  EXPECT_EQ(parse_duration("0"), 0s);
}

TEST(Text, RefusesWhatIsNoDuration) {
  for (const char* text : {"", "s", "-1", "5y", "5 s", "1e30", "inf", "nan", "0x10", "5ss"}) {
    EXPECT_FALSE(parse_duration(text)) << text;
  }
}

TEST(Text, FormatsDurations) {
  EXPECT_EQ(format_duration(0s), "0 s");
  EXPECT_EQ(format_duration(2ms), "0.002 s");
  EXPECT_EQ(format_duration(20ms), "0.02 s");
  EXPECT_EQ(format_duration(3210ms), "3.2 s");
  EXPECT_EQ(format_duration(5s), "5 s");
  EXPECT_EQ(format_duration(125s), "2 min 5 s");
  EXPECT_EQ(format_duration(3h + 4min), "3 h 4 min");
}

TEST(Text, FormatsBytes) {
  EXPECT_EQ(format_bytes(12), "12 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(64 << 20), "64 MiB");
  EXPECT_EQ(format_bytes(std::uint64_t{3} << 30), "3 GiB");
  EXPECT_EQ(format_bytes(std::uint64_t{3} << 39), "1.5 TiB");
}

TEST(Text, FormatsRanks) {
  EXPECT_EQ(format_ranks({}), "no rank");
  EXPECT_EQ(format_ranks({2}), "rank 2");
  EXPECT_EQ(format_ranks({1, 0}), "ranks 0, 1");
  EXPECT_EQ(format_ranks({0, 1, 2, 3, 5, 7, 8}), "ranks 0-3, 5, 7, 8");
}

TEST(Text, FindsTheNearestWord) {
  const std::vector<std::string> words = {"run", "doctor", "help", "--grace", "--ranks"};
  EXPECT_EQ(nearest("rnu", words), "run");
  EXPECT_EQ(nearest("docter", words), "doctor");
  EXPECT_EQ(nearest("--grce", words), "--grace");
  EXPECT_EQ(nearest("--rank", words), "--ranks");
  EXPECT_FALSE(nearest("zzz", words));
  EXPECT_FALSE(nearest("./train", words));
}

TEST(Text, ParsesWholeNumbersOnly) {
  EXPECT_EQ(parse_int("42"), 42);
  EXPECT_EQ(parse_int("-1"), -1);
  for (const char* text : {"", "4x", " 4", "4 ", "99999999999"})
    EXPECT_FALSE(parse_int(text)) << text;
}

}  // namespace
}  // namespace convoy::launch
