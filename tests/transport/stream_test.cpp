// Letters that go before they are filled. In some tests the test is the hands of the other process:
// it stops in the middle, ends, or does what no sender does.
#include <gmock/gmock.h>
#include <sched.h>

#include <functional>
#include <thread>

#include "base/concat.h"
#include "support.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/fabric.h"
#include "transport/shm/letter_ring.h"
#include "transport/shm/mapping.h"
#include "trip_wire.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;
using shm::LetterEntry;
using shm::make_shm_endpoint;
using shm::PieceEntry;
using shm::RingLayout;
using shm::shm_stats;
using shm::StreamHead;
using testing::HasSubstr;

constexpr auto kPatience = 30s;
constexpr std::size_t kBytes = 300'000;
constexpr std::size_t kPlace = StreamHead::kBytes;

std::unique_ptr<Party> join_stream(bool service_thread = true) {
  auto party = std::make_unique<Party>();
  party->endpoint = make_shm_endpoint(party->inbox, {.service_thread = service_thread});
  party->inbox.wakes = party->endpoint.get();
  return party;
}

// The other process.
class Hands {
 public:
  explicit Hands(Party& to) : party_(to) {
    const Address address{Id::random(), fabric_.self().encode()};
    peer_ = fabric_.dial(
        fabric_.self(), to.endpoint->address().id, address.encode(),
        [this](shm::Peer&, const shm::Frame& frame, UniqueFd fd) {
          if (!fd || (frame.segment != 1 && frame.segment != 2)) return;
          auto known = known_.lock();
          const auto mapping = shm::adopt_mapping(std::move(fd), frame.bytes);
          if (frame.segment == 1) {
            known->bell = mapping;
            known->number = frame.process.bytes[0];
          } else {
            known->ring = mapping;
          }
        },
        Deadline::after(kPatience));
    EXPECT_TRUE(poll([&] { return known_.lock()->bell != nullptr; }));
    new (own_bell_.first->data()) shm::Doorbell{};
    Id one{};
    one.bytes[0] = 1;
    EXPECT_TRUE(peer_->try_note(1, own_bell_.first->size(), own_bell_.second.get()));
    EXPECT_TRUE(peer_->try_note(2, ring_.mapping()->size(), ring_.fd()));
    EXPECT_TRUE(peer_->try_note(3, segment_.size(), segment_.fd(), one));
    head_ = new (segment_.data()) StreamHead;
    // Until the watch thread has read the notes.
    for (int i = 0; i < 2; ++i) fabric_.close_door(Id{});
  }
  Hands(const Hands&) = delete;
  Hands& operator=(const Hands&) = delete;
  ~Hands() { hang_up(); }

  std::atomic<std::uint64_t>& ready() { return head_->ready; }
  void fill(std::span<const std::byte> bytes) {
    std::memcpy(segment_.data() + kPlace, bytes.data(), bytes.size());
    ready().store(bytes.size());
  }
  void write(const std::vector<PieceEntry>& pieces, std::uint8_t flags = LetterEntry::kStreams,
             std::uint16_t loan = 1) {
    const std::size_t bytes = sizeof(LetterEntry) + pieces.size() * sizeof(PieceEntry);
    const LetterEntry entry{.bytes = static_cast<std::uint32_t>(bytes),
                            .kind = 5,
                            .flags = flags,
                            .zero = 0,
                            .head_bytes = 0,
                            .pieces = static_cast<std::uint16_t>(pieces.size()),
                            .loan = loan};
    const auto to = ring_.begin(bytes);
    ASSERT_FALSE(to.empty());
    std::memcpy(to.data(), &entry, sizeof entry);
    if (!pieces.empty()) {
      std::memcpy(to.data() + sizeof entry, pieces.data(), pieces.size() * sizeof(PieceEntry));
    }
    ring_.commit();
  }
  void knock() {
    auto known = known_.lock();
    shm::Doorbell::Rung rung;
    reinterpret_cast<shm::Doorbell*>(known->bell->data())->knock(known->number, false, rung);
  }
  bool poll(FunctionRef<bool()> ready) {
    const Deadline limit = Deadline::after(kPatience);
    while (!ready() && !limit.expired()) party_.endpoint->poll(Endpoint::Serve::kAll);
    return ready();
  }
  // So often that a letter which waits for its sender is put aside.
  void poll_long() {
    int polls = 0;
    poll([&] { return ++polls > 5000; });
  }
  // The ring from the endpoint to this.
  RingLayout* ring_to_here() {
    auto known = known_.lock();
    return known->ring ? reinterpret_cast<RingLayout*>(known->ring->data()) : nullptr;
  }
  void hang_up() {
    if (peer_) fabric_.hang_up({std::exchange(peer_, nullptr)});
  }

