#include "coll/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "base/concat.h"
#include "coll/control.h"
#include "support.h"

namespace convoy::coll::test {
namespace {

using testing::HasSubstr;

class GroupTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, GroupTest, convoy::test::rank_modes(),
                         convoy::test::rank_mode_name);

// Sizes around every boundary inside: inline data, eager payload, slices, rounds, chunks.
std::vector<std::size_t> byte_sizes(int ranks) {
  const Layout layout(ranks);
  std::vector<std::size_t> sizes = {0, 4, 8};
  for (const std::size_t edge :
       {kInlineBytes, layout.eager_bytes(), layout.slice_bytes() * static_cast<std::size_t>(ranks),
        2 * layout.slice_bytes() * static_cast<std::size_t>(ranks), layout.stage_bytes() * 2}) {
    for (const std::size_t size : {edge - 4, edge, edge + 4}) {
      if (kSanitized && size == edge - 4) continue;
      sizes.push_back(size / 4 * 4);
    }
  }
  sizes.push_back(1009 * 4);
  sizes.push_back(200'003 * 4);
  return sizes;
}

void check_all_reduce(Group& group, Place input_place, Place output_place, bool in_place,
                      DataType type, ReduceOp op, std::size_t count, std::uint64_t salt) {
  SCOPED_TRACE(concat(to_string(type), " ", to_string(op), " count ", count, " input ",
                      input_place == Place::kShared ? "shared" : "private", " output ",
                      output_place == Place::kShared ? "shared" : "private",
                      in_place ? " in place" : ""));
  const std::size_t bytes = count * size_of(type);
  const Buffer mine = input_of(group.rank(), salt, type, count);
  Region output(group, output_place, bytes);
  const ReduceOptions options{.op = op, .factor = 0.5};
  if (in_place) {
    output.fill(mine);
    group.all_reduce(output.data(), output.data(), count, type, options);
  } else {
    Region input(group, input_place, bytes);
    input.fill(mine);
    group.all_reduce(input.data(), output.data(), count, type, options);
    EXPECT_TRUE(same(input.content(), mine));
  }
  const Reduction reduction{.type = type, .op = op, .factor = 0.5};
  const Buffer expected = expected_reduction(group.size(), salt, reduction, count);
  const Buffer result = output.content();
  if (same(result, expected)) return;
  const auto wrong = std::mismatch(result.begin(), result.end(), expected.begin()).first;
  ADD_FAILURE() << "first difference at byte " << wrong - result.begin();
}

TEST_P(GroupTest, AllReduceEverySizeEveryPlace) {
  for (const int ranks : {1, 2, 3}) {
    if (kSanitized && ranks == 2) continue;
    RankGroup(ranks, GetParam()).run([](Rank& r) {
      const auto group = make_group(r);
      std::uint64_t salt = 1;
      for (const std::size_t bytes : byte_sizes(r.size())) {
        // Places by rank: all shared, all private, and mixed in both ways.
        for (const int mix : {0, 1, 2, 3}) {
          const bool odd = r.id() % 2 == 1;
          const Place input = mix == 0 || (mix == 2 && odd) ? Place::kShared : Place::kPrivate;
          const Place output = mix == 0 || (mix == 3 && odd) ? Place::kShared : Place::kPrivate;
          check_all_reduce(*group, input, output, mix % 2 == 1, DataType::kF32, ReduceOp::kSum,
                           bytes / 4, ++salt);
        }
      }
      group->barrier();
    });
  }
}

TEST_P(GroupTest, AllReduceEveryTypeAndOperation) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    std::uint64_t salt = 100;
    for (int t = 0; t < kDataTypes; ++t) {
      for (int o = 0; o < kReduceOps; ++o) {
        const auto type = static_cast<DataType>(t);
        const auto op = static_cast<ReduceOp>(o);
        if (!reference::has_meaning(type, op)) {
          std::byte nothing[16];
          EXPECT_THAT(error_of([&] { group->all_reduce(nothing, nothing, 1, type, {.op = op}); }),
                      HasSubstr(std::string(to_string(type))));
          continue;
        }
        // Inline, and just beyond what goes through the slots (which takes minutes when sanitized:
        // there one operation of each type must do).
        check_all_reduce(*group, Place::kPrivate, Place::kPrivate, true, type, op, 1, ++salt);
        if (kSanitized && op != ReduceOp::kSum) continue;
        const std::size_t count = Layout(r.size()).eager_bytes() / size_of(type) + 7;
        for (const Place place : {Place::kShared, Place::kPrivate}) {
          check_all_reduce(*group, place, place, place == Place::kShared, type, op, count, ++salt);
        }
      }
    }
  });
}

