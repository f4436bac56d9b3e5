#include <gtest/gtest.h>

#include "support.h"

namespace convoy::coll::test {
namespace {

TEST(GroupLargeTest, MoreThanTwoGigabytes) {
  RankGroup(2, RankMode::kThreads, {.limit = std::chrono::seconds(280)}).run([](Rank& r) {
    const auto group = make_group(r);
    const std::size_t count = (std::size_t{2} << 30) + 4097;
    const auto block = group->allocate(count);
    std::memset(block.data(), r.id() + 1, count);
    group->all_reduce(block.data(), block.data(), count, DataType::kU8);
    const auto three = [](std::byte b) { return b == std::byte{3}; };
    EXPECT_TRUE(std::all_of(block.data(), block.data() + count, three));
  });
  shm::Fabric::instance().trim();
}

}  // namespace
}  // namespace convoy::coll::test
