// The protocol of references, step by step. H1 to H8 are the holes of PyTorch's that it closes: see
// docs/reference/rref.md.
#include <gtest/gtest.h>

#include "convoy/error.h"
#include "net.h"
#include "rref/records.h"

namespace convoy::rref::test {
namespace {

using namespace std::chrono_literals;
using testing::Test;

const Failure kTimedOut{ErrorKind::kTimeout, "RRef creation: it ran for more than 1 ms", "worker1",
                        ""};

ErrorKind kind_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorKind::kInternal;
}

bool has(const Net::Letter& letter, RecordType type) {
  for (const Record& record : decode_letter(std::as_bytes(std::span(letter.bytes))).records) {
    if (record.type == type) return true;
  }
  return false;
}

TEST(RRefMachine, AValueLivesAsLongAsSomebodyRefersToIt) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  EXPECT_EQ(first->state, EntryState::kConfirmed);
  Entry* const second = net.passed(*first, 0, 2);
  EXPECT_EQ(second->state, EntryState::kConfirmed);
  EXPECT_EQ(net[1].debug_info().num_forks, 2u);
  net.drop(0, first);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  EXPECT_EQ(net[1].debug_info().num_forks, 1u);
  net.drop(2, second);
  net.settle();
  EXPECT_EQ(net.alive, 0);
  EXPECT_EQ(net[1].owned(), 0u);
  EXPECT_TRUE(net[0].drained() && net[1].drained() && net[2].drained());
}

TEST(RRefMachine, WhatTheOwnerSendsIsConfirmedAtOnce) {
  Net net(2);
  Entry* const mine = net[0].make(net.value());
  const Passed passage = net[0].pass(*mine, 1, std::nullopt);
  Entry* const theirs = net[1].take(0, passage);
  EXPECT_EQ(theirs->state, EntryState::kConfirmed);
  net.pump();
  EXPECT_TRUE(net.wire.empty()) << "no letter is needed";
  net[0].passed(1, passage, Passage::kDelivered);
  net.drop(0, mine);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  net.drop(1, theirs);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, AFunctionWaitsUntilTheOwnerKnows) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  const Passed passage = net[0].pass(*first, 2, std::nullopt);
  Entry* const second = net[2].take(0, passage);
  Told told;
  net[2].when_settled(*second, told.callback());
  net.pump();
  EXPECT_EQ(told.times, 0);
  // The parent goes: it is kept for its child.
  net.drop(0, first);
  net.advance(10ms);
  for (const Net::Letter& letter : net.wire) EXPECT_FALSE(has(letter, RecordType::kDelete));
  net.settle();
  EXPECT_EQ(told.times, 1);
  EXPECT_EQ(told.text(), "");
  net[0].passed(2, passage, Passage::kDelivered);
  net.settle();
  EXPECT_EQ(net[1].debug_info().num_forks, 1u);
  net.drop(2, second);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, AReferenceThatIsHereAlreadyNeedsNoQuestion) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  Entry* const second = net.passed(*first, 0, 2);
  const Passed passage = net[0].pass(*first, 2, std::nullopt);
  EXPECT_EQ(net[2].take(0, passage), second);
  Told told;
  net[2].when_settled(*second, told.callback());
  net.pump();
  EXPECT_EQ(told.times, 1);
  net[0].passed(2, passage, Passage::kDelivered);
  net.drop(2, second);
  EXPECT_EQ(net[1].debug_info().num_forks, 2u);
  net.drop(2, second);
  net.drop(0, first);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, ReferencesGoHomeAndToSelf) {
  Net net(2);
  Entry* const user = net.created(0, 1);
  Entry* const home = net.passed(*user, 0, 1);
  EXPECT_TRUE(home->is_owner);
  Entry* const self = net.passed(*user, 0, 0);
  EXPECT_EQ(self, user);
  Entry* const owner_self = net.passed(*home, 1, 1);
  EXPECT_EQ(owner_self, home);
  net.drop(1, owner_self);
  net.drop(0, user);
  net.drop(0, self);
  net.settle();
  EXPECT_EQ(net[1].debug_info().num_forks, 0u);
  EXPECT_EQ(net.alive, 1);
  net.drop(1, home);
  net.pump();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, AReferenceInAnAnswerIsAcknowledged) {
  Net net(3);
  Entry* const mine = net[0].make(net.value());
  Entry* const user = net.passed(*mine, 0, 1);
  const Passed passage = net[1].pass(*user, 2, 17);
  Entry* const third = net[2].take(1, passage);
  net.drop(1, user);
  net.drop(0, mine);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  EXPECT_TRUE(net[1].settled());
  net.drop(2, third);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, AReferenceInAnAnswerIsAcknowledgedOnlyWhenItsOwnerKnows) {
  Net net(3);
  Entry* const mine = net[0].make(net.value());
  Entry* const user = net.passed(*mine, 0, 1);
  net.settle();
  const Passed passage = net[1].pass(*user, 2, 17);
  Entry* const third = net[2].take(1, passage);
  net.drop(1, user);
  net.drop(0, mine);
  // What worker 2 asks the owner is lost for a while.
  for (int i = 0; i < 5; ++i) {
    net.advance(100ms);
    std::erase_if(net.wire, [](const Net::Letter& letter) { return letter.to == 0; });
    for (const Net::Letter& letter : std::exchange(net.wire, {})) net.deliver(letter);
  }
  EXPECT_EQ(net.alive, 1);
  EXPECT_FALSE(net[1].settled());
  net.settle();
  EXPECT_EQ(third->state, EntryState::kConfirmed);
  EXPECT_EQ(net.alive, 1);
  net.drop(2, third);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, CreationOnOneselfThatFailsIsToldToOthers) {
  Net net(3);
  Entry* const user = net[0].create(0);
  const Passed passage = net[0].pass(*user, 1, std::nullopt);
  Entry* const second = net[1].take(0, passage);
  const Passed onward = net[1].pass(*second, 2, std::nullopt);
  Entry* const third = net[2].take(1, onward);
  Told told;
  Told fetched;
  net[2].when_settled(*third, told.callback());
  net[0].when_value(1, user->id, fetched.value_callback());
  net.settle();
  EXPECT_EQ(told.times + fetched.times, 0);
  net[0].creation_ended(*user, &kTimedOut);
  net.settle();
  EXPECT_EQ(told.times, 1);
  EXPECT_EQ(fetched.text(), kTimedOut.text);
  EXPECT_EQ(kind_of([&] { net[0].begin(0, {user->id, user->fork}); }), ErrorKind::kCancelled);
  net[0].passed(1, passage, Passage::kDelivered);
  net[1].passed(2, onward, Passage::kDelivered);
  net.drop(0, user);
  net.drop(1, second);
  net.drop(2, third);
  net.settle();
  EXPECT_EQ(net[0].owned(), 0u);
}