TEST_P(GroupTest, ManyRanks) {
  for (const int ranks : {8, 9}) {
    if (GetParam() == RankMode::kProcesses && ranks > 8) continue;
    RankGroup(ranks, GetParam()).run([](Rank& r) {
      const auto group = make_group(r);
      for (const std::size_t count : {std::size_t{1}, std::size_t{5'003}, std::size_t{100'003}}) {
        check_all_reduce(*group, Place::kPrivate, Place::kPrivate, false, DataType::kF32,
                         ReduceOp::kAvg, count, count);
        check_all_reduce(*group, Place::kShared, Place::kShared, true, DataType::kBF16,
                         ReduceOp::kSum, count, count + 1);
      }
    });
  }
}

// The same bits from every path, every number of threads, and on every rank.
TEST_P(GroupTest, BitsDoNotDependOnPathOrThreads) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    constexpr std::size_t kCount = 700'001;
    const Buffer mine = input_of(r.id(), 7, DataType::kF32, kCount);
    std::vector<Buffer> results;
    for (int threads = 1; threads <= 4; ++threads) {
      const auto group = make_group(r, concat("threads", threads), {.threads = threads});
      for (const Place place : {Place::kShared, Place::kPrivate}) {
        Region region(*group, place, kCount * 4, 4);
        region.fill(mine);
        group->all_reduce(region.data(), region.data(), kCount, DataType::kF32);
        results.push_back(region.content());
      }
    }
    for (const auto& result : results) EXPECT_TRUE(same(result, results.front()));
    EXPECT_TRUE(results.front() ==
                expected_reduction(r.size(), 7, {.type = DataType::kF32}, kCount));
  });
}

TEST_P(GroupTest, Broadcast) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    for (int root = 0; root < r.size(); root += kSanitized ? 3 : 1) {
      for (const std::size_t bytes : byte_sizes(r.size())) {
        for (const int mix : {0, 1, 2}) {
          const Place place =
              mix == 0 || (mix == 2 && r.id() % 2 == 0) ? Place::kShared : Place::kPrivate;
          const Buffer sent = input_of(root, bytes, DataType::kU8, bytes);
          Region region(*group, place, bytes);
          if (r.id() == root) region.fill(sent);
          if (mix == 1 && r.id() == root) {
            Region apart(*group, place, bytes);
            group->broadcast(region.data(), apart.data(), bytes, DataType::kU8, root);
            EXPECT_TRUE(same(apart.content(), sent));
          } else {
            group->broadcast(region.data(), region.data(), bytes, DataType::kU8, root);
          }
          EXPECT_TRUE(same(region.content(), sent)) << "root " << root << " bytes " << bytes;
        }
      }
    }
  });
}

TEST_P(GroupTest, BarrierHoldsEveryoneBack) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    for (int i = 0; i < 200; ++i) {
      const std::string key = concat("round", i);
      r.store()->add(key, 1);
      group->barrier();
      if (i % 20 == r.id()) {
        EXPECT_EQ(r.store()->get(key), "4");
      }
    }
  });
}