 private:
  struct Known {
    shm::Mapping bell;
    std::uint32_t number = 0;  // ours there
    shm::Mapping ring;
  };
  static inline const std::uint64_t kProbe = 7;

  Party& party_;
  shm::Fabric& fabric_ = shm::Fabric::instance();
  Guarded<Known> known_;
  std::shared_ptr<shm::Peer> peer_;
  shm::RingWriter ring_ = shm::RingWriter::create(kProbe);
  const Segment segment_ = Segment::create(1 << 20, "stream");
  std::pair<shm::Mapping, UniqueFd> own_bell_ =
      shm::make_mapping(sizeof(shm::Doorbell), "stream bell");
  StreamHead* head_;
};

PieceEntry lent(std::size_t bytes, std::uint64_t place = kPlace) {
  return {.bytes = bytes, .how = PieceEntry::kLent, .zero = 0, .segment = 1, .place = place};
}

TEST(StreamTest, ASenderThatStopsWhileItCopiesIsWaitedFor) {
  for (const bool places : {false, true}) {
    const auto party = join_stream(false);
    party->inbox.places = places;
    Hands hands(*party);
    const Bytes sent = some_bytes(kBytes, 15);
    hands.fill(std::span(sent).first(kBytes / 3));
    hands.write({lent(kBytes)});
    hands.knock();
    hands.poll_long();
    EXPECT_EQ(party->inbox.letters(), 0u);
    hands.fill(sent);
    hands.knock();
    ASSERT_TRUE(hands.poll([&] { return party->inbox.letters() == 1; }));
    const auto letter = party->inbox.letter(0);
    EXPECT_EQ(letter.kind, 5);
    EXPECT_TRUE(std::ranges::equal(letter.parts[0].bytes, sent));
  }
}

// Nobody knocks: the end is heard of before the knock might be.
TEST(StreamTest, WhatIsCompleteWhenItsSenderEndsArrives) {
  const auto party = join_stream(false);
  Hands hands(*party);
  const Bytes sent = some_bytes(kBytes, 16);
  hands.write({lent(kBytes)});
  hands.knock();
  hands.poll_long();
  hands.fill(sent);
  hands.hang_up();
  ASSERT_TRUE(hands.poll([&] { return party->inbox.losses() == 1; }));
  ASSERT_EQ(party->inbox.letters(), 1u);
  EXPECT_TRUE(std::ranges::equal(party->inbox.letter(0).parts[0].bytes, sent));
}

TEST(StreamTest, WhatIsIncompleteWhenItsSenderEndsDoesNot) {
  for (const bool aside : {false, true}) {
    for (const bool places : {false, true}) {
      const auto party = join_stream(false);
      party->inbox.places = places;
      Hands hands(*party);
      hands.fill(some_bytes(kBytes - 1, 17));
      hands.write({lent(kBytes)});
      hands.knock();
      if (aside) hands.poll_long();
      hands.hang_up();
      ASSERT_TRUE(hands.poll([&] { return party->inbox.losses() == 1; }));
      EXPECT_EQ(party->inbox.letters(), 0u);
    }
  }
}

