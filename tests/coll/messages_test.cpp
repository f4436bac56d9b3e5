// Point to point: sends and receives, tags, any source, batches, and what goes wrong with them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <random>

#include "base/concat.h"
#include "coll/control.h"
#include "exercise.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using Kind = Message::Kind;

class MessageTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, MessageTest, convoy::test::rank_modes(),
                         convoy::test::rank_mode_name);

// Around every boundary: in the letter, beside it, one chunk, all chunks, several times round.
std::vector<std::size_t> message_sizes() {
  std::vector<std::size_t> sizes = {0, 1, 31, 32, 33, 1000};
  for (const std::size_t edge :
       {std::size_t{4096}, Bounce::kChunk, Bounce::kChunk * Bounce::kChunks}) {
    sizes.insert(sizes.end(), {edge - 1, edge, edge + 1});
  }
  sizes.push_back(Bounce::kChunk * Bounce::kChunks * 2 + 4097);
  return sizes;
}

Buffer content(int from, int to, std::uint64_t salt, std::size_t bytes) {
  return input_of(64 * from + to, salt, DataType::kU8, bytes);
}

TEST_P(MessageTest, EverySizeFromEveryPlace) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    std::uint64_t salt = 0;
    for (const std::size_t bytes : message_sizes()) {
      for (const Place place : {Place::kPrivate, Place::kShared}) {
        ++salt;
        Region region(*group, place, bytes);
        if (r.id() == 0) {
          region.fill(content(0, 1, salt, bytes));
          group->send(region.data(), bytes, DataType::kU8, 1, {.tag = salt});
        } else {
          EXPECT_EQ(group->recv(region.data(), bytes, DataType::kU8, 0, {.tag = salt}), 0);
          EXPECT_TRUE(same(region.content(), content(0, 1, salt, bytes))) << bytes;
        }
      }
    }
  });
}

// As PyTorch's test_send_recv: every rank to every other one, of different sizes.
TEST_P(MessageTest, AllPairs) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    for (int from = 0; from < r.size(); ++from) {
      const auto count = static_cast<std::size_t>(from) * 3000 + 1;
      if (r.id() == from) {
        std::vector<float> data(count, static_cast<float>(from));
        for (int to = 0; to < r.size(); ++to) {
          if (to != from) group->send(data.data(), count, DataType::kF32, to);
        }
      } else {
        std::vector<float> data(count, -1);
        group->recv(data.data(), count, DataType::kF32, from);
        EXPECT_EQ(data, std::vector<float>(count, static_cast<float>(from)));
      }
    }
  });
}

TEST_P(MessageTest, TagsPickMessagesAndKeepTheirOrder) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    constexpr int kMessages = 50;  // more than the ring holds
    if (r.id() == 0) {
      for (int i = 0; i < kMessages; ++i) {
        group->send(&i, 1, DataType::kI32, 1, {.tag = static_cast<std::uint64_t>(i % 2)});
      }
    } else {
      for (const int tag : {1, 0}) {
        for (int i = tag; i < kMessages; i += 2) {
          int value = -1;
          group->recv(&value, 1, DataType::kI32, 0, {.tag = static_cast<std::uint64_t>(tag)});
          EXPECT_EQ(value, i);
        }
      }
    }
  });
}

TEST_P(MessageTest, FromAnyRank) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    constexpr int kEach = 20;
    constexpr std::size_t kCount = 3000;
    if (r.id() != 0) {
      const std::vector<int> data(kCount, r.id());
      for (int i = 0; i < kEach; ++i) group->send(data.data(), kCount, DataType::kI32, 0);
      return;
    }
    std::vector<int> from(4);
    for (int i = 0; i < 3 * kEach; ++i) {
      std::vector<int> data(kCount);
      const int source = group->recv(data.data(), kCount, DataType::kI32, kAnyRank);
      EXPECT_EQ(data, std::vector<int>(kCount, source));
      ++from[static_cast<std::size_t>(source)];
    }
    EXPECT_THAT(from, testing::ElementsAre(0, kEach, kEach, kEach));
  });
}

