// What every Store owes its users: operations and their edge cases. contract_wait_test.cpp has what
// waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "base/concat.h"
#include "store_variants.h"

namespace convoy::test {
namespace {

class StoreContract : public testing::TestWithParam<StoreVariant> {
 protected:
  StoreWorld world_{GetParam()};
  std::shared_ptr<Store> store_ = world_.client();
};
INSTANTIATE_TEST_SUITE_P(Variants, StoreContract, all_variants(), variant_name);

using Keys = std::vector<std::string>;

std::string all_bytes() {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes.push_back(static_cast<char>(i));
  return bytes;
}

TEST_P(StoreContract, SetAndGet) {
  store_->set("key", "one");
  EXPECT_EQ(store_->get("key"), "one");
  EXPECT_EQ(store_->get("key", soon()), "one");
  EXPECT_EQ(store_->try_get("key"), "one");
  store_->set("key", "two");
  EXPECT_EQ(world_.client()->get("key"), "two");
  EXPECT_EQ(store_->try_get("other"), std::nullopt);
  EXPECT_GT(store_->timeout(), std::chrono::seconds(1));
}

TEST_P(StoreContract, KeysAndValuesAreAnyBytes) {
  const std::string bytes = all_bytes();
  store_->set("", "of the empty key");
  store_->set("empty", "");
  store_->set(bytes, bytes);
  store_->set(std::string("a\0b", 3), "with a zero");
  store_->set("a", "without");
  EXPECT_EQ(store_->get(""), "of the empty key");
  EXPECT_EQ(store_->get("empty"), "");
  EXPECT_EQ(store_->try_get("empty"), "");
  EXPECT_EQ(store_->get(bytes), bytes);
  EXPECT_EQ(store_->get(std::string("a\0b", 3)), "with a zero");
  EXPECT_EQ(store_->get("a"), "without");
  EXPECT_EQ(store_->keys("").size(), 5u);
  EXPECT_EQ(store_->keys(bytes), Keys{bytes});
  EXPECT_EQ(store_->compare_set(bytes, bytes, "new"), "new");
  EXPECT_TRUE(store_->erase(""));
  EXPECT_FALSE(store_->erase(""));
}

TEST_P(StoreContract, LargestValueAndOneByteMore) {
  if (GetParam() != StoreVariant::kSocket) {  // slow (memory is new at every step): once is enough
    const std::string large(std::size_t{3} << 20, 'x');
    store_->set("large", large);
    EXPECT_TRUE(store_->get("large") == large);  // not EXPECT_EQ: it would print it
    return;
  }
  const std::size_t limit = StoreLimits().value_bytes;
  std::string large(limit, 'x');
  large[limit / 2] = 'y';
  store_->set("large", large);
  EXPECT_TRUE(store_->get("large") == large);
  EXPECT_ERROR(kResource, concat("grow to ", limit + 1, " bytes"), store_->append("large", "z"));
  large.push_back('z');
  EXPECT_ERROR(kResource, std::to_string(limit), store_->set("large", large));
  EXPECT_ERROR(kInvalidArgument, concat("(", limit, " bytes)"), store_->add("large", 1));
  EXPECT_TRUE(store_->erase("large"));
}

TEST_P(StoreContract, LongestKeyAndOneByteMore) {
  const std::size_t prefix =
      store_->keys("").size() +
      (GetParam() >= StoreVariant::kPrefixLocal ? std::string("outer/").size() : 0);
  const std::string longest(StoreLimits().key_bytes - prefix, 'k');
  store_->set(longest, "v");
  EXPECT_EQ(store_->get(longest), "v");
  const std::string longer = longest + "k";
  EXPECT_ERROR(kResource, "a key of 4097 bytes; at most 4096", store_->set(longer, "v"));
  EXPECT_ERROR(kResource, "a key of 4097 bytes", store_->get(longer, soon()));
  EXPECT_ERROR(kResource, "a key of 4097 bytes", store_->add(longer, 1));
  EXPECT_ERROR(kResource, "a key of 4097 bytes", store_->watch(longer, 0, soon()));
  EXPECT_ERROR(kResource, "a key of 4097 bytes", store_->wait(Keys{"a", longer}, soon()));
  EXPECT_EQ(store_->keys(""), Keys{longest});
}

TEST_P(StoreContract, TooManyKeysInOneRequest) {
  const std::size_t limit = StoreLimits().keys_per_request;
  Keys keys(limit, "same");
  store_->set("same", "");
  EXPECT_TRUE(store_->check(keys));
  store_->wait(keys, soon());
  keys.push_back("same");
  EXPECT_ERROR(kResource, "16384", store_->check(keys));
  EXPECT_ERROR(kResource, "16384", store_->wait(keys, soon()));
  keys.resize(10 * limit, "same");
  EXPECT_ERROR(kResource, "16384", store_->wait(keys, soon()));
  EXPECT_TRUE(store_->check(Keys{"same"}));  // the connection goes on
}

TEST_P(StoreContract, Check) {
  store_->set("a", "");
  store_->set("b", "");
  EXPECT_TRUE(store_->check({}));
  EXPECT_TRUE(store_->check(Keys{"a"}));
  EXPECT_TRUE(store_->check(Keys{"a", "b", "a"}));
  EXPECT_FALSE(store_->check(Keys{"a", "c"}));
  EXPECT_FALSE(store_->check(Keys{"c"}));
}

TEST_P(StoreContract, Add) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(store_->add("n", -7), -2);
  EXPECT_EQ(store_->add("n", 0), -2);
  EXPECT_EQ(store_->get("n"), "-2");
  EXPECT_EQ(store_->add("fresh", 0), 0);
  EXPECT_EQ(store_->get("fresh"), "0");
  store_->set("n", "41");
  EXPECT_EQ(world_.client()->add("n", 1), 42);
  store_->set("n", "007");
  EXPECT_EQ(store_->add("n", 1), 8);
}

TEST_P(StoreContract, AddToWhatIsNoNumber) {
  for (const std::string text : {"", " 1", "1 ", "1a", "0x1", "+1", "1e3", "-", "one", "--1",
                                 "9223372036854775808", "-9223372036854775809"}) {
    store_->set("n", text);
    EXPECT_ERROR(kInvalidArgument, "value '" + text + "' is not a number", store_->add("n", 1));
    EXPECT_EQ(store_->get("n"), text);
  }
}

TEST_P(StoreContract, AddDoesNotOverflow) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(store_->add("n", kMost), kMost);
  EXPECT_ERROR(kInvalidArgument, "overflows", store_->add("n", 1));
  EXPECT_EQ(store_->get("n"), std::to_string(kMost));
  EXPECT_EQ(store_->add("n", kLeast), -1);
  EXPECT_EQ(store_->add("m", kLeast), kLeast);
  EXPECT_ERROR(kInvalidArgument, "overflows", store_->add("m", -1));
  EXPECT_EQ(store_->add("m", kMost), -1);
}

