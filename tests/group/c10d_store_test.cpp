#include "convoy/c10d_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "convoy/error.h"
#include "os/file.h"
#include "support/test_names.h"

namespace convoy {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

template <class Function>
Error error_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorKind::kInternal, ""};
}

// --- ours as torch's ---

TEST(ToC10dTest, EveryOperation) {
  const auto ours = make_local_store();
  const auto store = to_c10d(ours);
  store->set("a", "1");
  EXPECT_EQ(store->get_to_str("a"), "1");
  EXPECT_EQ(ours->get("a"), "1");
  EXPECT_EQ(store->add("n", 5), 5);
  EXPECT_EQ(store->add("n", -2), 3);
  EXPECT_EQ(store->compareSet("a", "1", "2"), "2");
  EXPECT_EQ(store->compareSet("a", "1", "3"), "2");
  EXPECT_TRUE(store->check({"a", "n"}));
  EXPECT_FALSE(store->check({"a", "x"}));
  EXPECT_EQ(store->getNumKeys(), 2);
  EXPECT_THAT(store->listKeys(), ElementsAre("a", "n"));
  store->append("a", {'x'});
  EXPECT_EQ(store->get_to_str("a"), "2x");
  store->multiSet({"p", "q"}, {{1}, {2, 0, 3}});
  EXPECT_THAT(store->multiGet({"q", "p"}),
              ElementsAre(std::vector<std::uint8_t>{2, 0, 3}, std::vector<std::uint8_t>{1}));
  EXPECT_TRUE(store->hasExtendedApi());
  EXPECT_TRUE(store->deleteKey("p"));
  EXPECT_FALSE(store->deleteKey("p"));
  EXPECT_ANY_THROW(store->multiSet({"p"}, {}));
}

TEST(ToC10dTest, WaitingEndsWhenTheKeyComesOrTheTimePasses) {
  const auto store = to_c10d(make_local_store());
  {
    const std::jthread writer([clone = store->clone()] { clone->set("late", "here"); });
    EXPECT_EQ(store->get_to_str("late"), "here");
  }
  try {
    store->wait({"never"}, 30ms);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::DistStoreError& error) {
    EXPECT_THAT(error.what(), HasSubstr("never"));
  }
  store->setTimeout(30ms);
  EXPECT_THROW(store->get("never"), c10::DistStoreError);
  EXPECT_EQ(store->clone()->getTimeout(), 30ms);
}

TEST(ToC10dTest, CarriesTorchsPrefixStoreAndBarrier) {
  const auto store = to_c10d(make_local_store());
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("group", store);
  prefixed->set("k", "v");
  EXPECT_EQ(prefixed->get_to_str("k"), "v");
  EXPECT_THAT(store->listKeys(), ElementsAre("group/k"));
  const std::jthread other([&] { store->clone()->barrier("meet", 2, 10s); });
  store->barrier("meet", 2, 10s);
}

TEST(ToC10dTest, GoesBackAndForthWithoutAWrapper) {
  const auto ours = make_local_store();
  EXPECT_EQ(from_c10d(to_c10d(ours)), ours);
  EXPECT_EQ(error_of([] { to_c10d(nullptr); }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_of([] { from_c10d(nullptr); }).kind(), ErrorKind::kInvalidArgument);
}

// --- torch's as ours ---

class FromC10dTest : public testing::TestWithParam<std::string> {
 protected:
  FromC10dTest() {
    if (GetParam() == "File") {
      store_ = from_c10d(c10::make_intrusive<c10d::FileStore>(folder_.path() + "/store", 1));
    } else {
      store_ = from_c10d(c10::make_intrusive<c10d::HashStore>());
    }
  }

  TempFolder folder_{"c10d-store-test"};
  std::shared_ptr<Store> store_;
};
INSTANTIATE_TEST_SUITE_P(Stores, FromC10dTest, testing::Values("Hash", "File"),
                         convoy::test::text_name);

TEST_P(FromC10dTest, EveryOperation) {
  store_->set("a", std::string_view("x\0y", 3));
  EXPECT_EQ(store_->get("a"), std::string("x\0y", 3));
  EXPECT_EQ(store_->try_get("missing"), std::nullopt);
  EXPECT_EQ(store_->add("n", 7), 7);
  EXPECT_EQ(store_->add("n", 1), 8);
  EXPECT_EQ(store_->compare_set("c", "", "first"), "first");
  EXPECT_EQ(store_->compare_set("c", "other", "second"), "first");
  const std::vector<std::string> both = {"a", "n"};
  EXPECT_TRUE(store_->check(both));
  store_->wait(both, Deadline::after(1s));
  EXPECT_TRUE(store_->erase("a"));
  EXPECT_FALSE(store_->try_get("a"));
}

TEST_P(FromC10dTest, WaitingNamesWhatIsMissing) {
  const std::vector<std::string> keys = {"here", "gone"};
  store_->set("here", "");
  const Error error = error_of([&] { store_->wait(keys, Deadline::after(30ms)); });
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  EXPECT_THAT(error.what(), HasSubstr("'gone'"));
  EXPECT_EQ(std::string(error.what()).find("'here'"), std::string::npos);
}

TEST_P(FromC10dTest, AWaitingThreadKeepsNobodyOut) {
  const std::jthread waiter([&] { EXPECT_EQ(store_->get("late", Deadline::after(20s)), "value"); });
  for (int i = 0; i < 50; ++i) store_->add("count", 1);
  store_->set("late", "value");
}

TEST_P(FromC10dTest, WatchSeesChangesAndErasure) {
  const std::jthread writer([&] { store_->set("w", "1"); });
  const auto first = store_->watch("w", 0, Deadline::after(20s));
  EXPECT_EQ(first.value, "1");
  EXPECT_EQ(error_of([&] { store_->watch("w", first.version, Deadline::after(20ms)); }).kind(),
            ErrorKind::kTimeout);
  store_->set("w", "2");
  const auto second = store_->watch("w", first.version, Deadline::after(20s));
  EXPECT_EQ(second.value, "2");
  store_->erase("w");
  EXPECT_EQ(store_->watch("w", second.version, Deadline::after(20s)).value, std::nullopt);
}

TEST(FromC10dListTest, KeysNeedAStoreThatListsThem) {
  const auto store = from_c10d(c10::make_intrusive<c10d::HashStore>());
  store->set("b/1", "");
  store->set("a", "");
  store->set("b/0", "");
  try {
    EXPECT_THAT(store->keys("b/"), ElementsAre("b/0", "b/1"));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  }
}

}  // namespace
}  // namespace convoy