TEST(RRefMachine, CreationOnOneself) {
  Net net(1);
  Entry* const user = net[0].create(0);
  EXPECT_TRUE(user->is_owner);
  Told told;
  net[0].when_value(*user, told.value_callback());
  Entry* const made = net[0].begin(0, {user->id, user->fork});
  net[0].set_value(*made, net.value());
  net[0].creation_ended(*user, nullptr);
  net.drop(0, made);
  EXPECT_EQ(told.times, 1);
  net.drop(0, user);
  EXPECT_EQ(net.alive, 0);
  EXPECT_EQ(net[0].owned(), 0u);
}

TEST(RRefMachine, AFailedCreationIsToldWithItsText) {
  Net net(3);
  Entry* const user = net[0].create(1);
  Entry* const made = net[1].begin(0, {user->id, user->fork});
  net[1].set_failure(*made, {ErrorKind::kRemote, "no such luck", "worker1", "std::runtime_error"});
  net.drop(1, made);
  net[0].creation_ended(*user, nullptr);
  Entry* const third = net.passed(*user, 0, 2);
  Told told;
  net[1].when_value(2, third->id, told.value_callback());
  net.pump();
  EXPECT_EQ(told.text(), "no such luck");
  net.drop(0, user);
  net.drop(2, third);
}

