// Random requests, clients and times: the table and a reference that is slow and simple must agree
// in every reply and every count.
#include <gtest/gtest.h>

#include <random>

#include "base/concat.h"
#include "reference_table.h"

namespace convoy::test {
namespace {

constexpr StoreLimits kTight{.key_bytes = 6,
                             .value_bytes = 1500,
                             .total_bytes = 6000,
                             .keys = 6,
                             .clients = 4,
                             .waiting_per_client = 3,
                             .keys_per_request = 4};
constexpr StoreLimits kRoomy{};

class TableModel : public testing::TestWithParam<unsigned> {
 protected:
  std::size_t upto(std::size_t most) { return random_() % (most + 1); }
  std::string key() { return upto(40) == 0 ? "too long" : std::string(1, "abcdefgh"[upto(7)]); }
  std::string value() {
    switch (upto(6)) {
      case 0: return "";
      case 1: return std::to_string(static_cast<int>(upto(2000)) - 1000);
      case 2: return std::to_string(INT64_MAX - static_cast<std::int64_t>(upto(1)));
      case 3: return std::string(upto(1600), 'x');
      default: return std::string(1, "uvw"[upto(2)]);
    }
  }
  std::vector<std::string> list(std::size_t count) {
    std::vector<std::string> keys;
    while (keys.size() < count) keys.push_back(key());
    return keys;
  }

  StoreMessage request() {
    StoreMessage next{.code = static_cast<std::uint8_t>(1 + upto(10)), .id = ++last_id_};
    switch (static_cast<StoreOp>(next.code)) {
      case StoreOp::kSet:
      case StoreOp::kAppend: next.parts = {key(), value()}; break;
      case StoreOp::kCompareSet: next.parts = {key(), value(), value()}; break;
      case StoreOp::kWait:
      case StoreOp::kCheck: next.parts = list(upto(5)); break;
      case StoreOp::kKeys: next.parts = {upto(1) == 0 ? "" : key()}; break;
      default: next.parts = {key()};
    }
    if (upto(60) == 0) next.parts.emplace_back("surplus");
    if (upto(60) == 0) next.code = static_cast<std::uint8_t>(upto(255));
    if (upto(100) == 0) next.oversized = true;
    next.number = upto(3) == 0 ? static_cast<std::int64_t>(upto(200))
                               : static_cast<std::int64_t>(upto(6)) - 3;
    next.timeout_us = upto(8) == 0 ? UINT64_MAX : upto(8) == 0 ? 0 : 1 + upto(500);
    return next;
  }

  std::mt19937 random_{GetParam()};
  std::uint32_t last_id_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Seeds, TableModel, testing::Range(1u, 9u),
                         [](const auto& test) { return concat("Seed", test.param); });

TEST_P(TableModel, AgreesWithTheReference) {
  TablePair pair(GetParam() % 3 == 0 ? kRoomy : kTight);
  std::size_t most_waiting = 0;
  for (int step = 0; step < 4000; ++step) {
    const std::uint64_t client = 1 + upto(3);
    std::string wrong;
    if (upto(10) == 0) {
      wrong = pair.advance(static_cast<std::int64_t>(upto(200)));
    } else if (upto(80) == 0) {
      wrong = pair.drop(client);
    } else {
      wrong = pair.handle(client, request());
    }
    ASSERT_EQ(wrong, "") << "seed " << GetParam() << ", step " << step;
    most_waiting = std::max(most_waiting, pair.table().waiting());
  }
  EXPECT_GE(most_waiting, 4u);  // the walk reaches interesting states
  for (std::uint64_t client = 1; client <= 4; ++client) EXPECT_EQ(pair.drop(client), "");
  EXPECT_EQ(pair.table().waiting(), 0u);
  EXPECT_EQ(pair.table().waiting_bytes(), 0u);
}

}  // namespace
}  // namespace convoy::test