TEST_P(MessageTest, ToItself) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    for (const std::size_t bytes : {0, 5, 5000, 3'000'000}) {
      const Buffer sent = content(r.id(), r.id(), 1, bytes);
      Buffer got(bytes);
      group->send(sent.data(), bytes, DataType::kU8, r.id());  // before anyone asks for it
      EXPECT_EQ(group->recv(got.data(), bytes, DataType::kU8, r.id()), r.id());
      EXPECT_TRUE(same(got, sent));
    }
  });
}

// Everyone sends large messages to everyone before it receives anything, in an order that suits
// nobody.
TEST_P(MessageTest, BatchesCannotBlock) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    constexpr std::size_t kCount = 400'000;
    constexpr std::uint64_t kTags = 5;
    std::vector<Message> messages;
    std::vector<Buffer> sent, got;
    sent.reserve(16);
    got.reserve(16);
    for (std::uint64_t tag = 0; tag < kTags; ++tag) {
      for (int peer = 0; peer < r.size(); ++peer) {
        sent.push_back(content(r.id(), peer, tag, kCount));
        messages.push_back({Kind::kSend, sent.back().data(), kCount, DataType::kU8, peer, tag});
        got.emplace_back(kCount);
        messages.push_back({Kind::kReceive, got.back().data(), kCount, DataType::kU8, peer, tag});
      }
    }
    std::mt19937 random(static_cast<unsigned>(r.id()));
    std::shuffle(messages.begin(), messages.end(), random);
    if (r.id() == 1) {
      group->batch_async(messages).wait();
    } else {
      group->batch(messages);
    }
    for (std::uint64_t tag = 0; tag < kTags; ++tag) {
      for (int peer = 0; peer < r.size(); ++peer) {
        const std::size_t index = tag * 3 + static_cast<std::size_t>(peer);
        EXPECT_TRUE(same(got[index], content(peer, r.id(), tag, kCount)));
      }
    }
    group->batch({});
  });
}

TEST_P(MessageTest, AsynchronousWithCallbacks) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    std::atomic<int> called{0};
    const auto done = [&](const std::exception_ptr& error) {
      EXPECT_FALSE(error);
      ++called;
    };
    const int peer = 1 - r.id();
    std::vector<int> in(100'000, -1);
    const std::vector<int> out(100'000, r.id());
    Work receive = group->recv_async(in.data(), in.size(), DataType::kI32, kAnyRank, {}, done);
    EXPECT_EQ(receive.number(), 0u);
    Work send = group->send_async(out.data(), out.size(), DataType::kI32, peer, {}, done);
    // Nobody waits: the group's own thread moves them along.
    while (called != 2) std::this_thread::yield();
    EXPECT_TRUE(receive.done());
    EXPECT_TRUE(send.wait(0s));
    receive.wait();
    EXPECT_EQ(receive.source(), peer);
    EXPECT_EQ(in, std::vector<int>(100'000, peer));
  });
}

TEST_P(MessageTest, WaitingWithALimitLeavesTheMessage) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    int value = 7;
    if (r.id() == 1) {
      value = 0;
      Work work = group->recv_async(&value, 1, DataType::kI32, 0);
      EXPECT_FALSE(work.wait(20ms));
      EXPECT_FALSE(work.done());
      r.barrier();
      EXPECT_TRUE(work.wait(30s));
      EXPECT_EQ(value, 7);
    } else {
      r.barrier();
      group->send(&value, 1, DataType::kI32, 1);
    }
  });
}