TEST_P(StoreContract, Append) {
  store_->append("text", "");
  EXPECT_EQ(store_->get("text"), "");
  store_->append("text", "one");
  store_->append("text", "");
  world_.client()->append("text", " two");
  EXPECT_EQ(store_->get("text"), "one two");
  const auto before = store_->watch("text", 0, soon());
  store_->append("text", "!");
  EXPECT_EQ(before.value, "one two");  // what was given out does not change
  EXPECT_EQ(store_->get("text"), "one two!");
}

TEST_P(StoreContract, CompareSet) {
  EXPECT_EQ(store_->compare_set("k", "old", "new"), "old");  // missing, and stays so
  EXPECT_FALSE(store_->check(Keys{"k"}));
  EXPECT_EQ(store_->compare_set("k", "", "first"), "first");  // missing, and is made
  EXPECT_EQ(store_->compare_set("k", "", "second"), "first");
  EXPECT_EQ(store_->compare_set("k", "wrong", "second"), "first");
  EXPECT_EQ(store_->compare_set("k", "first", "second"), "second");
  EXPECT_EQ(store_->get("k"), "second");
  EXPECT_EQ(store_->compare_set("k", "second", ""), "");
  EXPECT_EQ(store_->get("k"), "");
  EXPECT_EQ(store_->compare_set("k", "", "again"), "again");  // holds the empty value
}

TEST_P(StoreContract, Erase) {
  EXPECT_FALSE(store_->erase("k"));
  store_->set("k", "v");
  EXPECT_TRUE(store_->erase("k"));
  EXPECT_FALSE(store_->erase("k"));
  EXPECT_EQ(store_->try_get("k"), std::nullopt);
  EXPECT_EQ(store_->add("k", 1), 1);  // nothing of the old one is left
}