// H1: a question that comes again when its reference is gone leaves nothing behind.
TEST(RRefMachine, H1LateDuplicatesOfRequestsAreIgnored) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  net.settle();
  const Passed passage = net[0].pass(*first, 2, std::nullopt);
  Entry* const second = net[2].take(0, passage);
  net.pump();
  ASSERT_EQ(net.wire.size(), 1u);
  const Net::Letter request = net.wire.front();
  ASSERT_TRUE(has(request, RecordType::kRequest));
  net.settle();
  net[0].passed(2, passage, Passage::kDelivered);
  net.drop(2, second);
  net.settle();
  EXPECT_EQ(net[1].debug_info().num_forks, 1u);
  net.deliver(request);
  net.settle();
  EXPECT_EQ(net[1].debug_info().num_forks, 1u) << "a fork of nobody";
  net.drop(0, first);
  net.settle();
  net.deliver(request);
  net.settle();
  EXPECT_EQ(net.alive, 0);
  EXPECT_EQ(net[1].owned(), 0u) << "a value that nobody created";
}

// H2: a creation that comes after its creator has given up is refused.
TEST(RRefMachine, H2CreationsThatComeTooLateAreRefused) {
  Net net(2);
  Entry* const user = net[0].create(1);
  const CreationHead head{user->id, user->fork};
  net[0].creation_ended(*user, &kTimedOut);
  net.drop(0, user);
  net.settle();
  EXPECT_EQ(kind_of([&] { net[1].begin(0, head); }), ErrorKind::kCancelled);
  EXPECT_EQ(net[1].owned(), 0u);
  EXPECT_TRUE(net[0].drained() && net[1].drained());
}

// H2: the same when its function runs already: the value goes when it is there.
TEST(RRefMachine, H2ValuesThatNobodyWantsAreDropped) {
  Net net(2);
  Entry* const user = net[0].create(1);
  Entry* const made = net[1].begin(0, {user->id, user->fork});
  net[0].creation_ended(*user, &kTimedOut);
  EXPECT_EQ(user->failure->text, kTimedOut.text);
  EXPECT_EQ(kind_of([&] { net[0].pass(*user, 1, std::nullopt); }), ErrorKind::kTimeout);
  net.settle();
  net[1].set_value(*made, net.value());
  net.drop(1, made);
  net.pump();
  EXPECT_EQ(net.alive, 0);
  EXPECT_EQ(net[1].owned(), 0u);
  net.drop(0, user);
}

// H2: those who were given the reference meanwhile hear why there is no value.
TEST(RRefMachine, H2OthersHearThatTheCreationFailed) {
  Net net(3);
  Entry* const user = net[0].create(1);
  const Passed passage = net[0].pass(*user, 2, std::nullopt);
  Entry* const second = net[2].take(0, passage);
  Told told;
  Told fetched;
  net[2].when_settled(*second, told.callback());
  net.settle();
  net[1].when_value(2, user->id, fetched.value_callback());
  net.settle();
  EXPECT_EQ(told.times + fetched.times, 0) << "the call may still come";
  EXPECT_EQ(net.watched.size(), 1u) << "its caller may be gone";
  net[0].creation_ended(*user, &kTimedOut);
  net.settle();
  EXPECT_EQ(told.text(), kTimedOut.text);
  EXPECT_EQ(fetched.text(), kTimedOut.text);
  net[0].passed(2, passage, Passage::kUnknown);
  net.drop(2, second);
  net.drop(0, user);
  net.settle();
  EXPECT_EQ(net[1].owned(), 0u);
  for (int worker = 0; worker < 3; ++worker) {
    EXPECT_TRUE(net[static_cast<std::size_t>(worker)].drained()) << worker;
  }
}

// H3: whoever asks for a value that was deleted gets an error, and does not wait.
TEST(RRefMachine, H3FetchesAfterDeletionEndAtOnce) {
  Net net(2);
  Entry* const user = net.created(0, 1);
  const RRefId id = user->id;
  net.drop(0, user);
  net.settle();
  Told told;
  net[1].when_value(0, id, told.value_callback());
  net.pump();
  EXPECT_EQ(told.times, 1);
  EXPECT_NE(told.text().find("deleted"), std::string::npos) << told.text();
  EXPECT_EQ(net[1].owned(), 0u);
  Entry* const mine = net[1].make(net.value());
  const RRefId own = mine->id;
  net.drop(1, mine);
  net[1].when_value(0, own, told.value_callback());
  net.pump();
  EXPECT_EQ(told.times, 2);
}

