#include "agent/roster.h"

#include <gtest/gtest.h>

#include "agent/peer.h"
#include "base/id.h"
#include "convoy/error.h"

namespace convoy::agent::test {
namespace {

TEST(RosterTest, WorkersHaveNumbersAndNames) {
  Roster roster;
  EXPECT_FALSE(roster.has_begun());
  roster.check_not_begun();
  EXPECT_THROW(roster.check_grows(), Error);
  roster.add("a", {});
  roster.add("b", {});
  const Id session = Id::random();
  roster.begin(session, {{"a", 0}, {"b", 1}}, Roster::Growth::kConstant);
  EXPECT_TRUE(roster.has_begun());
  EXPECT_EQ(roster.session(), session);
  EXPECT_THROW(roster.check_not_begun(), Error);
  EXPECT_THROW(roster.check_grows(), Error);
  ASSERT_EQ(roster.peers().size(), 2u);
  EXPECT_EQ(roster.peers()[1]->worker.name, "b");
  ASSERT_NE(roster.find("b"), nullptr);
  EXPECT_EQ(roster.find("b")->id, 1u);
  EXPECT_EQ(roster.find("c"), nullptr);
}

// A worker that comes back has another number.
TEST(RosterTest, ANameIsThatOfTheWorkerWhoCameLast) {
  Roster roster;
  roster.add("a", {});
  roster.begin(Id::random(), {{"a", 0}}, Roster::Growth::kGrows);
  roster.check_grows();
  const Worker* const before = roster.find("a");
  roster.add("a", {});
  EXPECT_EQ(roster.find("a"), before);
  roster.set_name(1, "a");
  ASSERT_NE(roster.find("a"), nullptr);
  EXPECT_EQ(roster.find("a")->id, 1u);
  EXPECT_EQ(before->id, 0u);
}

}  // namespace
}  // namespace convoy::agent::test
