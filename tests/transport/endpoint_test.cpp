// What every kind of endpoint promises.
#include <gmock/gmock.h>

#include <numeric>

#include "base/concat.h"
#include "support.h"
#include "support/expect_error.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::expect_error;
using testing::HasSubstr;

class EndpointTest : public testing::TestWithParam<NetKind> {
 protected:
  bool until(const std::unique_ptr<Party>& party, const std::function<bool()>& ready) {
    return net_->until(*party, ready);
  }
  bool until_letters(const std::unique_ptr<Party>& party, std::size_t count) {
    return until(party, [&] { return party->inbox.letters() >= count; });
  }

  std::unique_ptr<Net> net_ = make_net(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Kinds, EndpointTest,
                         testing::Values(NetKind::kShm, NetKind::kSimulated, NetKind::kFaultyShm,
                                         NetKind::kFaultySimulated),
                         [](const auto& test) { return to_name(test.param); });

TEST_P(EndpointTest, OnlyOneSideNeedsToKnowTheOther) {
  const auto a = net_->join("a");
  const auto b = net_->join("b");
  Remote& to_b = a->to(*b);
  EXPECT_EQ(&a->to(*b), &to_b) << "one remote for one address";
  const Bytes text = to_bytes("hello");
  ASSERT_EQ(to_b.try_send({.kind = 7, .head = std::span<const std::byte>(text)}),
            SendResult::kSent);
  ASSERT_TRUE(until_letters(b, 1));
  const auto got = b->inbox.letter(0);
  EXPECT_EQ(got.kind, 7);
  EXPECT_FALSE(got.reply);
  EXPECT_EQ(got.head, "hello");
  ASSERT_EQ(b->inbox.state().joined.size(), 1u);
  EXPECT_EQ(b->inbox.state().joined[0], got.from);
  EXPECT_EQ(got.from->address(), a->endpoint->address());
  // And back, without an address.
  ASSERT_EQ(got.from->try_send({.kind = 8, .reply = true}), SendResult::kSent);
  ASSERT_TRUE(until_letters(a, 1));
  EXPECT_EQ(a->inbox.letter(0).from, &to_b);
  EXPECT_TRUE(a->inbox.letter(0).reply);
  EXPECT_EQ(&b->to(*a), got.from);
  EXPECT_TRUE(a->inbox.state().joined.empty()) << "a has asked for b itself";
}

TEST_P(EndpointTest, BothMayConnectAtOnce) {
  const auto a = net_->join("a");
  const auto b = net_->join("b");
  Remote& to_b = a->to(*b);
  Remote& to_a = b->to(*a);
  for (std::uint16_t i = 0; i < 50; ++i) {
    send(*net_, *a, to_b, {.kind = i});
    send(*net_, *b, to_a, {.kind = i});
  }
  ASSERT_TRUE(until_letters(a, 50));
  ASSERT_TRUE(until_letters(b, 50));
  for (std::uint16_t i = 0; i < 50; ++i) {
    EXPECT_EQ(a->inbox.letter(i).kind, i);
    EXPECT_EQ(a->inbox.letter(i).from, &to_b);
    EXPECT_EQ(b->inbox.letter(i).from, &to_a);
  }
}

TEST_P(EndpointTest, LettersToItself) {
  const auto a = net_->join("a");
  Remote& self = a->to(*a);
  const Bytes piece = some_bytes(100'000, 1);
  const Piece pieces[] = {{piece}};
  send(*net_, *a, self, {.kind = 1});
  send(*net_, *a, self, {.kind = 2, .pieces = pieces});
  ASSERT_TRUE(until_letters(a, 2));
  EXPECT_EQ(a->inbox.letter(0).from, &self);
  ASSERT_EQ(a->inbox.letter(1).parts.size(), 1u);
  EXPECT_TRUE(std::ranges::equal(a->inbox.letter(1).parts[0].bytes, piece));
  a->inbox.clear();
}

TEST_P(EndpointTest, SmallLettersArriveInOrderThroughAFullRing) {
  const auto a = net_->join("a");
  const auto b = net_->join("b");
  Remote& to_b = a->to(*b);
  constexpr std::size_t kLetters = 3000;
  for (std::size_t i = 0; i < kLetters; ++i) {
    const std::size_t bytes = i % 7 == 0 ? 3000 : i % 100;
    auto write = [&](std::span<std::byte> to) {
      ASSERT_EQ(to.size(), bytes);
      std::ranges::fill(to, static_cast<std::byte>(i));
    };
    send(*net_, *a, to_b,
         {.kind = static_cast<LetterKind>(i), .reply = i % 3 == 0, .head = Head(bytes, write)});
  }
  ASSERT_TRUE(until_letters(b, kLetters));
  // Replies have no order, the others have.
  const auto letters = b->inbox.state().letters;
  ASSERT_EQ(letters.size(), kLetters);
  std::vector<int> seen(kLetters);
  std::size_t next = 1;
  for (const auto& letter : letters) {
    const std::size_t i = letter.kind;
    ASSERT_LT(i, kLetters);
    ++seen[i];
    EXPECT_EQ(letter.reply, i % 3 == 0);
    EXPECT_EQ(letter.head, std::string(i % 7 == 0 ? 3000 : i % 100, static_cast<char>(i)));
    if (letter.reply) continue;
    ASSERT_EQ(i, next);
    next += next % 3 == 2 ? 2 : 1;
  }
  EXPECT_EQ(seen, std::vector<int>(kLetters, 1));
}

TEST_P(EndpointTest, PiecesOfAllSizes) {
  std::atomic<int> sent = 0;
  const auto a = net_->join("a");
  const auto b = net_->join("b");
  Remote& to_b = a->to(*b);
  const std::size_t sizes[] = {0, 1, 1024, 1025, 5000, 65'536, 1'000'003, 3 << 20};
  std::vector<Bytes> data;
  for (const std::size_t size : sizes) data.push_back(some_bytes(size, size));
  Endpoint* const endpoint = a->endpoint.get();
  for (const bool placed : {false, true}) {
    b->inbox.places = placed;
    for (const bool stays : {false, true}) {
      const int before = sent;
      std::vector<Piece> pieces;
      for (const Bytes& bytes : data) pieces.push_back({bytes, stays});
      send(*net_, *a, to_b, {.kind = 3, .pieces = pieces}, [&, before](const Error* lost) {
        EXPECT_EQ(lost, nullptr);
        EXPECT_EQ(++sent, before + 1);
        endpoint->wake();
      });
      if (!stays) {
        EXPECT_EQ(sent, before + 1) << "what was copied is free at once";
      }
      ASSERT_TRUE(until_letters(b, 1));
      const auto got = b->inbox.letter(0);
      ASSERT_EQ(got.parts.size(), data.size());
      for (std::size_t i = 0; i < data.size(); ++i) {
        EXPECT_TRUE(std::ranges::equal(got.parts[i].bytes, data[i])) << sizes[i];
        EXPECT_EQ(got.parts[i].where == Part::Where::kPlaced, placed && sizes[i] != 0) << sizes[i];
      }
      b->inbox.clear();
      EXPECT_TRUE(until(a, [&] { return sent == before + 1; }));
    }
  }
}

TEST_P(EndpointTest, RefusesWhatCanNeverGo) {
  const auto a = net_->join("a");
  const auto b = net_->join("b");
  Remote& to_b = a->to(*b);
  const Bytes large(Letter::kMostHead + 1);
  expect_error(ErrorKind::kInvalidArgument, "head",
               [&] { to_b.try_send({.head = std::span<const std::byte>(large)}); });
  const std::vector<Piece> many(Letter::kMostPieces + 1);
  expect_error(ErrorKind::kInvalidArgument, "pieces", [&] { to_b.try_send({.pieces = many}); });
  const std::vector<Piece> most(Letter::kMostPieces);
  const Bytes largest(Letter::kMostHead);
  EXPECT_EQ(to_b.try_send({.head = std::span<const std::byte>(largest), .pieces = most}),
            SendResult::kSent);
  ASSERT_TRUE(until_letters(b, 1));
  EXPECT_EQ(b->inbox.letter(0).parts.size(), Letter::kMostPieces);
}

TEST_P(EndpointTest, WhoClosesIsLostAfterAllItsLetters) {
  const auto a = net_->join("a");
  auto b = net_->join("b");
  Remote& to_a = b->to(*a);
  const Address old = b->endpoint->address();
  for (std::uint16_t i = 0; i < 10; ++i) send(*net_, *b, to_a, {.kind = i});
  b.reset();
  ASSERT_TRUE(until(a, [&] { return !a->inbox.state().lost.empty(); }));
  const auto state = a->inbox.state();
  EXPECT_EQ(state.letters.size(), 10u);
  ASSERT_EQ(state.lost.size(), 1u);
  EXPECT_EQ(state.lost[0].first, state.joined.at(0));
  EXPECT_THAT(state.lost[0].second, HasSubstr("closed its endpoint"));
  EXPECT_TRUE(state.lost[0].first->lost());
  EXPECT_EQ(state.lost[0].first->try_send({}), SendResult::kLost);
  // Who comes back is another one.
  b = net_->join("b");
  EXPECT_NE(b->endpoint->address().id, old.id);
  Remote& again = a->to(*b);
  EXPECT_NE(&again, state.lost[0].first);
  EXPECT_EQ(again.try_send({}), SendResult::kSent);
  EXPECT_TRUE(until_letters(b, 1));
}

TEST_P(EndpointTest, NobodyIsThereAnyMore) {
  const auto a = net_->join("a");
  auto b = net_->join("b");
  const Address address = b->endpoint->address();
  b.reset();
  // Either it is known at once, or it is heard.
  try {
    Remote& gone = a->endpoint->remote(address);
    ASSERT_TRUE(until(a, [&] { return !a->inbox.state().lost.empty(); }));
    EXPECT_TRUE(gone.lost());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
  }
}

TEST_P(EndpointTest, CutIsHeardByBoth) {
  const auto a = net_->join("a");
  const auto b = net_->join("b");
  Remote& to_b = a->to(*b);
  send(*net_, *a, to_b, {.kind = 1});
  ASSERT_TRUE(until_letters(b, 1));
  Remote& to_a = *b->inbox.letter(0).from;
  to_b.cut();
  EXPECT_EQ(to_b.try_send({}), SendResult::kLost);
  EXPECT_TRUE(until(a, [&] { return a->inbox.state().lost.size() == 1; }));
  EXPECT_TRUE(until(b, [&] { return b->inbox.state().lost.size() == 1; }));
  EXPECT_EQ(to_a.try_send({}), SendResult::kLost);
  EXPECT_EQ(a->inbox.state().lost[0].first, &to_b);
  EXPECT_EQ(b->inbox.state().lost[0].first, &to_a);
}

TEST_P(EndpointTest, TimersRunInTheirOrderAndCanBeCancelled) {
  const auto a = net_->join("a");
  Guarded<std::string> order;
  const auto start = a->endpoint->now();
  Endpoint* const endpoint = a->endpoint.get();
  const auto note = [&](char c) {
    return [&order, endpoint, c] {
      order.lock()->push_back(c);
      endpoint->wake();
    };
  };
  a->endpoint->call_at(start + 3ms, note('3'));
  a->endpoint->call_at(start + 1ms, note('1'));
  const auto second = a->endpoint->call_at(start + 2ms, note('2'));
  EXPECT_TRUE(a->endpoint->cancel(second));
  EXPECT_FALSE(a->endpoint->cancel(second));
  ASSERT_TRUE(until(a, [&] { return order.lock()->size() == 2; }));
  EXPECT_EQ(*order.lock(), "13");
  EXPECT_GE(a->endpoint->now() - start, 3ms);
}

TEST_P(EndpointTest, WaitEndsAtItsDeadline) {
  const auto a = net_->join("a");
  const auto start = a->endpoint->now();
  EXPECT_FALSE(a->endpoint->wait(Deadline::after(5ms, start), [] { return false; }));
  EXPECT_GE(a->endpoint->now() - start, 5ms);
  EXPECT_TRUE(a->endpoint->wait(Deadline::after(0ms, start), [] { return true; }));
}

TEST_P(EndpointTest, ManyRemotes) {
  const auto hub = net_->join("hub");
  std::vector<std::unique_ptr<Party>> leaves;
  constexpr std::size_t kLeaves = 12;
  for (std::size_t i = 0; i < kLeaves; ++i) {
    leaves.push_back(net_->join(concat("leaf ", i)));
    send(*net_, *leaves[i], leaves[i]->to(*hub), {.kind = static_cast<LetterKind>(i)});
  }
  ASSERT_TRUE(until_letters(hub, kLeaves));
  const auto letters = hub->inbox.state().letters;
  for (const auto& letter : letters) {
    send(*net_, *hub, *letter.from, {.kind = letter.kind, .reply = true});
  }
  for (std::size_t i = 0; i < kLeaves; ++i) {
    ASSERT_TRUE(until_letters(leaves[i], 1));
    EXPECT_EQ(leaves[i]->inbox.letter(0).kind, i);
  }
}

TEST(AddressTest, TextAndBack) {
  const Address address{Id::random(), "somewhere else"};
  EXPECT_EQ(Address::decode(address.encode()), address);
  expect_error(ErrorKind::kInvalidArgument, "address", [&] { Address::decode("nonsense"); });
  expect_error(ErrorKind::kInvalidArgument, "", [&] { Address::decode(std::string(33, 'x')); });
}

}  // namespace
}  // namespace convoy::transport::test
