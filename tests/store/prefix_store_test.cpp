// What the prefix adds to a store; that it keeps the contract is tested with the others.
#include <gtest/gtest.h>

#include "store_variants.h"

namespace convoy::test {
namespace {

using Keys = std::vector<std::string>;

TEST(PrefixStore, IsANameSpace) {
  const auto base = make_local_store();
  const auto one = with_prefix(base, "one");
  const auto two = with_prefix(base, "two");
  one->set("k", "1");
  two->set("k", "2");
  base->set("k", "0");
  EXPECT_EQ(one->get("k"), "1");
  EXPECT_EQ(two->get("k"), "2");
  EXPECT_EQ(base->get("k"), "0");
  EXPECT_EQ(base->keys(""), (Keys{"k", "one/k", "two/k"}));
  EXPECT_EQ(one->keys(""), Keys{"k"});
  EXPECT_TRUE(one->erase("k"));
  EXPECT_EQ(two->try_get("k"), "2");
}

TEST(PrefixStore, PrefixesNestAndDoNotRunTogether) {
  const auto base = make_local_store();
  const auto outer = with_prefix(base, "a");
  const auto inner = with_prefix(outer, "b");
  inner->set("k", "v");
  EXPECT_EQ(base->keys(""), Keys{"a/b/k"});
  EXPECT_EQ(outer->keys(""), Keys{"b/k"});
  EXPECT_EQ(inner->keys("k"), Keys{"k"});
  with_prefix(base, "ab")->set("k", "other");
  EXPECT_EQ(outer->keys(""), Keys{"b/k"});
  with_prefix(base, "")->set("k", "of no name");
  EXPECT_EQ(base->get("/k"), "of no name");
}

TEST(PrefixStore, BarriersOfTwoNameSpacesAreTwo) {
  const auto base = make_local_store();
  with_prefix(base, "one")->barrier("b", 1, soon());
  with_prefix(base, "two")->barrier("b", 1, soon());
  EXPECT_EQ(base->get("one/b/arrived"), "1");
}

TEST(PrefixStore, NamesTheWholeKeyInErrors) {
  const auto store = with_prefix(make_local_store(), "group");
  EXPECT_ERROR(kTimeout, "no key 'group/k'", store->get("k", at_once()));
}

TEST(PrefixStore, NeedsAStore) {
  EXPECT_ERROR(kInvalidArgument, "with_prefix('group'): no store", with_prefix(nullptr, "group"));
}

TEST(PrefixStore, KeepsItsStoreAlive) {
  auto base = make_local_store();
  const auto store = with_prefix(std::move(base), "p");
  store->set("k", "v");
  EXPECT_EQ(store->get("k"), "v");
  EXPECT_EQ(store->timeout(), Store::kDefaultTimeout);
}

}  // namespace
}  // namespace convoy::test