TEST_P(GroupTest, AsynchronousOperationsKeepTheirOrder) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    constexpr int kOperations = 1000;
    std::vector<float> values(kOperations);
    std::vector<Work> works;
    std::atomic<int> finished{0};
    std::atomic<bool> in_order{true};
    for (int i = 0; i < kOperations; ++i) {
      values[static_cast<std::size_t>(i)] = static_cast<float>(r.id() + i);
      float* value = &values[static_cast<std::size_t>(i)];
      works.push_back(group->start(group->calls().all_reduce(value, value, 1, DataType::kF32),
                                   [&, i](const std::exception_ptr& error) {
                                     EXPECT_FALSE(error);
                                     if (finished.fetch_add(1) != i) in_order = false;
                                   }));
    }
    works[kOperations / 2].wait();
    EXPECT_TRUE(works[kOperations / 2].done());
    group->barrier();  // a synchronous call comes after all that were issued before
    EXPECT_EQ(finished.load(), kOperations);
    EXPECT_TRUE(in_order.load());
    for (int i = 0; i < kOperations; ++i) {
      EXPECT_EQ(values[static_cast<std::size_t>(i)], static_cast<float>(3 * i + 3));
      EXPECT_EQ(works[static_cast<std::size_t>(i)].number(), static_cast<std::uint64_t>(i + 1));
    }
  });
}

// As PowerSGD does: what a callback asks for runs inside it, after what was issued before.
TEST_P(GroupTest, ACallbackMayWaitForLaterOperations) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    std::vector<float> sums(4, 1.0F);
    const auto sum = [&](std::size_t at) {
      group->all_reduce(&sums[at], &sums[at], 1, DataType::kF32);
    };
    std::promise<void> called;
    auto first =
        group->start(group->calls().all_reduce(sums.data(), sums.data(), 1, DataType::kF32),
                     [&](const std::exception_ptr&) {
                       auto inner = group->start(
                           group->calls().all_reduce(&sums[2], &sums[2], 1, DataType::kF32),
                           [&](const std::exception_ptr&) { sum(3); });
                       EXPECT_TRUE(inner.wait(std::chrono::minutes(1)));
                       called.set_value();
                     });
    auto second = group->start(group->calls().all_reduce(&sums[1], &sums[1], 1, DataType::kF32));
    first.wait();
    second.wait();
    // All is issued: what comes next has the same number on every rank.
    ASSERT_EQ(called.get_future().wait_for(r.deadline().remaining()), std::future_status::ready);
    group->barrier();
    EXPECT_EQ(sums, std::vector<float>(4, 3.0F));
  });
}

// Each callback issues the next operation: that must not take more and more of the stack.
TEST_P(GroupTest, CallbacksThatGoOnAndOn) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    constexpr int kOperations = 20'000;
    float value = 1;
    int done = 0;
    std::promise<void> last;
    std::function<void()> issue = [&] {
      value = 1;
      static_cast<void>(group->start(group->calls().all_reduce(&value, &value, 1, DataType::kF32),
                                     [&](const std::exception_ptr& error) {
                                       EXPECT_FALSE(error);
                                       EXPECT_EQ(value, 2);
                                       if (++done < kOperations) return issue();
                                       last.set_value();
                                     }));
    };
    issue();
    ASSERT_EQ(last.get_future().wait_for(r.deadline().remaining()), std::future_status::ready);
    group->barrier();
    EXPECT_EQ(done, kOperations);
  });
}

// As torch's PowerSGD: many operations are under way when the first callback issues one more and
// waits for it by a future, which is set by a callback.
TEST_P(GroupTest, CallbacksOfManyOperationsWaitByFutures) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    constexpr int kOperations = 40;
    std::vector<float> first(kOperations, 1), second(kOperations, 10);
    std::vector<std::promise<void>> outer(kOperations), inner(kOperations);
    std::vector<Work> works;
    std::promise<void> all_issued;
    const auto go = all_issued.get_future().share();
    for (std::size_t i = 0; i < kOperations; ++i) {
      works.push_back(group->start(
          group->calls().all_reduce(&first[i], &first[i], 1, DataType::kF32),
          [&, i](const std::exception_ptr& error) {
            EXPECT_FALSE(error);
            if (i == 0) go.wait();  // or ranks would issue in different orders
            auto more =
                group->start(group->calls().all_reduce(&second[i], &second[i], 1, DataType::kF32),
                             [&, i](const std::exception_ptr& failed) {
                               EXPECT_FALSE(failed);
                               inner[i].set_value();
                             });
            inner[i].get_future().wait();
            EXPECT_EQ(second[i], 20);
            outer[i].set_value();
          }));
    }
    all_issued.set_value();
    for (auto& each : outer) each.get_future().wait();
    EXPECT_EQ(first, std::vector<float>(kOperations, 2));
    group->barrier();
  });
}

