// What the in-process store has beside the contract.
#include <gtest/gtest.h>

#include <thread>

#include "base/concat.h"
#include "store_variants.h"

namespace convoy::test {
namespace {

TEST(LocalStore, StoresAreSeparate) {
  const auto one = make_local_store();
  const auto two = make_local_store();
  one->set("k", "v");
  EXPECT_EQ(two->try_get("k"), std::nullopt);
}

// A server would refuse so many waiting requests of one client; threads are not one client.
TEST(LocalStore, ManyThreadsMayWait) {
  const auto store = make_local_store();
  std::vector<std::jthread> threads;
  for (int i = 0; i < 200; ++i) {
    threads.emplace_back([&, i] {
      store->add("started", 1);
      EXPECT_EQ(store->get(concat("go/", i % 2), soon()), "v");
      store->add("ended", 1);
    });
  }
  EXPECT_TRUE(eventually([&] { return store->try_get("started") == "200"; }));
  store->set("go/0", "v");
  EXPECT_TRUE(eventually([&] { return store->try_get("ended") == "100"; }));
  store->set("go/1", "v");
  threads.clear();
  EXPECT_EQ(store->get("ended"), "200");
}

TEST(LocalStore, DeadlinesOfManyThreadsPassByThemselves) {
  const auto store = make_local_store();
  std::vector<std::jthread> threads;
  for (int i = 0; i < 20; ++i) {
    threads.emplace_back([&, i] {
      EXPECT_ERROR(kTimeout, "no key 'k'",
                   store->get("k", Deadline::after(std::chrono::milliseconds(i))));
    });
  }
}

}  // namespace
}  // namespace convoy::test