TEST(RRefMachine, H3FetchesBeforeCreationWait) {
  Net net(2);
  Entry* const user = net[0].create(1);
  Told told;
  net[1].when_value(0, user->id, told.value_callback());
  net.pump();
  EXPECT_EQ(told.times, 0);
  EXPECT_EQ(net[1].debug_info().num_pending_futures, 1u);
  Entry* const made = net[1].begin(0, {user->id, user->fork});
  net[1].set_value(*made, net.value());
  net.drop(1, made);
  EXPECT_EQ(told.times, 1);
  EXPECT_EQ(told.text(), "");
  net[0].creation_ended(*user, nullptr);
  net.drop(0, user);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

// H4: whatever a creation fails with, nothing stays pending.
TEST(RRefMachine, H4AnyErrorOfACreationEndsIt) {
  for (const ErrorKind kind : {ErrorKind::kPeerLost, ErrorKind::kInternal, ErrorKind::kResource,
                               ErrorKind::kInvalidArgument, ErrorKind::kCancelled}) {
    Net net(2);
    Entry* const user = net[0].create(1);
    EXPECT_EQ(net[0].debug_info().num_pending_users, 1u);
    const Failure failure{kind, "connection reset", "worker1", ""};
    net[0].creation_ended(*user, &failure);
    EXPECT_EQ(net[0].debug_info().num_pending_users, 0u);
    ASSERT_TRUE(net[0].failure(*user)) << to_string(kind);
    EXPECT_EQ(net[0].failure(*user)->text, "connection reset");
    Told told;
    net[0].when_confirmed(*user, told.callback());
    net.settle();
    EXPECT_EQ(told.text(), "connection reset");
    EXPECT_TRUE(net[0].drained());
    EXPECT_TRUE(net[1].drained());
    net.drop(0, user);
  }
}

// H5: a reference that is lost on its way to a user does not hold the value.
TEST(RRefMachine, H5ReferencesOfLostCallsAreDropped) {
  Net net(3);
  Entry* const mine = net[0].make(net.value());
  Entry* const user = net.passed(*mine, 0, 1);
  const Passed to_user = net[0].pass(*mine, 2, std::nullopt);
  const Passed onward = net[1].pass(*user, 2, std::nullopt);
  EXPECT_EQ(net[0].debug_info().num_forks, 2u);
  net.drop(0, mine);
  net.drop(1, user);
  // Both calls time out; neither has arrived.
  net[0].passed(2, to_user, Passage::kUnknown);
  net[1].passed(2, onward, Passage::kUnknown);
  net.settle();
  EXPECT_EQ(net.alive, 0);
  // They arrive all the same.
  EXPECT_EQ(kind_of([&] { net[2].take(0, to_user); }), ErrorKind::kCancelled);
  EXPECT_EQ(kind_of([&] { net[2].take(1, onward); }), ErrorKind::kCancelled);
  EXPECT_EQ(net[2].users(), 0u);
}

// H5: a call that timed out may have brought its references: they are the receiver's then.
TEST(RRefMachine, H5ReferencesOfCallsThatTimedOutStayWithWhoHasThem) {
  Net net(3);
  Entry* const mine = net[0].make(net.value());
  const Passed passage = net[0].pass(*mine, 1, std::nullopt);
  Entry* const user = net[1].take(0, passage);
  net[0].passed(1, passage, Passage::kUnknown);
  net.drop(0, mine);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  const Passed onward = net[1].pass(*user, 2, std::nullopt);
  Entry* const third = net[2].take(1, onward);
  net[1].passed(2, onward, Passage::kUnknown);
  net.drop(1, user);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  EXPECT_EQ(third->state, EntryState::kConfirmed);
  net.drop(2, third);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

// H5: answers are not answered: whoever sent references in one asks.
TEST(RRefMachine, H5ReferencesOfLostAnswersAreDropped) {
  Net net(2);
  Entry* const mine = net[0].make(net.value());
  net.under_way.push_back({1, 0, 5});
  const Passed passage = net[0].pass(*mine, 1, 5);
  net.drop(0, mine);
  net.settle();
  EXPECT_EQ(net.alive, 1) << "the call waits: its answer may come";
  net.under_way.clear();
  net.settle();
  EXPECT_EQ(net.alive, 0);
  EXPECT_EQ(kind_of([&] { net[1].take(0, passage); }), ErrorKind::kCancelled);
}

TEST(RRefMachine, H5AMessageThatNeverLeftLeavesNothing) {
  Net net(2);
  Entry* const mine = net[0].make(net.value());
  const Passed passage = net[0].pass(*mine, 1, std::nullopt);
  net[0].passed(1, passage, Passage::kNotSent);
  EXPECT_EQ(net[0].debug_info().num_forks, 0u);
  net.drop(0, mine);
  net.settle();
  EXPECT_EQ(net.alive, 0);
  EXPECT_TRUE(net[0].drained() && net[1].drained());
}

// H6: references of a worker end with it.
TEST(RRefMachine, H6ReferencesOfLostWorkersAreDropped) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  Entry* const second = net.passed(*first, 0, 2);
  Told told;
  net[2].when_lost(*second, told.callback());
  net.drop(0, first);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  net[1].lost(2, net.incarnation(2), "killed");
  net.pump();
  EXPECT_EQ(net.alive, 0);
  EXPECT_EQ(net[1].owned(), 0u);
  // And the other way round.
  net[2].lost(1, net.incarnation(1), "killed");
  net.pump();
  EXPECT_EQ(told.times, 1);
  EXPECT_NE(told.text().find("worker1"), std::string::npos) << told.text();
  EXPECT_EQ(kind_of([&] { net[2].pass(*second, 0, std::nullopt); }), ErrorKind::kPeerLost);
  net.drop(2, second);
}

// H6: those who wait for what a lost worker would have created hear of it.
TEST(RRefMachine, H6NobodyWaitsForALostCreator) {
  Net net(3);
  Entry* const user = net[0].create(1);
  const Passed passage = net[0].pass(*user, 2, std::nullopt);
  Entry* const second = net[2].take(0, passage);
  Told told;
  net[2].when_settled(*second, told.callback());
  net.settle();
  EXPECT_EQ(told.times, 0);
  net[1].lost(0, net.incarnation(0), "killed");
  net.settle();
  EXPECT_EQ(told.times, 1);
  EXPECT_NE(told.text().find("its creator is lost"), std::string::npos) << told.text();
  EXPECT_EQ(net[1].owned(), 0u);
  net.drop(0, user);
  net.drop(2, second);
}

// H7: a worker that was restarted gives the same numbers; they are not those of before.
TEST(RRefMachine, H7NumbersOfAnotherIncarnationAreOthers) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  Entry* const second = net.passed(*first, 0, 2);
  const Net::Letter stale = [&] {
    net.drop(2, second);
    net.advance(1ms);
    return net.wire.front();
  }();
  net.settle();
  Entry* const third = net.passed(*first, 0, 2);
  Machine& old = net[0];
  net.restart(0);
  for (const std::size_t other : {1u, 2u}) {
    net.tell_met(other, 0);
    net.tell_met(0, other);
  }
  net.settle();
  EXPECT_EQ(net.alive, 1) << "worker 2 has it";
  // The first that the new one creates there.
  Entry* const again = net.created(0, 1);
  EXPECT_EQ(again->id.number, third->id.number);
  EXPECT_FALSE(again->id == third->id);
  EXPECT_EQ(net.alive, 2);
  net.drop(0, again);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  // What the old one, or somebody to the old one, wrote is of nobody.
  EXPECT_NE(stale.bytes, "");
  net.deliver(stale);
  net.settle();
  EXPECT_EQ(net.alive, 1);
  old.drop(*first);
  net.drop(2, third);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, H7ReferencesToAnOldIncarnationFail) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  net.restart(1);
  net.tell_met(0, 1);
  net.tell_met(2, 1);
  net.tell_met(1, 0);
  net.tell_met(1, 2);
  net.settle();
  EXPECT_EQ(first->state, EntryState::kDead);
  EXPECT_EQ(kind_of([&] { net[0].pass(*first, 2, std::nullopt); }), ErrorKind::kPeerLost);
  // Its values are not those of the new one.
  Told told;
  net[1].when_value(0, first->id, told.value_callback());
  net.pump();
  EXPECT_EQ(told.times, 0) << "number 1 of worker 0 may still come";
  net[1].lost(0, net.incarnation(0), "killed");
  net.pump();
  EXPECT_EQ(told.times, 1);
  net.drop(0, first);
}

