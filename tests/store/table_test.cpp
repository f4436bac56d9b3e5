#include "store/table.h"

#include <gtest/gtest.h>

#include <chrono>

#include "base/concat.h"
#include "store_variants.h"

namespace convoy::test {
namespace {

using std::chrono::microseconds;
using Keys = std::vector<std::string>;

// A table in virtual time whose replies are kept.
class Table {
 public:
  explicit Table(const StoreLimits& limits = {})
      : table(limits, [this](StoreTable::ClientId client, StoreReply reply) {
          from.push_back(client);
          replies.push_back(std::move(reply));
        }) {}

  // The reply that comes at once; nullopt: the request waits.
  std::optional<StoreMessage> ask(StoreOp op, Keys parts, std::int64_t number = 0,
                                  StoreTable::ClientId client = 1) {
    const std::size_t before = replies.size();
    table.handle(client,
                 {.code = static_cast<std::uint8_t>(op),
                  .id = ++last_id,
                  .number = number,
                  .timeout_us = 1000,
                  .parts = std::move(parts)},
                 now);
    for (std::size_t i = before; i < replies.size(); ++i) {
      if (replies[i].message.id == last_id) return StoreReply(replies[i]).to_message();
    }
    return std::nullopt;
  }
  ErrorKind refused(StoreOp op, Keys parts, std::int64_t number = 0) {
    const auto reply = ask(op, std::move(parts), number);
    if (!reply || reply->code == kReplyOk) {
      ADD_FAILURE() << "was not refused";
      return ErrorKind::kInternal;
    }
    return static_cast<ErrorKind>(reply->code - 1);
  }

