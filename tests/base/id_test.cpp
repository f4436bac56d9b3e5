#include "base/id.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "support/expect_error.h"

namespace convoy {
namespace {

using test::expect_error;

TEST(IdTest, RandomIdsDiffer) {
  std::set<Id> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(Id::random());
  EXPECT_EQ(ids.size(), 1000u);
}

TEST(IdTest, TextAndBack) {
  const Id id = Id::random();
  EXPECT_EQ(id.to_string().size(), 32u);
  EXPECT_EQ(Id::parse(id.to_string()), id);
  EXPECT_EQ(Id::parse("000102030405060708090a0b0c0d0eff").bytes[15], 0xff);
  EXPECT_EQ(Id::parse("000102030405060708090a0b0c0d0eff").to_string(),
            "000102030405060708090a0b0c0d0eff");
  EXPECT_EQ(Id().to_string(), std::string(32, '0'));
}

TEST(IdTest, ParseRefusesEverythingElse) {
  const std::string good(32, 'a');
  for (const std::string& bad :
       {std::string(), std::string(31, 'a'), std::string(33, 'a'), std::string(32, 'A'),
        std::string(31, 'a') + "g", "0x" + std::string(30, 'a'), std::string(31, 'a') + " ",
        std::string(16, '\0') + std::string(16, 'a')}) {
    expect_error(ErrorKind::kInvalidArgument, "expected 32 lower-case hex digits",
                 [&] { Id::parse(bad); });
  }
  EXPECT_NO_THROW(Id::parse(good));
}

TEST(IdTest, RandomBytesFillsAll) {
  std::vector<std::byte> bytes(5000);
  random_bytes(bytes);
  // A tail left untouched would be zeros.
  EXPECT_TRUE(
      std::any_of(bytes.end() - 16, bytes.end(), [](std::byte b) { return b != std::byte{}; }));
  EXPECT_NO_THROW(random_bytes({}));
  EXPECT_NE(random_u64(), random_u64());
}

TEST(HashTest, IsTheSameEverywhere) {
  // Fingerprints are compared between machines: these values, computed elsewhere, are part of the
  // protocol.
  EXPECT_EQ(hash_text(""), hash_bytes({}));
  EXPECT_EQ(hash_text("convoy"), 0xf5121b88b80044u);
  EXPECT_EQ(hash_text("convoy", 1), 0x471fcfa0f5fb2d9du);
}

TEST(HashTest, SpreadsAndDependsOnSeedAndOrder) {
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 10000; ++i) seen.insert(hash_text(std::to_string(i)));
  EXPECT_EQ(seen.size(), 10000u);
  EXPECT_NE(hash_text("ab"), hash_text("ba"));
  EXPECT_NE(hash_text("ab", 1), hash_text("ab", 2));
  EXPECT_NE(hash_text("a"), hash_text(std::string_view("a\0", 2)));
}

}  // namespace
}  // namespace convoy