// What a sender says of how much is there is not believed beyond the letter.
TEST(StreamTest, MoreThanThereIs) {
  for (const bool places : {false, true}) {
    const auto party = join_stream(false);
    party->inbox.places = places;
    Hands hands(*party);
    const Bytes sent = some_bytes(kBytes, 18);
    hands.fill(sent);
    hands.ready().store(UINT64_MAX);
    hands.write({lent(1000), lent(kBytes - 1024, kPlace + 1024)});
    hands.knock();
    ASSERT_TRUE(hands.poll([&] { return party->inbox.letters() == 1; }));
    const auto parts = party->inbox.letter(0).parts;
    EXPECT_TRUE(std::ranges::equal(parts[0].bytes, std::span(sent).first(1000)));
    EXPECT_TRUE(std::ranges::equal(parts[1].bytes, std::span(sent).subspan(1024)));
  }
}

TEST(StreamTest, NonsenseLosesItsSender) {
  const PieceEntry direct{
      .bytes = kBytes, .how = PieceEntry::kDirect, .zero = 0, .segment = 2, .place = 4096};
  struct Case {
    std::function<void(Hands&)> act;
    const char* text;
  };
  const Case cases[] = {
      {[](Hands& hands) { hands.write({lent(kBytes, 0)}); }, "a stream without its head"},
      {[](Hands& hands) { hands.write({lent(kBytes, kPlace + 4)}); }, "a stream without its head"},
      {[](Hands& hands) { hands.write({lent(1 << 20)}); }, "a piece beyond its segment"},
      {[](Hands& hands) { hands.write({lent(kBytes, 4096), lent(kBytes)}); },
       "a piece beside its stream"},
      {[](Hands& hands) { hands.write({}, LetterEntry::kStreams, 0); }, "inconsistent length"},
      {[&](Hands& hands) { hands.write({lent(kBytes), direct}); }, "an empty stream"},
      {[&](Hands& hands) { hands.write({direct}, LetterEntry::kStreams, 0); }, "an empty stream"},
      {[](Hands& hands) { hands.write({lent(kBytes)}, 4); }, "impossible numbers"},
      {[](Hands& hands) {
         hands.ready().store(5000);
         hands.write({lent(kBytes)});
         hands.knock();
         hands.poll_long();
         hands.ready().store(4999);
       },
       "a stream that goes back"},
      {[](Hands& hands) {
         for (std::size_t i = 0; i <= RingLayout::kLoans; ++i) hands.write({lent(kBytes)});
         hands.knock();
         for (std::size_t i = 0; i <= RingLayout::kLoans; ++i) hands.poll_long();
       },
       "more messages than it can lend"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.text);
    const auto party = join_stream(false);
    party->inbox.places = true;
    Hands hands(*party);
    one.act(hands);
    hands.knock();
    ASSERT_TRUE(hands.poll([&] { return party->inbox.losses() == 1; }));
    EXPECT_THAT(party->inbox.state().lost[0].second, HasSubstr(one.text));
    EXPECT_EQ(party->inbox.letters(), 0u);
  }
}

// A sender that stops where it is told to.
std::atomic<bool> g_stopped{false};
std::atomic<bool> g_may_go_on{false};
void stop_here() {
  g_stopped.store(true);
  while (!g_may_go_on.load()) ::sched_yield();  // the test lifts the wire, or is over its time
}

struct Sending {
  Bytes content = some_bytes(kBytes, 19);
  TripWire wire{content, kBytes / 2, stop_here};
  SendResult result = SendResult::kWouldBlock;
  std::jthread thread;

  explicit Sending(Remote& to) {
    g_stopped = false;
    g_may_go_on = false;
    thread = std::jthread([this, &to] {
      const Piece pieces[] = {{wire.bytes()}};
      result = to.try_send({.kind = 9, .pieces = pieces});
    });
  }
  ~Sending() { finish(); }
  bool wait_for_stop() {
    const Deadline limit = Deadline::after(kPatience);
    while (!g_stopped && !limit.expired()) ::sched_yield();
    return g_stopped;
  }
  void finish() {
    wire.lift();
    g_may_go_on = true;
    if (thread.joinable()) thread.join();
  }
};