// What one thread does to itself wakes another one, and its callback comes.
TEST_P(MessageTest, ToItselfFromAnotherThread) {
  RankGroup(1, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    int got = 0, again = 0;
    const int value = 5;
    std::atomic<bool> called{false};
    std::jthread receiver([&] { group->recv(&got, 1, DataType::kI32, 0, {.tag = 1}); });
    Work work = group->recv_async(&again, 1, DataType::kI32, 0, {.tag = 2},
                                  [&](const std::exception_ptr&) { called = true; });
    group->send(&value, 1, DataType::kI32, 0, {.tag = 2});
    EXPECT_TRUE(called);
    group->send(&value, 1, DataType::kI32, 0, {.tag = 1});
    receiver.join();
    EXPECT_EQ(got + again, 10);
  });
}

// More than a ring holds to a rank that is busy elsewhere, while that one answers: nothing is left
// behind.
TEST_P(MessageTest, AFullRingDoesNotKeepAnswersBack) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    for (int round = 0; round < 20; ++round) {
      const auto tag = static_cast<std::uint64_t>(round);
      std::vector<int> large(5000, round);
      int small = 0;
      if (r.id() == 0) {
        Region shared(*group, Place::kShared, large.size() * sizeof(int));
        std::memcpy(shared.data(), large.data(), shared.size());
        group->send(shared.data(), large.size(), DataType::kI32, 1, {.tag = tag});
        for (int i = 0; i < 16; ++i) group->recv(&small, 1, DataType::kI32, 1, {.tag = 100});
      } else {
        for (int i = 0; i < 16; ++i) group->send(&small, 1, DataType::kI32, 0, {.tag = 100});
        std::vector<int> got(5000);
        group->recv(got.data(), got.size(), DataType::kI32, 0, {.tag = tag});
        EXPECT_EQ(got, large);
      }
      group->barrier();
    }
  });
}

// Messages are apart from collectives: both may be under way, from several threads.
TEST_P(MessageTest, BesideCollectivesFromSeveralThreads) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    const int peer = 1 - r.id();
    std::vector<std::jthread> threads;
    for (std::uint64_t tag = 0; tag < 3; ++tag) {
      threads.emplace_back([&, tag] {
        for (int i = 0; i < 30; ++i) {
          std::vector<int> out(20'000, i), in(20'000);
          Work send = group->send_async(out.data(), out.size(), DataType::kI32, peer, {.tag = tag});
          group->recv(in.data(), in.size(), DataType::kI32, peer, {.tag = tag});
          send.wait();
          EXPECT_EQ(in, out);
        }
      });
    }
    for (int i = 0; i < 100; ++i) {
      float value = 1;
      group->all_reduce(&value, &value, 1, DataType::kF32);
      EXPECT_EQ(value, 2);
    }
  });
}

TEST_P(MessageTest, SizeAndTypeMustMatch) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    std::vector<float> data(200'000, 1);
    // A large one: both sides are told.
    if (r.id() == 0) {
      EXPECT_THAT(error_of([&] { group->send(data.data(), data.size(), DataType::kF32, 1); }),
                  AllOf(HasSubstr("invalid argument"), HasSubstr("send of 200000 x f32 to rank 1"),
                        HasSubstr("rank 1 expects 100 x f32")));
    } else {
      EXPECT_THAT(error_of([&] { group->recv(data.data(), 100, DataType::kF32, 0); }),
                  AllOf(HasSubstr("invalid argument"), HasSubstr("recv of 100 x f32 from rank 0"),
                        HasSubstr("rank 0 sent 200000 x f32")));
      EXPECT_EQ(data[0], 1);
    }
    // A small one is gone already; the receiver is told.
    if (r.id() == 0) {
      group->send(data.data(), 2, DataType::kF32, 1);
      group->send(data.data(), 3, DataType::kF32, 1);
    } else {
      EXPECT_THAT(error_of([&] { group->recv(data.data(), 2, DataType::kI32, 0); }),
                  HasSubstr("rank 0 sent 2 x f32"));
      group->recv(data.data(), 3, DataType::kF32, 0);  // the next one comes
    }
    EXPECT_FALSE(group->broken());
    group->barrier();
  });
}