TEST_P(GroupTest, WaitingWithALimitDoesNotEndTheOperation) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    float value = 1;
    if (r.id() == 0) {
      auto work = group->start(group->calls().all_reduce(&value, &value, 1, DataType::kF32));
      EXPECT_FALSE(work.wait(std::chrono::milliseconds(20)));
      EXPECT_FALSE(work.done());
      r.store()->set("late", "");
      work.wait();
    } else {
      r.store()->get("late");
      group->all_reduce(&value, &value, 1, DataType::kF32);
    }
    EXPECT_EQ(value, 2);
  });
}

TEST_P(GroupTest, GroupsAreIndependent) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    std::vector<std::jthread> threads;
    for (int g = 0; g < 3; ++g) {
      threads.emplace_back([&r, g] {
        const auto group = make_group(r, concat("group", g));
        for (int i = 0; i < 100; ++i) {
          const std::size_t count = i % 10 == 0 ? 50'000 : 3;
          check_all_reduce(*group, Place::kPrivate, Place::kPrivate, true, DataType::kI32,
                           ReduceOp::kSum, count,
                           static_cast<std::uint64_t>(g) * 1000 + static_cast<std::uint64_t>(i));
        }
      });
    }
  });
}

TEST_P(GroupTest, OneGroupFromSeveralThreads) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    // Equal calls: whichever thread is first, the ranks agree.
    std::vector<std::jthread> threads;
    std::atomic<int> sum{0};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 100; ++i) {
          float value = 1;
          group->all_reduce(&value, &value, 1, DataType::kF32);
          sum += static_cast<int>(value);
        }
      });
    }
    threads.clear();
    EXPECT_EQ(sum.load(), 800);
  });
}