  std::vector<StoreReply> replies;
  std::vector<StoreTable::ClientId> from;
  std::uint32_t last_id = 0;
  StoreTable::Clock::time_point now{std::chrono::hours(1)};
  StoreTable table;
};

TEST(StoreTable, WaitersAreAnsweredInTheOrderInWhichTheyCame) {
  Table t;
  for (StoreTable::ClientId client = 1; client <= 5; ++client) {
    EXPECT_EQ(t.ask(StoreOp::kGet, {"k"}, 0, 6 - client), std::nullopt);
  }
  EXPECT_EQ(t.table.waiting(), 5u);
  t.ask(StoreOp::kSet, {"k", "v"}, 0, 9);
  EXPECT_EQ(t.from, (std::vector<StoreTable::ClientId>{5, 4, 3, 2, 1, 9}));
  EXPECT_EQ(t.table.waiting(), 0u);
  EXPECT_EQ(t.table.next_expiry(), std::nullopt);
}

TEST(StoreTable, ExpiryIsExact) {
  Table t;
  t.ask(StoreOp::kGet, {"a"});
  t.now += microseconds(400);
  t.ask(StoreOp::kWait, {"a", "b"});
  EXPECT_EQ(t.table.next_expiry(), t.now + microseconds(600));
  t.table.expire(t.now + microseconds(599));
  EXPECT_TRUE(t.replies.empty());
  t.table.expire(t.now + microseconds(600));
  ASSERT_EQ(t.replies.size(), 1u);
  EXPECT_EQ(t.replies[0].message.id, 1u);
  EXPECT_EQ(t.table.next_expiry(), t.now + microseconds(1000));
  t.table.expire(t.now + std::chrono::hours(1));
  EXPECT_EQ(t.replies.size(), 2u);
  EXPECT_EQ(t.table.next_expiry(), std::nullopt);
}

TEST(StoreTable, EndlessRequestsDoNotExpire) {
  Table t;
  t.table.handle(1,
                 {.code = static_cast<std::uint8_t>(StoreOp::kGet),
                  .id = 1,
                  .timeout_us = UINT64_MAX,
                  .parts = {"k"}},
                 t.now);
  EXPECT_EQ(t.table.next_expiry(), StoreTable::Clock::time_point::max());
  t.table.expire(t.now + std::chrono::hours(24 * 365 * 100));
  EXPECT_EQ(t.table.waiting(), 1u);
  t.ask(StoreOp::kSet, {"k", ""});
  EXPECT_EQ(t.table.waiting(), 0u);
}

TEST(StoreTable, DropForgetsOneClient) {
  Table t;
  t.ask(StoreOp::kGet, {"k"}, 0, 1);
  t.ask(StoreOp::kWait, {"k", "l"}, 0, 1);
  t.ask(StoreOp::kGet, {"k"}, 0, 2);
  t.table.drop(1);
  t.table.drop(1);
  t.table.drop(77);
  EXPECT_EQ(t.table.waiting(), 1u);
  t.ask(StoreOp::kSet, {"k", ""}, 0, 3);
  EXPECT_EQ(t.from, (std::vector<StoreTable::ClientId>{2, 3}));
  EXPECT_EQ(t.table.waiting_bytes(), 0u);
}

TEST(StoreTable, RequestsOfAWrongForm) {
  Table t;
  const auto invalid = ErrorKind::kInvalidArgument;
  EXPECT_EQ(t.refused(StoreOp::kSet, {"k"}), invalid);
  EXPECT_EQ(t.refused(StoreOp::kSet, {"k", "v", "w"}), invalid);
  EXPECT_EQ(t.refused(StoreOp::kGet, {}), invalid);
  EXPECT_EQ(t.refused(StoreOp::kWatch, {"k", "l"}), invalid);
  EXPECT_EQ(t.refused(StoreOp::kCompareSet, {"k", "v"}), invalid);
  EXPECT_EQ(t.refused(static_cast<StoreOp>(0), {}), invalid);
  EXPECT_EQ(t.refused(static_cast<StoreOp>(12), {"k"}), invalid);
  EXPECT_EQ(t.refused(static_cast<StoreOp>(255), {"k"}), invalid);
  EXPECT_EQ(t.table.keys(), 0u);
}

TEST(StoreTable, FullTableLosesNothing) {
  Table t({.key_bytes = 4, .value_bytes = 10, .total_bytes = 20, .keys = 3});
  const auto resource = ErrorKind::kResource;
  t.ask(StoreOp::kSet, {"a", "0123456789"});
  t.ask(StoreOp::kSet, {"b", "01234"});
  EXPECT_EQ(t.table.bytes(), 17u);
  EXPECT_EQ(t.refused(StoreOp::kSet, {"c", "123"}), resource);
  EXPECT_EQ(t.refused(StoreOp::kSet, {"b", "012345678"}), resource);
  EXPECT_EQ(t.refused(StoreOp::kAppend, {"b", "5678"}), resource);
  EXPECT_EQ(t.refused(StoreOp::kAppend, {"a", "x"}), resource);
  EXPECT_EQ(t.refused(StoreOp::kCompareSet, {"b", "01234", "012345678"}), resource);
  EXPECT_EQ(t.refused(StoreOp::kAdd, {"cccc"}, 1), resource);  // one byte too many
  EXPECT_EQ(t.refused(StoreOp::kSet, {"b", "0123456789x"}), resource);
  EXPECT_EQ(t.refused(StoreOp::kSet, {"ccccc", ""}), resource);
  EXPECT_EQ(t.table.bytes(), 17u);
  EXPECT_EQ(t.ask(StoreOp::kTryGet, {"b"})->parts, Keys{"01234"});
  t.replies.clear();                                                 // they hold the value
  EXPECT_EQ(t.ask(StoreOp::kAppend, {"b", "567"})->code, kReplyOk);  // exactly full
  EXPECT_EQ(t.table.bytes(), 20u);
  EXPECT_EQ(t.ask(StoreOp::kSet, {"a", ""})->code, kReplyOk);
  EXPECT_EQ(t.ask(StoreOp::kSet, {"c", ""})->code, kReplyOk);
  EXPECT_EQ(t.refused(StoreOp::kSet, {"d", ""}), resource);  // three keys
  EXPECT_EQ(t.ask(StoreOp::kSet, {"c", "v"})->code, kReplyOk);
  EXPECT_EQ(t.ask(StoreOp::kErase, {"c"})->number, 1);
  EXPECT_EQ(t.ask(StoreOp::kSet, {"d", ""})->code, kReplyOk);
}

TEST(StoreTable, AddCountsAgainstTheValueLimit) {
  Table t({.value_bytes = 2});
  EXPECT_EQ(t.ask(StoreOp::kAdd, {"n"}, 99)->number, 99);
  EXPECT_EQ(t.refused(StoreOp::kAdd, {"n"}, 1), ErrorKind::kResource);
  EXPECT_EQ(t.ask(StoreOp::kTryGet, {"n"})->parts, Keys{"99"});
}

TEST(StoreTable, WaitingRequestsAreBounded) {
  Table t({.waiting_per_client = 2, .keys_per_request = 3});
  t.ask(StoreOp::kGet, {"a"});
  t.ask(StoreOp::kWatch, {"a"});
  EXPECT_EQ(t.refused(StoreOp::kGet, {"b"}), ErrorKind::kResource);
  EXPECT_EQ(t.refused(StoreOp::kWait, {"b"}), ErrorKind::kResource);
  EXPECT_EQ(t.refused(StoreOp::kWait, {"b", "b", "b", "b"}), ErrorKind::kResource);
  EXPECT_EQ(t.table.waiting(), 2u);
  EXPECT_EQ(t.ask(StoreOp::kGet, {"b"}, 0, 2), std::nullopt);  // another client
  t.ask(StoreOp::kSet, {"a", ""});
  EXPECT_EQ(t.ask(StoreOp::kGet, {"b"}), std::nullopt);  // there is room again
}

TEST(StoreTable, WaitingRequestsAreBoundedInBytesAlsoWithEmptyKeys) {
  Table t({.total_bytes = 10'000, .waiting_per_client = 1000});
  std::size_t accepted = 0;
  while (!t.ask(StoreOp::kWait, Keys(10, "")) && accepted < 1000) ++accepted;
  EXPECT_GE(accepted, 5u);
  EXPECT_LE(accepted, 20u);
  EXPECT_LE(t.table.waiting_bytes(), 10'000u);
  t.table.drop(1);
  EXPECT_EQ(t.table.waiting_bytes(), 0u);
  EXPECT_EQ(t.ask(StoreOp::kGet, {"k"}), std::nullopt);
}

// A refused first request of a client must leave no trace of the client.
TEST(StoreTable, RefusedWaitersLeaveNothing) {
  Table t({.total_bytes = 100});
  EXPECT_EQ(t.refused(StoreOp::kGet, {"k"}), ErrorKind::kResource);
  EXPECT_EQ(t.table.waiting(), 0u);
  EXPECT_EQ(t.table.waiting_bytes(), 0u);
  EXPECT_EQ(t.table.next_expiry(), std::nullopt);
}

TEST(StoreTable, ValueIsInMemoryOnceHoweverManyFetchIt) {
  Table t;
  const std::string large(100'000, 'x');
  for (StoreTable::ClientId client = 1; client <= 50; ++client) {
    t.ask(StoreOp::kGet, {"k"}, 0, client);
  }
  t.ask(StoreOp::kSet, {"k", large}, 0, 99);
  ASSERT_EQ(t.replies.size(), 51u);
  for (std::size_t i = 1; i < 50; ++i) EXPECT_EQ(t.replies[i].value, t.replies[0].value);
  EXPECT_EQ(t.table.bytes(), large.size() + 1);
}

TEST(StoreTable, ValuesThatOnlyRepliesHoldStillCount) {
  Table t({.total_bytes = 1000});
  t.ask(StoreOp::kSet, {"k", std::string(400, '1')});
  t.ask(StoreOp::kTryGet, {"k"});  // the reply stays in t.replies: a client that does not read
  t.ask(StoreOp::kSet, {"k", std::string(400, '2')});
  EXPECT_EQ(t.table.bytes(), 801u);
  EXPECT_EQ(t.ask(StoreOp::kSet, {"k", std::string(400, '3')})->code, kReplyOk);  // frees the 2nd
  t.ask(StoreOp::kTryGet, {"k"});
  EXPECT_EQ(t.refused(StoreOp::kSet, {"k", std::string(400, '4')}), ErrorKind::kResource);
  EXPECT_EQ(t.refused(StoreOp::kAppend, {"k", "4"}), ErrorKind::kResource);
  EXPECT_EQ(t.ask(StoreOp::kErase, {"k"})->number, 1);
  EXPECT_EQ(t.table.bytes(), 800u);
  t.replies.clear();
  EXPECT_EQ(t.table.bytes(), 0u);
}

TEST(StoreTable, AppendDoesNotChangeWhatWasGivenOut) {
  Table t;
  t.ask(StoreOp::kAppend, {"k", "one"});
  t.ask(StoreOp::kTryGet, {"k"});
  const auto held = t.replies.back().value;
  t.replies.clear();
  t.ask(StoreOp::kAppend, {"k", " two"});
  EXPECT_EQ(held->bytes(), "one");
  EXPECT_EQ(t.ask(StoreOp::kTryGet, {"k"})->parts, Keys{"one two"});
  EXPECT_EQ(t.table.bytes(), 1 + 3 + 7u);
}

// None of these may be quadratic: each takes well under a second as it is, minutes otherwise.
TEST(StoreTable, LargeNumbersAreNoProblem) {
  constexpr int kMany = 16'000;
  const auto start = Deadline::Clock::now();
  Keys keys;
  for (int i = 0; i < kMany; ++i) keys.push_back(concat("key/", i));
  Table t({.waiting_per_client = kMany});
  for (StoreTable::ClientId client = 1; client <= 8; ++client) {
    ASSERT_EQ(t.ask(StoreOp::kWait, keys, 0, client), std::nullopt);
  }
  for (int i = 0; i < kMany; ++i) t.ask(StoreOp::kGet, {"one"}, 0, 9);
  for (const auto& key : keys) t.ask(StoreOp::kSet, {key, "v"}, 0, 10);
  t.ask(StoreOp::kSet, {"one", "v"}, 0, 10);
  EXPECT_EQ(t.table.waiting(), 0u);
  t.replies.clear();
  for (int i = 0; i < kMany; ++i) t.ask(StoreOp::kAppend, {"text", "0123456789012345678901234"});
  EXPECT_EQ(t.ask(StoreOp::kTryGet, {"text"})->parts[0].size(), 25u * kMany);
  EXPECT_LT(Deadline::Clock::now() - start, std::chrono::seconds(10));
}

}  // namespace
}  // namespace convoy::test