TEST_P(MessageTest, BadArguments) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    int value = 0;
    const auto refused = [&](const char* part, const auto& call) {
      EXPECT_THAT(error_of(call), AllOf(HasSubstr("invalid argument"), HasSubstr(part)));
    };
    refused("there is no rank 2", [&] { group->send(&value, 1, DataType::kI32, 2); });
    refused("there is no rank -1", [&] { group->send(&value, 1, DataType::kI32, kAnyRank); });
    refused("there is no rank -2", [&] { group->recv(&value, 1, DataType::kI32, -2); });
    refused("buffer is null", [&] { group->recv(nullptr, 1, DataType::kI32, 0); });
    refused("too large", [&] { group->recv(&value, SIZE_MAX / 4, DataType::kI32, 0); });
    group->barrier();
  });
}

TEST_P(MessageTest, TheDeadlineBreaksTheGroup) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    int value = 0;
    if (r.id() == 0) {
      EXPECT_THAT(error_of([&] {
                    group->recv(&value, 1, DataType::kI32, 1, {.tag = 9, .timeout = 100ms});
                  }),
                  AllOf(HasSubstr("timeout"), HasSubstr("recv of 1 x i32 from rank 1, tag 9"),
                        HasSubstr(" Timed out "), HasSubstr("rank 1 (pid ")));
      EXPECT_TRUE(group->broken());
    } else {
      // Its own wait ends with the same cause, long before its deadline.
      EXPECT_THAT(error_of([&] { group->recv(&value, 1, DataType::kI32, 0, {.tag = 10}); }),
                  HasSubstr("recv of 1 x i32 from rank 1, tag 9"));
    }
    EXPECT_THAT(error_of([&] { group->send(&value, 1, DataType::kI32, 1 - r.id()); }),
                HasSubstr("broken"));
    EXPECT_THAT(error_of([&] { group->barrier(); }), HasSubstr("tag 9"));
  });
}

TEST_P(MessageTest, ARankThatLeftIsNamedAndWhatItSentCounts) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    auto group = make_group(r);
    int value = r.id();
    if (r.id() == 2) {
      group->send(&value, 1, DataType::kI32, 0);
      group.reset();
      r.barrier();
      return;
    }
    r.barrier();
    if (r.id() == 0) {
      value = -1;
      EXPECT_EQ(group->recv(&value, 1, DataType::kI32, 2), 2);
      EXPECT_EQ(value, 2);
      EXPECT_THAT(error_of([&] { group->recv(&value, 1, DataType::kI32, 2); }),
                  AllOf(HasSubstr("peer lost"), HasSubstr("rank 2"), HasSubstr("left the group")));
      EXPECT_THAT(error_of([&] { group->send(&value, 1, DataType::kI32, 2); }),
                  AllOf(HasSubstr("peer lost"), HasSubstr("left the group")));
    }
    // The others go on.
    if (r.id() == 0) group->send(&value, 1, DataType::kI32, 1);
    if (r.id() == 1) {
      EXPECT_EQ(group->recv(&value, 1, DataType::kI32, kAnyRank), 0);
    }
  });
}

TEST_P(MessageTest, ClosingEndsWhatIsPending) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    int value = 0;
    std::vector<int> large(100'000);
    Work receive = group->recv_async(&value, 1, DataType::kI32, 1 - r.id(), {.tag = 1});
    Work send = group->send_async(large.data(), large.size(), DataType::kI32, 1 - r.id());
    if (r.id() == 0) group->close();
    const char* why = r.id() == 0 ? "closed" : "left the group";
    EXPECT_THAT(error_of([&] { receive.wait(); }), HasSubstr(why));
    EXPECT_THAT(error_of([&] { send.wait(); }), HasSubstr(why));
    r.barrier();
  });
}

