// What is told of operations: to listeners, to the flight record, and in the errors of those who
// waited in vain.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "base/call_scope.h"
#include "base/concat.h"
#include "base/guarded.h"
#include "exercise.h"
#include "os/flight_log.h"
#include "os/flight_recorder.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// "all_reduce #3 12", with an exclamation mark if it failed.
class Heard {
 public:
  explicit Heard(Group& group)
      : handle_(group.on_event([this](const Event& event) {
          EXPECT_LE(event.start, event.end);
          EXPECT_EQ(event.group, "world");
          lines_.lock()->push_back(concat(event.operation, " #", event.sequence, " ", event.bytes,
                                          event.error ? "!" : ""));
        })) {}
  std::vector<std::string> lines() { return *lines_.lock(); }
  EventHandle& handle() { return handle_; }

 private:
  Guarded<std::vector<std::string>> lines_;
  EventHandle handle_;  // last: it goes first
};

class ObserverTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, ObserverTest, convoy::test::rank_modes(),
                         convoy::test::rank_mode_name);

TEST_P(ObserverTest, EveryOperationIsToldOnce) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    Heard heard(*group);
    std::array<float, 8> data{};
    group->all_reduce(data.data(), data.data(), 4, DataType::kF32);
    group->barrier();
    auto first =
        group->start(group->calls().all_reduce(data.data(), data.data(), 8, DataType::kF32));
    auto second = group->start(group->calls().barrier());
    first.wait();
    second.wait();
    // Refused before it has a number: no operation.
    error_of([&] { group->all_reduce(data.data(), data.data() + 1, 4, DataType::kF32); });
    // Refused by all when they meet.
    error_of(
        [&] { group->all_reduce(data.data(), data.data(), r.id() == 0 ? 1 : 2, DataType::kF32); });
    EXPECT_THAT(heard.lines(),
                ElementsAre("all_reduce #1 16", "barrier #2 0", "all_reduce #3 32", "barrier #4 0",
                            concat("all_reduce #5 ", r.id() == 0 ? 4 : 8, "!")));
    heard.handle().remove();
    group->barrier();
    EXPECT_EQ(heard.lines().size(), 5U);
  });
}

TEST_P(ObserverTest, MessagesAreToldToo) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    Heard heard(*group);
    const int other = 1 - r.id();
    std::vector<std::byte> small(8), large(std::size_t{1} << 20);
    if (r.id() == 0) {
      group->send(small.data(), 8, DataType::kU8, other);
      group->send(large.data(), large.size(), DataType::kU8, other);
      EXPECT_THAT(heard.lines(), ElementsAre("send #1 8", "send #2 1048576"));
    } else {
      group->recv(small.data(), 8, DataType::kU8, kAnyRank);
      group->recv(large.data(), large.size(), DataType::kU8, other);
      EXPECT_THAT(heard.lines(), ElementsAre("recv #1 8", "recv #2 1048576"));
    }
    group->batch(
        std::vector<Message>{{Message::Kind::kSend, small.data(), 8, DataType::kU8, other, 0},
                             {Message::Kind::kReceive, large.data(), 8, DataType::kU8, other, 0}});
    group->send_async(small.data(), 4, DataType::kU8, other).wait();
    group->recv_async(small.data(), 4, DataType::kU8, other).wait();
    EXPECT_THAT(heard.lines(), testing::SizeIs(6));
    EXPECT_THAT(heard.lines(),
                testing::IsSupersetOf({"send #3 8", "recv #4 8", "send #5 4", "recv #6 4"}));
    group->barrier();
  });
}

TEST_P(ObserverTest, AFailureIsTold) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    Heard heard(*group);
    group->barrier();
    if (r.id() == 0) group->abort("enough");
    error_of([&] { group->barrier(); });
    EXPECT_THAT(heard.lines(), ElementsAre("barrier #1 0", "barrier #2 0!"));
  });
}