TEST(StreamTest, OthersGoOnWhileASenderStops) {
  for (const bool places : {false, true}) {
    const auto a = join_stream();
    const auto b = join_stream();
    b->inbox.places = places;
    Sending sending(a->to(*b));
    ASSERT_TRUE(sending.wait_for_stop());
    for (LetterKind kind = 0; kind < 5; ++kind) {
      ASSERT_EQ(a->to(*b).try_send({.kind = kind}), SendResult::kSent);
      ASSERT_EQ(b->to(*a).try_send({.kind = kind}), SendResult::kSent);
      ASSERT_TRUE(b->endpoint->wait(Deadline::after(kPatience),
                                    [&] { return b->inbox.letters() == kind + 1u; }));
      ASSERT_TRUE(a->endpoint->wait(Deadline::after(kPatience),
                                    [&] { return a->inbox.letters() == kind + 1u; }));
    }
    sending.finish();
    ASSERT_TRUE(
        b->endpoint->wait(Deadline::after(kPatience), [&] { return b->inbox.letters() == 6; }));
    EXPECT_EQ(sending.result, SendResult::kSent);
    const auto letter = b->inbox.letter(5);
    EXPECT_EQ(letter.kind, 9);
    EXPECT_TRUE(std::ranges::equal(letter.parts[0].bytes, sending.content));
  }
}

// The memory is the sender's until it has filled it, and is free after that.
TEST(StreamTest, AReceiverThatGoesWhileASenderStops) {
  for (const bool cut : {false, true}) {
    const auto a = join_stream();
    auto b = join_stream();
    b->inbox.places = true;
    Remote& to_b = a->to(*b);
    Sending sending(to_b);
    ASSERT_TRUE(sending.wait_for_stop());
    // It has begun to take it: what is left in its ring nobody gives back.
    const Deadline limit = Deadline::after(kPatience);
    while (b->inbox.order().empty() && !limit.expired()) ::sched_yield();
    ASSERT_EQ(b->inbox.order(), "placed ");
    if (cut) {
      to_b.cut();
    } else {
      b.reset();
    }
    ASSERT_TRUE(
        a->endpoint->wait(Deadline::after(kPatience), [&] { return a->inbox.losses() == 1; }));
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, kBytes);
    if (b) {
      ASSERT_TRUE(
          b->endpoint->wait(Deadline::after(kPatience), [&] { return b->inbox.losses() == 1; }));
      EXPECT_EQ(b->inbox.letters(), 0u);
    }
    sending.finish();
    EXPECT_EQ(sending.result, SendResult::kSent);
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, 0u);
    EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 0u);
  }
}

TEST(StreamTest, MemoryThatIsGivenBackBeforeItIsFilled) {
  for (const bool twice : {false, true}) {
    const auto a = join_stream(false);
    Hands hands(*a);
    ASSERT_TRUE(hands.poll([&] { return a->inbox.state().joined.size() == 1; }));
    Sending sending(*a->inbox.state().joined[0]);
    ASSERT_TRUE(sending.wait_for_stop());
    ASSERT_TRUE(hands.poll([&] { return hands.ring_to_here() != nullptr; }));
    hands.ring_to_here()->released[0].fetch_or(1);
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, kBytes) << "the sender still writes there";
    if (twice) {
      hands.ring_to_here()->released[0].fetch_or(1);
      EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, kBytes);
    }
    sending.finish();
    EXPECT_EQ(sending.result, SendResult::kSent);
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, 0u);
    EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 0u);
    if (!twice) continue;
    ASSERT_TRUE(hands.poll([&] { return a->inbox.losses() == 1; }));
    EXPECT_THAT(a->inbox.state().lost[0].second, HasSubstr("gave back what was not lent"));
  }
}

}  // namespace
}  // namespace convoy::transport::test