// A rank is killed while messages of all sizes go round.
class MessageKillTest : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Sizes, MessageKillTest, testing::Values(8, 3000, 2'000'000),
                         [](const auto& test) { return concat("Bytes", test.param); });

TEST_P(MessageKillTest, SurvivorsAreToldOnTheEvent) {
  const std::size_t bytes = GetParam();
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([bytes](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = 50s});
    Buffer in(bytes), out(bytes);
    const int next = (r.id() + 1) % r.size(), before = (r.id() + r.size() - 1) % r.size();
    const std::array messages = {
        Message{Kind::kSend, out.data(), bytes, DataType::kU8, next, 0},
        Message{Kind::kReceive, in.data(), bytes, DataType::kU8, before, 0}};
    for (int i = 0; i < 5; ++i) group->batch(messages);
    r.mark("looping");
    EXPECT_THAT(error_of([&] {
                  for (;;) group->batch(messages);
                }),
                AllOf(HasSubstr("peer lost"), HasSubstr("rank 1 (pid "), HasSubstr("SIGKILL")));
    EXPECT_TRUE(group->broken());
    r.store()->set(concat("told/", r.id()), "");
  });
  ranks.wait_mark("looping");
  const auto killed = std::chrono::steady_clock::now();
  ranks.kill(1, SIGKILL);
  for (const int r : {0, 2, 3}) ranks.store()->get(concat("told/", r), Deadline::after(20s));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, 2s);
  ranks.join();
}

// Random traffic: every rank derives all messages from the seed, posts its own in an order of its
// own, and waits for them in another.
TEST_P(MessageTest, RandomTraffic) {
  for (const int size : {2, 5}) {
    RankGroup(size, GetParam()).run([](Rank& r) {
      const auto group = make_group(r);
      for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        std::mt19937_64 random(seed * 100 + static_cast<std::uint64_t>(r.size()));
        struct Planned {
          int from, to;
          std::uint64_t tag;
          std::size_t bytes;
          Place place;
        };
        std::vector<Planned> all(40);
        for (std::size_t i = 0; i < all.size(); ++i) {
          const auto n = static_cast<unsigned>(r.size());
          const auto draw = random() % 10;
          all[i] = {static_cast<int>(random() % n), static_cast<int>(random() % n), i,
                    draw < 5   ? random() % 64
                    : draw < 8 ? random() % 9000
                               : random() % 600'000,
                    random() % 2 == 0 ? Place::kShared : Place::kPrivate};
        }
        std::vector<std::pair<std::unique_ptr<Region>, Work>> works;
        std::vector<std::pair<const Region*, Buffer>> expected;
        std::shuffle(all.begin(), all.end(),
                     std::mt19937(static_cast<unsigned>(seed) + static_cast<unsigned>(r.id())));
        for (const Planned& message : all) {
          const auto make = [&] {
            return std::make_unique<Region>(*group, message.place, message.bytes);
          };
          const MessageOptions options{.tag = message.tag};
          if (message.from == r.id()) {
            auto region = make();
            region->fill(content(message.from, message.to, message.tag + seed, message.bytes));
            Work work = group->send_async(region->data(), message.bytes, DataType::kU8, message.to,
                                          options);
            works.emplace_back(std::move(region), work);
          }
          if (message.to == r.id()) {
            auto region = make();
            Work work = group->recv_async(region->data(), message.bytes, DataType::kU8,
                                          message.from, options);
            expected.emplace_back(
                region.get(), content(message.from, message.to, message.tag + seed, message.bytes));
            works.emplace_back(std::move(region), work);
          }
        }
        std::shuffle(works.begin(), works.end(), std::mt19937(static_cast<unsigned>(seed)));
        for (auto& [region, work] : works) work.wait();
        for (const auto& [region, bytes] : expected) EXPECT_TRUE(same(region->content(), bytes));
      }
    });
  }
}

}  // namespace
}  // namespace convoy::coll::test
