// The endpoint of processes that share memory: letters with large pieces, and what they lend.
#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "shm_support.h"
#include "support/expect_error.h"

namespace convoy::transport::test {
namespace {

using convoy::test::expect_error;
using shm::make_shm_endpoint;
using shm::shm_stats;
using shm::shm_trim;
using testing::HasSubstr;

// Of the mapping that holds this address, in page tables of this process.
std::size_t resident_kilobytes(const void* address) {
  std::ifstream in("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool here = false;
  for (std::string line; std::getline(in, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      here = begin <= wanted && wanted < end;
    } else if (here && line.starts_with("Rss:")) {
      return std::stoul(line.substr(4));
    }
  }
  ADD_FAILURE() << "no such mapping";
  return 0;
}

// The receiver's page tables are filled by what it reads, and not before.
TEST(ShmEndpointTest, LentMemoryIsMappedLazily) {
  const auto a = join();
  const auto b = join();
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  const Bytes data = some_bytes(kBytes, 21);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(a->to(*b).try_send({.pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  {
    const Part part = b->inbox.letter(0).parts[0];
    ASSERT_EQ(part.where, Part::Where::kLent);
    EXPECT_LT(resident_kilobytes(part.bytes.data()), kBytes / 1024 / 4);
    EXPECT_TRUE(std::ranges::equal(part.bytes, data));
    EXPECT_GE(resident_kilobytes(part.bytes.data()), kBytes / 1024);
  }
  b->inbox.clear();
}

TEST(ShmEndpointTest, LentMemoryIsNotCopiedAndIsGivenBack) {
  const auto a = join();
  auto b = join();
  Remote& to_b = a->to(*b);
  const Bytes data = some_bytes(5 << 20, 2);
  const Piece pieces[] = {{data}};
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(to_b.try_send({.pieces = pieces}), SendResult::kSent);
    ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
    EXPECT_EQ(b->inbox.letter(0).parts[0].where, Part::Where::kLent);
    EXPECT_TRUE(std::ranges::equal(b->inbox.letter(0).parts[0].bytes, data));
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, data.size());
    b->inbox.clear();
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, 0u);
  }
  EXPECT_LT(shm_stats(*a->endpoint).heap_bytes, 3 * data.size()) << "memory is used again";
  EXPECT_GE(shm_trim(*a->endpoint), data.size());
  EXPECT_EQ(shm_stats(*a->endpoint).heap_bytes, 0u);
  // New memory after that is known to the remote, too.
  ASSERT_EQ(to_b.try_send({.pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  // A part outlives both endpoints.
  const Part part = b->inbox.letter(0).parts[0];
  b->inbox.clear();
  b.reset();
  ASSERT_TRUE(until(*a, [&] { return !a->inbox.state().lost.empty(); }));
  EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 1u) << "it may still be read";
  EXPECT_TRUE(std::ranges::equal(part.bytes, data));
}

TEST(ShmEndpointTest, LoansOfALivingRemoteAreFreedWhenItGivesThemBack) {
  const auto a = join();
  auto b = join();
  const Bytes data = some_bytes(100'000, 3);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(a->to(*b).try_send({.pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  Part part = b->inbox.letter(0).parts[0];
  b->inbox.clear();
  b.reset();
  ASSERT_TRUE(until(*a, [&] { return !a->inbox.state().lost.empty(); }));
  EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 1u);
  part = {};
  EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 0u);
}

TEST(ShmEndpointTest, QuotaBoundsWhatARemoteHolds) {
  const auto a = join({.quota = 3 << 20});
  const auto b = join();
  Remote& to_b = a->to(*b);
  const Bytes data = some_bytes(1 << 20, 4);
  const Piece one[] = {{data}};
  for (int i = 0; i < 3; ++i) ASSERT_EQ(to_b.try_send({.pieces = one}), SendResult::kSent);
  EXPECT_EQ(to_b.try_send({.pieces = one}), SendResult::kWouldBlock);
  // Small letters go on.
  EXPECT_EQ(to_b.try_send({.kind = 9}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 4; }));
  EXPECT_EQ(to_b.try_send({.pieces = one}), SendResult::kWouldBlock);
  EXPECT_EQ(a->inbox.state().rooms[&to_b], 0);
  b->inbox.clear();
  ASSERT_TRUE(until(*a, [&] { return a->inbox.state().rooms[&to_b] > 0; }));
  EXPECT_EQ(to_b.try_send({.pieces = one}), SendResult::kSent);
  const Bytes more(4 << 20);
  const Piece too_much[] = {{more}};
  expect_error(ErrorKind::kInvalidArgument, "quota", [&] { to_b.try_send({.pieces = too_much}); });
}

TEST(ShmEndpointTest, LargePiecesThatStayAreReadWhereTheyAre) {
  std::atomic<int> sent = 0;
  const auto a = join({.least_direct = 1 << 20});
  Endpoint* const endpoint = a->endpoint.get();
  const auto b = join();
  Remote& to_b = a->to(*b);
  ASSERT_EQ(to_b.try_send({}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  b->inbox.clear();
  const Bytes data = some_bytes(5 << 20, 5);
  const Piece pieces[] = {{data, true}};
  for (const bool places : {false, true}) {
    b->inbox.places = places;
    sent = 0;
    ASSERT_EQ(to_b.try_send({.pieces = pieces},
                            [&](const Error* lost) {
                              EXPECT_EQ(lost, nullptr);
                              ++sent;
                              endpoint->wake();
                            }),
              SendResult::kSent);
    ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
    EXPECT_TRUE(std::ranges::equal(b->inbox.letter(0).parts[0].bytes, data));
    EXPECT_NE(b->inbox.letter(0).parts[0].where, Part::Where::kLent);
    ASSERT_TRUE(until(*a, [&] { return sent == 1; }));
    b->inbox.clear();
  }
  EXPECT_EQ(shm_stats(*a->endpoint).heap_bytes, 0u) << "nothing was copied by the sender";
}

// Whoever gives a letter up while its memory is read says so before it changes that memory: what it
// says arrives first.
TEST(ShmEndpointTest, WhatWasSentDuringAReadArrivesBeforeIt) {
  struct GivingUp : Recorder {
    Remote* sender = nullptr;
    std::span<std::byte> place(Remote&, const Arrival&, std::size_t,
                               std::size_t) noexcept override {
      for (int i = 0; i < 100; ++i) EXPECT_EQ(sender->try_send({.kind = 2}), SendResult::kSent);
      return {};
    }
  } inbox;
  std::atomic<int> sent = 0;
  const auto a = join({.least_direct = 1 << 16});
  Endpoint* const endpoint = a->endpoint.get();
  const auto b = make_shm_endpoint(inbox);
  inbox.wakes = b.get();
  Remote& to_b = a->endpoint->remote(b->address());
  inbox.sender = &to_b;
  const auto arrived = [&](std::size_t letters) {
    return b->wait(Deadline::after(kLimit), [&] { return inbox.letters() == letters; });
  };
  ASSERT_EQ(to_b.try_send({.kind = 3}), SendResult::kSent);
  ASSERT_TRUE(arrived(1));
  const Bytes data = some_bytes(200'000, 14);
  const Piece pieces[] = {{data, true}};
  ASSERT_EQ(to_b.try_send({.kind = 1, .pieces = pieces},
                          [&](const Error*) {
                            ++sent;
                            endpoint->wake();
                          }),
            SendResult::kSent);
  ASSERT_TRUE(arrived(102));
  const auto letters = inbox.state().letters;
  EXPECT_EQ(letters.back().kind, 1);
  EXPECT_TRUE(std::ranges::equal(letters.back().parts[0].bytes, data));
  ASSERT_TRUE(until(*a, [&] { return sent == 1; }));
}

// The large one is being copied, 1 MiB at a time; small ones behind it in the ring do not wait.
TEST(ShmEndpointTest, SmallLettersOvertakeLargeOnes) {
  const auto a = join();
  const auto b = join({.service_thread = false});
  b->inbox.places = true;
  Remote& to_b = a->to(*b);
  const Bytes data = some_bytes(32 << 20, 6);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(to_b.try_send({.kind = 1, .pieces = pieces}), SendResult::kSent);
  ASSERT_EQ(to_b.try_send({.kind = 2}), SendResult::kSent);
  const Deadline limit = Deadline::after(kLimit);
  while (b->inbox.letters() < 2 && !limit.expired()) b->endpoint->poll(Endpoint::Serve::kAll);
  ASSERT_EQ(b->inbox.letters(), 2u);
  EXPECT_EQ(b->inbox.letter(0).kind, 2);
  EXPECT_EQ(b->inbox.letter(1).kind, 1);
}

// Two remotes send large letters: neither waits until the other's is copied.
TEST(ShmEndpointTest, LargeLettersTakeTurns) {
  std::atomic<int> sent = 0;
  const auto a = join({.least_direct = 1 << 20});
  const auto b = join();
  const auto receiver = join({.service_thread = false});
  const Bytes data = some_bytes(16 << 20, 7);
  const Piece pieces[] = {{data}};
  Recorder& inbox = receiver->inbox;
  inbox.places = false;
  const auto poll = [&](std::size_t letters) {
    const Deadline limit = Deadline::after(kLimit);
    while (inbox.letters() < letters && !limit.expired()) {
      receiver->endpoint->poll(Endpoint::Serve::kAll);
    }
    return inbox.letters() == letters;
  };
  ASSERT_EQ(a->to(*receiver).try_send({.kind = 1}), SendResult::kSent);
  ASSERT_EQ(b->to(*receiver).try_send({.kind = 1}), SendResult::kSent);
  ASSERT_TRUE(poll(2));
  inbox.clear();
  inbox.places = true;
  const Piece stays[] = {{data, true}};
  ASSERT_EQ(a->to(*receiver).try_send({.kind = 2, .pieces = stays}, [&](const Error*) { ++sent; }),
            SendResult::kSent);
  ASSERT_EQ(b->to(*receiver).try_send({.kind = 3, .pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(poll(2));
  EXPECT_TRUE(std::ranges::equal(inbox.letter(0).parts[0].bytes, data));
  EXPECT_TRUE(std::ranges::equal(inbox.letter(1).parts[0].bytes, data));
  EXPECT_THAT(inbox.state().order, HasSubstr("placed placed arrived arrived"));
  ASSERT_TRUE(until(*a, [&] { return sent == 1; }));
}

}  // namespace
}  // namespace convoy::transport::test