// H8: what was lost on a broken connection is sent again, and at once on a new one.
TEST(RRefMachine, H8RecordsAreSentAgainUntilTheyAreTaken) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  Entry* const second = net.passed(*first, 0, 2);
  net.drop(0, first);
  net.drop(2, second);
  for (int i = 0; i < 20; ++i) {
    net.advance(1s);
    EXPECT_FALSE(net.wire.empty()) << "it gave up";
    net.wire.clear();
  }
  EXPECT_EQ(net.alive, 1);
  net[0].reconnected(1, net.incarnation(1));
  net.pump();
  EXPECT_TRUE(!net.wire.empty() && has(net.wire.front(), RecordType::kDelete));
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, EveryRecordIsTakenOnceInAnyOrderOfLetters) {
  Net net(3);
  std::vector<Entry*> entries;
  Entry* const mine = net[0].make(net.value());
  for (int i = 0; i < 400; ++i) entries.push_back(net.created(1, 0));
  net.settle();
  for (Entry* const entry : entries) net[1].drop(*entry);
  net.advance(1ms);
  ASSERT_GT(net.wire.size(), 1u);
  // The last first, and each twice.
  for (std::size_t i = net.wire.size(); i-- > 0;) {
    net.deliver(net.wire[i]);
    net.deliver(net.wire[i]);
  }
  net.settle();
  EXPECT_EQ(net.alive, 1);
  net.drop(0, mine);
}

