#include "coll/view.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace convoy::coll {
namespace {

using Part = std::tuple<std::byte*, std::size_t, std::size_t>;

std::vector<Part> parts(const View& view, std::size_t begin, std::size_t length) {
  std::vector<Part> found;
  view.for_each(begin, length, [&](std::byte* data, std::size_t done, std::size_t bytes) {
    found.emplace_back(data, done, bytes);
  });
  return found;
}

TEST(ViewTest, OneStretch) {
  std::array<std::byte, 10> memory;
  const View view(memory.data(), memory.size());
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.bytes(), 10u);
  EXPECT_EQ(view.at(3), memory.data() + 3);
  EXPECT_EQ(parts(view, 2, 5), (std::vector<Part>{{memory.data() + 2, 0, 5}}));
  EXPECT_TRUE(parts(view, 10, 0).empty());
}

TEST(ViewTest, SeveralStretchesSomeEmpty) {
  std::array<std::byte, 100> memory;
  std::byte* m = memory.data();
  const std::array<Stretch, 5> list = {
      Stretch{m + 50, 4, 0}, {m, 0, 4}, {m + 10, 3, 4}, {nullptr, 0, 7}, {m + 80, 5, 7}};
  const View view(list);
  EXPECT_FALSE(view.contiguous());
  EXPECT_EQ(view.bytes(), 12u);
  EXPECT_EQ(view.data(), m + 50);
  EXPECT_EQ(view.at(0), m + 50);
  EXPECT_EQ(view.at(4), m + 10);
  EXPECT_EQ(view.at(6), m + 12);
  EXPECT_EQ(view.at(7), m + 80);
  EXPECT_EQ(parts(view, 0, 12),
            (std::vector<Part>{{m + 50, 0, 4}, {m + 10, 4, 3}, {m + 80, 7, 5}}));
  EXPECT_EQ(parts(view, 3, 6), (std::vector<Part>{{m + 53, 0, 1}, {m + 10, 1, 3}, {m + 80, 4, 2}}));
}

TEST(ViewTest, APartOfAListBeginsAtZero) {
  std::array<std::byte, 10> memory;
  const std::array<Stretch, 2> list = {Stretch{memory.data(), 4, 0}, {memory.data() + 4, 6, 4}};
  const View second{std::span(list).subspan(1)};
  EXPECT_TRUE(second.contiguous());
  EXPECT_EQ(second.bytes(), 6u);
  EXPECT_EQ(second.at(0), memory.data() + 4);
}

}  // namespace
}  // namespace convoy::coll
