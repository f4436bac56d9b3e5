#include "agent/peer.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "agent/support.h"

namespace convoy::agent::test {
namespace {

TEST(CallListTest, AnAnswerFindsItsCallOnce) {
  CallList calls;
  EXPECT_EQ(calls.floor(), 1u);
  TextCall first;
  TextCall second;
  calls.link(first);
  calls.link(second);
  EXPECT_EQ(calls.count, 2u);
  EXPECT_EQ(calls.floor(), 1u);
  EXPECT_TRUE(calls.has(&second, 1, 2));
  EXPECT_EQ(calls.take(0, 2), nullptr) << "another call's number";
  EXPECT_EQ(calls.take(7, 1), nullptr) << "no such slot";
  EXPECT_EQ(calls.take(0, 1), &first);
  EXPECT_EQ(calls.take(0, 1), nullptr) << "it has ended";
  EXPECT_EQ(calls.floor(), 2u);
  // A slot is used again, a number is not.
  TextCall third;
  calls.link(third);
  EXPECT_EQ(calls.slots.size(), 2u);
  EXPECT_EQ(calls.take(0, 1), nullptr);
  EXPECT_FALSE(calls.has(&first, 0, 1));
  EXPECT_TRUE(calls.has(&third, 0, 3));
  calls.unlink(second);
  EXPECT_EQ(calls.first, &third);
  EXPECT_EQ(calls.last, &third);
  EXPECT_EQ(calls.take(0, 3), &third);
  EXPECT_EQ(calls.first, nullptr);
  EXPECT_EQ(calls.last, nullptr);
  EXPECT_EQ(calls.count, 0u);
  EXPECT_EQ(calls.floor(), 4u);
}

TEST(OutboxTest, AQueuedCallIsTakenOut) {
  TextCall small;
  TextCall large;
  TextCall gone;
  Outbox outbox;
  EXPECT_TRUE(outbox.is_empty());
  for (const std::uint64_t number : {1, 2}) {
    outbox.queues[0].emplace_back().number = number;
  }
  outbox.queues[0].back().call = &small;
  outbox.queues[1].emplace_back().call = &large;
  EXPECT_FALSE(outbox.remove(gone).has_value());
  const auto letter = outbox.remove(small);
  ASSERT_TRUE(letter.has_value());
  EXPECT_EQ(letter->number, 2u);
  EXPECT_FALSE(outbox.remove(small).has_value());
  ASSERT_EQ(outbox.queues[0].size(), 1u);
  EXPECT_EQ(outbox.queues[0].front().number, 1u);
  EXPECT_TRUE(outbox.remove(large).has_value());
  outbox.queues[0].clear();
  EXPECT_TRUE(outbox.is_empty());
}

TEST(RemoteFunctionsTest, PlacesAreForgottenWithTheirTable) {
  const FunctionId function = id_of("echo");
  const FunctionKey key = declared_function(function);
  const TableEntry wanted{std::string(key.name), std::string(key.signature), key.hash};
  const TableEntry namesake{wanted.name, "number", key.hash + 1};
  const TableEntry other{"other", "text", 1};
  RemoteFunctions functions;
  EXPECT_LT(functions.place_of(function), 0);
  EXPECT_NE(functions.describe_missing(function, "worker1").find("not registered on worker1"),
            std::string::npos);
  functions.learn({other, namesake});
  EXPECT_LT(functions.place_of(function), 0);
  EXPECT_NE(functions.describe_missing(function, "worker1").find("'number' there"),
            std::string::npos);
  functions.learn({other, namesake, wanted});
  EXPECT_EQ(functions.place_of(function), 2);
  functions.learn({wanted});
  EXPECT_EQ(functions.place_of(function), 0);
}

TEST(ContactTest, WhoSaidGoodbyeHasLeft) {
  Contact lost;
  lost.open = true;
  lost.lose(Error(ErrorKind::kPeerLost, "killed"));
  EXPECT_TRUE(lost.lost && !lost.left && !lost.open);
  EXPECT_EQ(lost.why, "killed");
  Contact left;
  left.lose(std::nullopt);
  EXPECT_TRUE(left.lost && left.left);
  // Its end was told of before its connection was cut.
  Contact leaving;
  leaving.leaves = true;
  leaving.lose(Error(ErrorKind::kPeerLost, "cut"));
  EXPECT_TRUE(leaving.lost && leaving.left);
}

}  // namespace
}  // namespace convoy::agent::test