TEST_P(ObserverTest, TheFlightRecordHasThem) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    std::array<float, 8> data{};
    {
      const CallScope scope(CallSite("/src/train.cpp", "main", 12));
      group->all_reduce(data.data(), data.data(), 4, DataType::kF32);
    }
    group->start(group->calls().broadcast(data.data(), data.data(), 8, DataType::kF32, 1)).wait();
    auto log = flight::read(*flight::Recorder::instance().ring()).value();
    std::erase_if(log.entries, [&](const auto& entry) {
      const auto* of = log.group_of(entry);
      return !of || of->name != "world" || of->rank != r.id();
    });
    ASSERT_GE(log.entries.size(), 2U);
    const auto& first = log.entries[log.entries.size() - 2];
    const auto& second = log.entries.back();
    EXPECT_EQ(first.operation, "all_reduce");
    EXPECT_EQ(first.number, 1U);
    EXPECT_EQ(first.input, 4U);
    EXPECT_EQ(first.type, "f32");
    EXPECT_EQ(flight::describe_place(first), "train.cpp:12");
    EXPECT_EQ(second.operation, "broadcast");
    EXPECT_EQ(second.peer, 1);
    EXPECT_EQ(flight::describe_place(second), "");
    for (const auto* entry : {&first, &second}) {
      EXPECT_EQ(entry->state, flight::State::kCompleted);
      EXPECT_LE(entry->created, entry->started);
      EXPECT_LE(entry->started, entry->ended);
      EXPECT_EQ(log.group_of(*entry)->processes.at(static_cast<std::size_t>(r.id())), getpid());
    }
    group->barrier();
  });
}

// --- hang reports ---

TEST_P(ObserverTest, ADeadlineTellsWhoIsInUserCode) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    {
      const CallScope scope(CallSite("/src/train.cpp", "main", 12));
      group->barrier();
    }
    if (r.id() == 1) {
      r.store()->get("over", r.deadline());
      return;
    }
    EXPECT_THAT(error_of([&] { group->barrier({.timeout = 200ms}); }),
                AllOf(HasSubstr(" Timed out "), HasSubstr("rank 1 (pid "),
                      HasSubstr("has not called it: it is in user code for "),
                      HasSubstr("since barrier #1 of group \"world\" (train.cpp:12) ended")));
    if (r.store()->add("late", 1) == 2) r.store()->set("over", "");
  });
}

// The classic: two groups in different order.
TEST(HangReport, ADeadlineTellsWhoIsInAnotherCollective) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    const auto other = make_group(r, "other", {.timeout = kFar});
    group->barrier();
    float value = 0;
    if (r.id() == 1) {
      const CallScope scope(CallSite("/src/train.cpp", "main", 40));
      auto work = other->start(other->calls().all_reduce(&value, &value, 1, DataType::kF32));
      const auto& ring = *flight::Recorder::instance().ring();
      while (!flight::read(ring)->latest()->under_way()) std::this_thread::yield();
      r.store()->set("inside", "");
      EXPECT_THAT(error_of([&] { work.wait(); }), HasSubstr("left the group"));
      return;
    }
    // The time-out begins when the other one is where it shall be found.
    r.store()->get("inside", r.deadline());
    EXPECT_THAT(error_of([&] { group->barrier({.timeout = 300ms}); }),
                AllOf(HasSubstr("rank 1 (pid "),
                      HasSubstr("has not called it: it is in all_reduce #1 of group \"other\" "
                                "(train.cpp:40) for ")));
  });
}

TEST(HangReport, AStoppedRankStillTellsWhatItDid) {
  RankGroup ranks(2, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    r.mark("ready");
    r.wait_for("go");
    if (r.id() == 1) return;
    EXPECT_THAT(error_of([&] { group->barrier({.timeout = 300ms}); }),
                AllOf(HasSubstr("rank 1 (pid "), HasSubstr("is stopped (SIGSTOP"),
                      HasSubstr("since barrier #1 of group \"world\" ended")));
    r.mark("told");
  });
  ranks.wait_mark("ready");
  ranks.stop(1);
  ranks.post("go", 0);
  ranks.wait_mark("told", 0);
  ranks.resume(1);
  ranks.post("go", 1);
  ranks.join();
}

TEST(HangReport, ALateSenderIsDescribed) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    if (r.id() == 1) {
      r.store()->get("over", r.deadline());
      return;
    }
    float value = 0;
    EXPECT_THAT(error_of([&] { group->recv(&value, 1, DataType::kF32, 1, {.timeout = 200ms}); }),
                AllOf(HasSubstr(" Timed out "), HasSubstr("rank 1 (pid "),
                      HasSubstr("has not done its part: it is in user code for ")));
    r.store()->set("over", "");
  });
}

// Every missing rank has its own words, however many they are.
TEST(HangReport, ManyMissingRanksAreAllNamed) {
  RankGroup(8, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    if (r.id() != 0) {
      r.store()->get("over", r.deadline());
      return;
    }
    const std::string text = error_of([&] { group->barrier({.timeout = 100ms}); });
    for (int other = 1; other < 8; ++other) {
      EXPECT_THAT(text, HasSubstr(concat("rank ", other, " (pid ")));
    }
    EXPECT_THAT(text, HasSubstr("last completed #1"));
    r.store()->set("over", "");
  });
}

}  // namespace
}  // namespace convoy::coll::test