TEST_P(StoreContract, KeysAreSortedAndBeginWithThePrefix) {
  EXPECT_EQ(store_->keys(""), Keys{});
  Keys all = {"a", "a/1", "a/10", "a/2", "aa", "b", "", "\xff\xff", "\xff"};
  for (const auto& key : all) store_->set(key, "");
  std::sort(all.begin(), all.end());
  EXPECT_EQ(store_->keys(""), all);
  EXPECT_EQ(store_->keys("a"), (Keys{"a", "a/1", "a/10", "a/2", "aa"}));
  EXPECT_EQ(store_->keys("a/"), (Keys{"a/1", "a/10", "a/2"}));
  EXPECT_EQ(store_->keys("\xff"), (Keys{"\xff", "\xff\xff"}));
  EXPECT_EQ(store_->keys("c"), Keys{});
  EXPECT_EQ(store_->keys("bb"), Keys{});
}

TEST_P(StoreContract, VersionsNameEveryChange) {
  store_->set("k", "1");
  std::uint64_t last = 0;
  const auto changed = [&] {
    const auto now = store_->watch("k", last, soon());  // returns at once, or the test times out
    const bool later = now.version > last;
    last = now.version;
    return later;
  };
  EXPECT_TRUE(changed());
  store_->set("k", "1");  // the same value is a change too
  EXPECT_TRUE(changed());
  store_->append("k", "2");
  EXPECT_TRUE(changed());
  store_->add("k", 1);
  EXPECT_TRUE(changed());
  EXPECT_EQ(store_->compare_set("k", "13", "14"), "14");
  EXPECT_TRUE(changed());

  // What changes nothing has no version.
  EXPECT_EQ(store_->compare_set("k", "13", "15"), "14");
  EXPECT_ERROR(kInvalidArgument, "overflows",
               store_->add("k", std::numeric_limits<std::int64_t>::max()));
  store_->set("other", "");
  EXPECT_ERROR(kTimeout, "no change of key", store_->watch("k", last, at_once()));
}

TEST_P(StoreContract, WatchOfErasedAndNewKeys) {
  store_->set("k", "v");
  const auto first = store_->watch("k", 0, soon());
  EXPECT_EQ(first.value, "v");
  EXPECT_GT(first.version, 0u);
  store_->erase("k");
  const auto erased = store_->watch("k", first.version, soon());
  EXPECT_EQ(erased.value, std::nullopt);
  EXPECT_EQ(erased.version, 0u);
  EXPECT_ERROR(kTimeout, "no change", store_->watch("k", 0, at_once()));
  store_->set("k", "v");
  EXPECT_GT(store_->watch("k", 0, soon()).version, first.version);
  // Erased and set again: the old number is not mistaken for the new one.
  EXPECT_GT(store_->watch("k", first.version, soon()).version, first.version);
  // A number from nowhere differs from every version.
  EXPECT_EQ(store_->watch("k", UINT64_MAX, soon()).value, "v");
  EXPECT_EQ(store_->watch("missing", 77, soon()).version, 0u);
}

TEST_P(StoreContract, ManyClientsSeeOneStore) {
  std::vector<std::shared_ptr<Store>> clients;
  for (int i = 0; i < 20; ++i) clients.push_back(world_.client());
  for (std::size_t i = 0; i < clients.size(); ++i) {
    EXPECT_EQ(clients[i]->add("count", 1), static_cast<std::int64_t>(i) + 1);
    clients[i]->set(concat("client/", 100 + i), std::to_string(i));
  }
  for (const auto& client : clients) EXPECT_EQ(client->keys("client/").size(), clients.size());
}

TEST_P(StoreContract, MessagesAreOneLineOfText) {
  store_->set("a\nb", "\x01\x02");
  EXPECT_ERROR(kInvalidArgument, "a\\x0ab'", store_->add("a\nb", 1));
  EXPECT_ERROR(kInvalidArgument, "'\\x01\\x02'", store_->add("a\nb", 1));
  EXPECT_ERROR(kTimeout, "(4000 bytes)",
               store_->get(std::string(GetParam() >= StoreVariant::kPrefixLocal ? 3994 : 4000, 'k'),
                           at_once()));
}

}  // namespace
}  // namespace convoy::test