TEST(RRefMachine, ManyDeletionsGoInFewLetters) {
  Net net(2);
  std::vector<Entry*> entries;
  for (int i = 0; i < 1000; ++i) entries.push_back(net.created(0, 1));
  net.settle();
  for (Entry* const entry : entries) net[0].drop(*entry);
  net.advance(1ms);
  EXPECT_LE(net.wire.size(), 12u);
  net.settle();
  EXPECT_EQ(net.alive, 0);
}

TEST(RRefMachine, WhoHoldsWhat) {
  Net net(3);
  Entry* const first = net.created(0, 1);
  Entry* const second = net.passed(*first, 0, 2);
  net.settle();
  ASSERT_EQ(net[1].holders().size(), 1u);
  EXPECT_EQ(net[1].holders()[0], "RRef (worker1, #1 of worker0) is held by worker0, worker2");
  EXPECT_FALSE(net[1].drained());
  const Failure ended{ErrorKind::kCancelled, "the session was shut down", "", ""};
  net[0].end_users(ended);
  net[2].end_users(ended);
  net.settle();
  EXPECT_TRUE(net[1].drained());
  EXPECT_EQ(net.alive, 0);
  EXPECT_NE(net[2].failure(*second)->text.find("was deleted"), std::string::npos);
  EXPECT_THROW(net[2].pass(*second, 0, std::nullopt), Error);
  net.drop(0, first);
  net.drop(2, second);
}

TEST(RRefMachine, MemoryOfAReference) {
  // And a node of a table: an id, a pointer, a link; and a fork.
  EXPECT_LE(sizeof(Entry) + sizeof(RRefId) + 4 * sizeof(void*) + 2 * sizeof(Entry::Fork) + 32,
            500u);
}

TEST(RRefMachine, NonsenseIsRefused) {
  Net net(2);
  EXPECT_EQ(kind_of([&] { net[0].hear(1, {}); }), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of([&] { net[0].begin(1, {}); }), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of([&] { net[0].take(1, {}); }), ErrorKind::kInvalidArgument);
  LetterHead head{.from = net.incarnation(1), .to = net.incarnation(0), .first = 1, .count = 1};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  for (const char type : {'\0', '\x09', '\xff'}) {
    const std::string letter = bytes + type + std::string(8, '\1');
    EXPECT_EQ(kind_of([&] { net[0].hear(1, std::as_bytes(std::span(letter))); }),
              ErrorKind::kInvalidArgument);
  }
}

}  // namespace
}  // namespace convoy::rref::test