// Each field of the fingerprint, on each rank: the same text everywhere, and the group goes on.
TEST_P(GroupTest, RanksThatDisagreeAreTold) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    std::vector<float> data(100'000, 1);
    struct Case {
      std::string odd_text;
      std::function<void()> odd;
    };
    const auto reduce = [&](std::size_t count, DataType type, ReduceOptions options) {
      group->all_reduce(data.data(), data.data(), count, type, options);
    };
    const std::vector<Case> cases = {
        {"all_reduce(9 x f32, sum)", [&] { reduce(9, DataType::kF32, {}); }},
        {"all_reduce(99999 x f32, sum)", [&] { reduce(99'999, DataType::kF32, {}); }},
        {"all_reduce(8 x i32, sum)", [&] { reduce(8, DataType::kI32, {}); }},
        {"all_reduce(8 x f32, max)", [&] { reduce(8, DataType::kF32, {.op = ReduceOp::kMax}); }},
        {"tag 5", [&] { reduce(8, DataType::kF32, {.tag = 5}); }},
        {"barrier()", [&] { group->barrier(); }},
        {"broadcast(8 x f32, root 1)",
         [&] { group->broadcast(data.data(), data.data(), 8, DataType::kF32, 1); }},
    };
    for (int odd_rank = 0; odd_rank < r.size(); ++odd_rank) {
      for (const auto& one : cases) {
        const std::string text = error_of([&] {
          if (r.id() == odd_rank) {
            one.odd();
          } else {
            reduce(8, DataType::kF32, {});
          }
        });
        EXPECT_THAT(text, HasSubstr("invalid argument"));
        EXPECT_THAT(text, HasSubstr("all_reduce(8 x f32, sum"));
        EXPECT_THAT(text, HasSubstr(one.odd_text));
        EXPECT_THAT(text, HasSubstr("rank 0 called"));
        EXPECT_THAT(text, HasSubstr(concat("rank ", std::max(odd_rank, 1), " called")));
        EXPECT_EQ(data, std::vector<float>(100'000, 1));
      }
    }
    EXPECT_FALSE(group->broken());
    group->all_reduce(data.data(), data.data(), data.size(), DataType::kF32);
    EXPECT_EQ(data, std::vector<float>(100'000, 3));
    const std::string roots =
        error_of([&] { group->broadcast(data.data(), data.data(), 1, DataType::kF32, r.id()); });
    EXPECT_THAT(roots, HasSubstr("root 0"));
    EXPECT_THAT(roots, HasSubstr("root 1"));
  });
}

TEST_P(GroupTest, BadArgumentsTakeNoNumber) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    float data[4] = {};
    if (r.id() == 0) {
      EXPECT_THAT(error_of([&] { group->broadcast(data, data, 1, DataType::kF32, 2); }),
                  HasSubstr("no root 2"));
      EXPECT_THAT(error_of([&] { group->all_reduce(nullptr, data, 1, DataType::kF32); }),
                  HasSubstr("input is null"));
      EXPECT_THAT(error_of([&] { group->all_reduce(data, nullptr, 1, DataType::kF32); }),
                  HasSubstr("output is null"));
      EXPECT_THAT(error_of([&] { group->all_reduce(data, data + 1, 3, DataType::kF32); }),
                  HasSubstr("overlap"));
      EXPECT_THAT(error_of([&] { group->all_reduce(data, data, SIZE_MAX / 2, DataType::kF32); }),
                  HasSubstr("too large"));
      EXPECT_THAT(error_of([&] {
                    group->all_reduce(data, data, 1, DataType::kF32, {.op = ReduceOp::kBand});
                  }),
                  HasSubstr("f32"));
    }
    group->barrier();
    EXPECT_EQ(group->last_completed(), 1u);
    group->all_reduce(nullptr, nullptr, 0, DataType::kF32);
    EXPECT_EQ(group->last_completed(), 2u);
  });
}

TEST_P(GroupTest, MakingAGroupNamesWhoIsMissing) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto late = [&] {
      Group::create(with_prefix(r.store(), "late"), r.id(), 4,
                    {.name = "late", .timeout = std::chrono::milliseconds(300)});
    };
    const std::string text = error_of(late);
    EXPECT_THAT(text, HasSubstr("timeout"));
    EXPECT_THAT(text, HasSubstr("\"late\""));
    EXPECT_THAT(text, HasSubstr("2, 3"));
    EXPECT_THAT(error_of([&] { Group::create(r.store(), 5, 2); }), HasSubstr("rank 5 of 2"));
    EXPECT_THAT(error_of([&] { Group::create(r.store(), 0, 65); }), HasSubstr("65 ranks"));
    EXPECT_THAT(error_of([&] { Group::create(nullptr, 0, 1); }), HasSubstr("no store"));
    EXPECT_THAT(error_of([&] { Group::create(r.store(), 0, 1, {.threads = 0}); }),
                HasSubstr("0 threads"));
  });
}

TEST_P(GroupTest, MemoryBeyondTheLimitIsRefusedAndTheGroupGoesOn) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    group->barrier();
    shm::Fabric::instance().set_headroom_for_testing([] { return std::uint64_t{1} << 20; });
    EXPECT_THAT(error_of([&] { group->allocate(std::size_t{256} << 20); }),
                HasSubstr("out of resources"));
    r.barrier();
    shm::Fabric::instance().set_headroom_for_testing(nullptr);
    r.barrier();
    check_all_reduce(*group, Place::kShared, Place::kShared, true, DataType::kF32, ReduceOp::kSum,
                     100'000, 1);
  });
}

// The operation that cannot get its memory fails on every rank, not only on the one that makes it.
TEST_P(GroupTest, AGroupWithoutMemoryFailsOnAllRanks) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    shm::Fabric::instance().trim();
    shm::Fabric::instance().set_headroom_for_testing([] { return std::uint64_t{4096}; });
    r.barrier();
    EXPECT_THAT(error_of([&] { make_group(r, "poor"); }), HasSubstr("out of resources"));
    r.barrier();
    shm::Fabric::instance().set_headroom_for_testing(nullptr);
  });
}

}  // namespace
}  // namespace convoy::coll::test
