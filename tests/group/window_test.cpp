// Windows as tensors.
#include "convoy/window.h"

#include <gmock/gmock.h>

#include "convoy/error.h"
#include "group/fake_backend.h"
#include "group/support.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

ProcessGroup make_group(const Rank& r) {
  return ProcessGroup::from(make_backend(r), {.name = "world", .store = r.store()});
}

class GroupWindowTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, GroupWindowTest,
                         testing::Values(RankMode::kThreads, RankMode::kProcesses), rank_mode_name);

TEST_P(GroupWindowTest, PutsAndViews) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    const int right = (r.id() + 1) % 3, left = (r.id() + 2) % 3;
    const auto mine = group.allocate({4, 5});
    mine.fill_(-1);
    const auto window = group.window(mine);
    EXPECT_EQ(window.rank(), r.id());
    EXPECT_EQ(window.size(), 3);
    EXPECT_EQ(window.at(right).sizes(), mine.sizes());
    // Each writes a column of two numbers, strided, into its right neighbour.
    window.put(right, full(r.id(), {2, 2}).t().select(0, 1), 5);
    window.signal(right);
    window.wait_signal(left, Deadline::after(20s));
    expect_equal(mine.view(-1).slice(0, 4, 8), at::tensor({-1, left, left, -1}, at::kFloat));
    window.fence();
    expect_equal(window.at(left)[1][0], full((left + 2) % 3, {}));
    window.fence();  // before the others write
    // A view is the other's memory, and may go on living without the window.
    window.at(right).fill_(10 + r.id());
    window.fence();
    expect_equal(mine, full(10 + left, {4, 5}));
    window.put(r.id(), full(3, {20}));
    expect_equal(mine, full(3, {4, 5}));
    EXPECT_THAT(text_of([&] { window.put(right, full(1, {2}), 19); }),
                AllOf(HasSubstr("2 elements from element 19"), HasSubstr("which has 20")));
    EXPECT_THAT(text_of([&] { window.put(right, full(1, {2}), -1); }), HasSubstr("element -1"));
    EXPECT_THAT(text_of([&] { window.put(right, full(1, {2}, at::kLong)); }),
                AllOf(HasSubstr("Long"), HasSubstr("Float")));
    EXPECT_THAT(text_of([&] { window.at(3); }), HasSubstr("there is no rank 3"));
    EXPECT_THAT(text_of([&] { Window().at(0); }), HasSubstr("this Window is empty"));
    window.fence();
  });
}

// Sizes and types by rank; parts of larger tensors.
TEST(GroupWindowThreadsTest, EachItsOwn) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r);
    const auto whole = group.allocate({10, 2}, r.id() == 0 ? at::kLong : at::kBFloat16);
    whole.zero_();
    const auto window = group.window(whole.slice(0, 4, 4 + r.id() * 3));
    EXPECT_EQ(window.at(0).numel(), 0);
    EXPECT_EQ(window.at(1).sizes(), (std::vector<int64_t>{3, 2}));
    EXPECT_EQ(window.at(1).scalar_type(), at::kBFloat16);
    if (r.id() == 0) window.at(1).fill_(2);
    window.fence();
    if (r.id() == 1) {
      EXPECT_EQ(whole.sum().item<double>(), 12);
      expect_equal(whole[4], full(2, {2}, at::kBFloat16));
    }
    window.fence();
  });
}

TEST(GroupWindowThreadsTest, WhatCannotBeAWindow) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r);
    const auto fine = group.allocate({4, 4});
    const auto refused = [&](const char* why, const at::Tensor& tensor) {
      EXPECT_THAT(text_of([&] { group.window(r.id() == 1 ? tensor : fine); }),
                  AllOf(HasSubstr("rank 1: the tensor"), HasSubstr(why)));
    };
    refused("in private memory", full(0, {4}));
    refused("not contiguous", fine.t());
    refused("undefined", {});
    group.barrier();
    const auto foreign = ProcessGroup::from(
        c10::make_intrusive<FakeBackend>(make_backend(r, "foreign")), {.name = "foreign"});
    EXPECT_THAT(text_of([&] { foreign.window(fine); }),
                AllOf(HasSubstr("backend \"fake\""), HasSubstr("needs backend \"convoy\"")));
  });
}

// With the last view, not with the window, a rank leaves.
TEST(GroupWindowThreadsTest, ViewsKeepIt) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r);
    auto window = group.window(group.allocate({8}));
    auto view = window.at(1 - r.id());
    const auto more = view.slice(0, 0, 2);
    view.reset();
    if (r.id() == 1) window = {};
    r.barrier();
    if (r.id() == 0) {
      EXPECT_EQ(window.at(1).numel(), 8);
      window.at(1).fill_(1);
    }
    more.fill_(2);
    r.barrier();
  });
}

}  // namespace
}  // namespace convoy::test
