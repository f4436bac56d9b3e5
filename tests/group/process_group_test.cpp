// ProcessGroup over our backend, and over somebody else's. Names in comments are PyTorch's tests.
#include "convoy/group.h"

#include <gmock/gmock.h>

#include <future>
#include <thread>

#include "base/concat.h"
#include "convoy/error.h"
#include "group/fake_backend.h"
#include "group/support.h"
#include "tensor/memory.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Whose backend is under the group.
enum class Whose { kOurs, kForeign };
std::string name_of(Whose whose) { return whose == Whose::kOurs ? "Convoy" : "Foreign"; }
void PrintTo(Whose whose, std::ostream* out) { *out << name_of(whose); }

ProcessGroup make_group(const Rank& r, Whose whose, const std::string& name = "world") {
  auto backend = make_backend(r, name);
  const ProcessGroup::Adopted more{.name = name, .store = with_prefix(r.store(), name + "/groups")};
  if (whose == Whose::kOurs) return ProcessGroup::from(backend, more);
  return ProcessGroup::from(c10::make_intrusive<FakeBackend>(backend), more);
}

class ProcessGroupTest : public testing::TestWithParam<std::tuple<RankMode, Whose>> {
 protected:
  static RankMode mode() { return std::get<0>(GetParam()); }
  static Whose whose() { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Modes, ProcessGroupTest,
                         testing::Combine(rank_modes(),
                                          testing::Values(Whose::kOurs, Whose::kForeign)),
                         [](const auto& instance) {
                           return name_of(std::get<1>(instance.param)) +
                                  to_name(std::get<0>(instance.param));
                         });

// What both kinds of backend can do.
TEST_P(ProcessGroupTest, Basics) {
  RankGroup(3, mode()).run([whose = whose()](Rank& r) {
    const auto group = make_group(r, whose);
    EXPECT_EQ(group.rank(), r.id());
    EXPECT_EQ(group.size(), 3);
    EXPECT_EQ(group.name(), "world");
    EXPECT_EQ(group.backend_name(), whose == Whose::kForeign     ? "fake"
                                    : r.mode() == RankMode::kMpi ? "mpi"
                                                                 : "convoy");
    EXPECT_EQ(group, ProcessGroup(group));
    EXPECT_EQ(group.hosts(), std::vector<std::string>(3, group.hosts()[0]));
    EXPECT_EQ(group.local_rank(), r.id());
    EXPECT_EQ(group.local_size(), 3);

    auto tensor = full(r.id() + 1, {4, 5});
    group.all_reduce(tensor);
    expect_equal(tensor, full(6, {4, 5}));
    group.all_reduce(tensor.fill_(r.id()), {.op = ReduceOp::kMax});
    expect_equal(tensor, full(2, {4, 5}));
    group.all_reduce(tensor.fill_(r.id()), {.op = ReduceOp::kPremulSum, .factor = 2});
    expect_equal(tensor, full(6, {4, 5}));
    const auto work =
        group.all_reduce_async(tensor.fill_(1), {.op = ReduceOp::kAvg, .timeout = 9s});
    work.wait(20s);
    EXPECT_TRUE(work.done());
    EXPECT_EQ(work.error(), nullptr);
    expect_equal(tensor, full(1, {4, 5}));
    tensor.fill_(r.id());
    group.broadcast(tensor, {.root = 2});
    expect_equal(tensor, full(2, {4, 5}));
    expect_equal(group.all_gather(full(r.id(), {2})),
                 at::tensor({0, 0, 1, 1, 2, 2}, at::kFloat).view({3, 2}));
    Tensors list = {full(0, {2}), full(0, {2}), full(0, {2})};
    group.all_gather(list, full(r.id(), {2}));
    expect_equal(list[2], full(2, {2}));
    group.gather(r.id() == 1 ? list : Tensors(), full(10 + r.id(), {2}), {.root = 1});
    if (r.id() == 1) expect_equal(list[0], full(10, {2}));
    auto part = full(0, {2});
    group.scatter(part, r.id() == 0 ? Tensors{full(5, {2}), full(6, {2}), full(7, {2})} : Tensors(),
                  {.root = 0});
    expect_equal(part, full(5 + r.id(), {2}));
    group.barrier({.timeout = 20s});
    group.barrier({.timeout = Deadline::after(20s)});
    group.barrier({.timeout = Deadline::never()});
    EXPECT_THAT(text_of([&] { group.barrier({.timeout = 0s}); }), HasSubstr("must be > 0 ms"));
    EXPECT_THAT(text_of([&] { group.recv(tensor, 0, {.timeout = -5ms}); }), HasSubstr("got -5"));
    group.barrier_async().wait();
    group.set_timeout(25s);
    EXPECT_EQ(group.timeout(), 25s);
  });
}

TEST_P(ProcessGroupTest, MessagesAndBatches) {
  RankGroup(3, mode()).run([whose = whose()](Rank& r) {
    const auto group = make_group(r, whose);
    const int next = (r.id() + 1) % 3, before = (r.id() + 2) % 3;
    // test_batch_isend_irecv_gloo(_tags): all pairs, receives first, tags crossed.
    auto a = full(0, {3}), b = full(0, {4, 2}).t(), c = full(0, {1});
    group.batch()
        .recv(b, before, 2)
        .recv(a, before, 1)
        .send(full(10 + r.id(), {3}), next, 1)
        .send(full(20 + r.id(), {2, 4}), next, 2)
        .send(full(r.id(), {1}), r.id(), 3)
        .recv(c, r.id(), 3)
        .run();
    expect_equal(a, full(10 + before, {3}));
    expect_equal(b, full(20 + before, {2, 4}));
    expect_equal(c, full(r.id(), {1}));
    group.batch().run();  // nothing to do
    // From several threads at once.
    std::vector<std::jthread> threads;
    for (int tag = 10; tag < 14; ++tag) {
      threads.emplace_back([&group, &r, next, before, tag] {
        for (int round = 0; round < 20; ++round) {
          auto got = full(0, {2});
          group.batch().recv(got, before, tag).send(full(r.id() + tag, {2}), next, tag).run();
          expect_equal(got, full(before + tag, {2}));
        }
      });
    }
    threads.clear();
    EXPECT_THAT(text_of([&] { group.batch().send(a, 3).run(); }), HasSubstr("there is no rank 3"));
    EXPECT_THAT(text_of([&] { group.batch().send({}, 1).run(); }), HasSubstr("undefined"));

    // test_send_recv: sizes by rank, and from whoever sends.
    if (r.id() == 0) {
      int sum = 0;
      for (int i = 0; i < 2; ++i) {
        auto any = full(0, {2});
        const int source = group.recv(any);
        expect_equal(any, full(source, {2}));
        sum += source;
      }
      EXPECT_EQ(sum, 3);
    } else {
      const auto sent = group.send_async(full(r.id(), {2}), 0);
      sent.wait();
    }
    if (r.id() == 1) {
      auto named = full(0, {5});
      EXPECT_EQ(group.recv(named, 2, {.tag = 9, .timeout = 20s}), 2);
      expect_equal(named, full(7, {5}));
    }
    if (r.id() == 2) group.send(full(7, {5}), 1, {.tag = 9, .timeout = 20s});
  });
}

// test_gather_object_subgroup, test_scatter_object_list, test_send_recv_object_list
TEST_P(ProcessGroupTest, Objects) {
  RankGroup(3, mode()).run([whose = whose()](Rank& r) {
    const auto group = make_group(r, whose);
    const auto text_by = [](int rank) {
      return std::string(static_cast<std::size_t>(rank) * 1000, static_cast<char>('a' + rank));
    };
    EXPECT_THAT(group.all_gather_object(text_by(r.id())),
                ElementsAre(text_by(0), text_by(1), text_by(2)));
    const auto gathered = group.gather_object(text_by(r.id()), {.root = 2});
    EXPECT_EQ(gathered.size(), r.id() == 2 ? 3u : 0u);
    if (r.id() == 2) {
      EXPECT_EQ(gathered[1], text_by(1));
    }
    EXPECT_EQ(group.broadcast_object(text_by(r.id()), {.root = 1}), text_by(1));
    EXPECT_EQ(group.broadcast_object(std::string(), {.root = 0}), "");
    using Bytes = std::vector<std::uint8_t>;
    std::vector<Bytes> all;
    if (r.id() == 1) all = {Bytes{1}, Bytes{}, Bytes{3, 0, 3}};
    const auto mine = group.scatter_object(all, {.root = 1});
    EXPECT_EQ(mine, (std::vector<Bytes>{Bytes{1}, Bytes{},
                                        Bytes{3, 0, 3}}[static_cast<std::size_t>(r.id())]));
    // A root without enough: everyone is told.
    EXPECT_THAT(text_of([&] { group.scatter_object(std::vector<std::string>(2), {.root = 0}); }),
                HasSubstr("must pass 3 objects"));
    if (r.id() == 0) {
      group.send_object(std::vector<std::byte>(5, std::byte{7}), 1, {.tag = 4});
      group.send_object(std::string("later"), 1, {.tag = 4});
    }
    if (r.id() == 1) {
      EXPECT_EQ(group.recv_object<std::vector<std::byte>>(kAnySource, {.tag = 4}),
                std::vector<std::byte>(5, std::byte{7}));
      EXPECT_EQ(group.recv_object(0, {.tag = 4}), "later");
    }
    group.barrier();
  });
}

class FullGroupTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, FullGroupTest, rank_modes(), rank_mode_name);

// The other collectives, which only a full backend has.
TEST_P(FullGroupTest, EveryCollective) {
  {
    RankGroup(2, GetParam()).run([](Rank& r) {
      const auto group = make_group(r, Whose::kOurs, concat("every", r.id() < 0));
      auto tensor = full(r.id() + 1, {3});
      group.reduce(tensor, {.root = 1, .op = ReduceOp::kSum});
      expect_equal(tensor, full(r.id() == 1 ? 3 : 1, {3}));
      auto output = full(0, {2});
      group.reduce_scatter(output, {full(1, {2}), full(2, {2})});
      expect_equal(output, full(2 * (r.id() + 1), {2}));
      group.reduce_scatter_single(output, at::arange(4, at::kFloat), {.op = ReduceOp::kAvg});
      expect_equal(output, at::arange(2, at::kFloat) + 2 * r.id());
      auto whole = full(0, {4});
      group.all_gather_single(whole, output);
      expect_equal(whole, at::arange(4, at::kFloat));
      Tensors got = {full(0, {1}), full(0, {1})};
      group.all_to_all(got, {full(10 * r.id(), {1}), full(10 * r.id() + 1, {1})});
      expect_equal(got[1], full(10 + r.id(), {1}));
      // test_all_to_all_single_unequal_split_complex
      auto from = at::complex(at::arange(3, at::kFloat), full(r.id(), {3}));
      auto to = at::zeros({r.id() == 0 ? 2 : 4}, at::kComplexFloat);
      group.all_to_all_single(to, from,
                              {.output_splits = {r.id() + 1, r.id() + 1}, .input_splits = {1, 2}});
      expect_equal(at::real(to).contiguous(), r.id() == 0 ? at::tensor({0, 0}, at::kFloat)
                                                          : at::tensor({1, 2, 1, 2}, at::kFloat));
      Tensors several = {full(1, {2}), full(2, {3})};
      group.all_reduce_coalesced_async(several).wait();
      expect_equal(several[1], full(4, {3}));
      const auto shared = group.allocate({10, 10});
      EXPECT_EQ(is_shared_memory(shared), r.mode() != RankMode::kMpi);
      shared.fill_(1);
      group.all_reduce(shared);
      expect_equal(shared, full(2, {10, 10}));
      group.monitored_barrier({.timeout = 20s});

      // The same, begun and waited for.
      const Work works[] = {
          group.reduce_async(tensor),
          group.broadcast_async(tensor),
          group.all_gather_async(got, full(r.id(), {1})),
          group.all_gather_single_async(whole, output),
          group.reduce_scatter_async(output, {full(1, {2}), full(1, {2})}),
          group.reduce_scatter_single_async(output, full(4, {4})),
          group.all_to_all_async(got, {full(1, {1}), full(2, {1})}),
          group.all_to_all_single_async(whole, full(r.id(), {4})),
          group.scatter_async(output,
                              r.id() == 0 ? Tensors{full(0, {2}), full(1, {2})} : Tensors()),
          group.gather_async(r.id() == 0 ? got : Tensors(), full(r.id(), {1}))};
      for (const auto& work : works) work.wait();
      expect_equal(output, full(r.id(), {2}));
      expect_equal(whole, at::tensor({0, 0, 1, 1}, at::kFloat));
    });
  }
}

// A write of the group is a change to autograd: PyTorch's own groups give wrong gradients here.
TEST(ProcessGroupTest, AutogradSeesTheChange) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, Whose::kOurs);
    auto x = full(2, {3}).requires_grad_();
    auto y = x * 1;
    const auto z = y * y;  // saves y
    group.all_reduce(y.detach());
    EXPECT_THAT(text_of([&] { z.sum().backward(); }),
                HasSubstr("modified by an inplace operation"));
    const c10::InferenceMode inference;
    group.all_reduce(full(1, {2}));  // has no counter to move
  });
}

TEST(ProcessGroupTest, WorkOfAForeignBackend) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto fake = c10::make_intrusive<FakeBackend>(make_backend(r));
    const auto group = ProcessGroup::from(fake);
    EXPECT_EQ(group.name(), "fake");
    fake->hold();
    auto tensor = full(1, {2});
    const auto work = group.all_reduce_async(tensor);
    EXPECT_FALSE(work.done());
    EXPECT_THROW(work.wait(1ms), std::exception);
    EXPECT_THAT(text_of([&] { work.wait(0ms); }), HasSubstr("goes on"));
    fake->release();
    work.wait();
    expect_equal(tensor, full(2, {2}));
    // An error of one operation is that operation's.
    EXPECT_THAT(text_of([&] { group.all_reduce(full(1, {2 + r.id()})); }),
                HasSubstr("ranks disagree"));
    group.barrier();
    EXPECT_THAT(text_of([&] { group.split({0}); }), HasSubstr("has no store"));
    EXPECT_FALSE(is_shared_memory(group.allocate({3})));
    EXPECT_THAT(text_of([&] { ProcessGroup().rank(); }), HasSubstr("this ProcessGroup is empty"));
    EXPECT_THAT(text_of([&] { ProcessGroup::from(nullptr); }), HasSubstr("the backend is nullptr"));
  });
}

// Backends that compare shapes get tensors of one dimension, whatever the caller's are.
TEST(ProcessGroupTest, ShapesOfAForeignBackend) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, Whose::kForeign);
    for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {3}, {2, 3}, {0, 3}}) {
      SCOPED_TRACE(testing::PrintToString(sizes));
      const auto mine = full(r.id() + 1, sizes);
      const auto both = at::stack({full(1, sizes), full(2, sizes)});
      expect_equal(group.all_gather(mine), both);
      auto all = at::empty_like(both);
      group.all_gather_single_async(all, mine).wait();
      expect_equal(all, both);
      auto flat = at::empty({both.numel()});
      group.all_gather_single(flat, mine);
      expect_equal(flat, both.flatten());
      auto part = at::empty(sizes);
      group.reduce_scatter_single(part, both * (r.id() + 1));
      expect_equal(part, full(3 * (r.id() + 1), sizes));
      group.reduce_scatter_single_async(part, both.flatten()).wait();
      expect_equal(part, full(2 * (r.id() + 1), sizes));
    }
  });
}

// test_get_future, test_allreduce_coalesced_async
TEST(ProcessGroupTest, ThenAndFutures) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, Whose::kOurs);
    auto tensor = full(r.id() + 1, {1000});
    const auto work = group.all_reduce_async(tensor);
    auto told = std::make_shared<std::promise<std::exception_ptr>>();
    work.then([told](const std::exception_ptr& error) { told->set_value(error); });
    EXPECT_EQ(told->get_future().get(), nullptr);
    expect_equal(work.result()[0], full(3, {1000}));
    const auto doubled = group.all_reduce_async(full(1, {2}))
                             .c10d()
                             ->getFuture()
                             ->then(
                                 [](c10::ivalue::Future& done) {
                                   return c10::IValue(done.value().toTensorVector()[0] * 2);
                                 },
                                 c10::TensorType::get());
    doubled->wait();
    expect_equal(doubled->value().toTensor(), full(4, {2}));
    const auto failed = group.all_reduce_async(full(1, {2 + r.id()}));
    auto error = std::make_shared<std::promise<std::exception_ptr>>();
    failed.then([error](const std::exception_ptr& what) { error->set_value(what); });
    EXPECT_NE(error->get_future().get(), nullptr);
    EXPECT_NE(failed.error(), nullptr);
    Work().wait();
    Work().then([](const std::exception_ptr& what) { EXPECT_EQ(what, nullptr); });
    EXPECT_TRUE(Work().done());
  });
}

class SplitTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, SplitTest, rank_modes(), rank_mode_name);

TEST_P(SplitTest, ByRanksAndByColour) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto world = make_group(r, Whose::kOurs);
    // Only members call it; the same subset again is another group; the order is the caller's.
    if (r.id() != 2) {
      for (int again = 0; again < 2; ++again) {
        const auto three = world.split({3, 0, 1}, {.timeout = 25s});
        ASSERT_TRUE(three);
        EXPECT_EQ(three->rank(), r.id() == 3 ? 0 : r.id() + 1);
        EXPECT_EQ(three->timeout(), 25s);
        EXPECT_EQ(three->name(), again ? "world/3,0,1#1" : "world/3,0,1");
        auto tensor = full(r.id(), {3});
        three->all_reduce(tensor);
        expect_equal(tensor, full(4, {3}));
        // Of a part, a part.
        const auto two = three->split({1, 2}, {.name = "pair"});
        EXPECT_EQ(two.has_value(), r.id() != 3);
        if (two) {
          EXPECT_THAT(two->all_gather_object(std::to_string(r.id())), ElementsAre("0", "1"));
        }
      }
    }
    EXPECT_EQ(r.id() == 2 ? world.split({0, 1}).has_value() : false, false);
    // Colours of any numbers; keys turn the order round.
    const auto half = world.split_by(r.id() % 2 ? -7 : 1000, -r.id());
    EXPECT_EQ(half.size(), 2);
    EXPECT_EQ(half.rank(), r.id() < 2 ? 1 : 0);
    auto tensor = full(r.id(), {3});
    half.all_reduce(tensor);
    expect_equal(tensor, full(r.id() % 2 ? 4 : 2, {3}));
    const auto all = world.split_by(0);
    EXPECT_EQ(all.rank(), r.id());
    const auto refused = [&](const char* part, const std::vector<int>& ranks) {
      EXPECT_THAT(text_of([&] { world.split(ranks); }), HasSubstr(part));
    };
    refused("is empty", {});
    refused("rank 1 is in the list twice", {1, 1});
    refused("there is no rank 4", {0, 4});
    refused("there is no rank -1", {-1});
    world.barrier();
  });
}

// LargeCommTest.test_new_group_local_sync: groups of groups that overlap, while others do theirs.
TEST_P(SplitTest, ChildrenOutliveParentsAndWorkAtOnce) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const int half = r.id() / 2, side = r.id() % 2;
    ProcessGroup row, column;
    {
      const auto world = make_group(r, Whose::kOurs);
      row = world.split_by(half);
      column = world.split_by(side);
    }
    for (int i = 0; i < 20; ++i) {
      auto a = full(r.id(), {1000}), b = full(r.id(), {1000});
      const auto first = row.all_reduce_async(a);
      const auto second = column.all_reduce_async(b);
      second.wait();
      first.wait();
      expect_equal(a, full(4 * half + 1, {1000}));
      expect_equal(b, full(2 * side + 2, {1000}));
    }
  });
}

// test_barrier_timeout_global, test_monitored_barrier_gloo_*
TEST(ProcessGroupFaultTest, TimeoutsAreNotEarlyAndNameTheMissing) {
  RankGroup(3, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, Whose::kOurs);
    if (r.id() == 0) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THAT(text_of([&] { group.barrier({.timeout = 100ms}); }),
                  AllOf(HasSubstr(" Timed out "), HasSubstr("rank 1"), HasSubstr("rank 2")));
      EXPECT_GE(std::chrono::steady_clock::now() - start, 100ms);
    }
    r.barrier();
    const auto other = make_group(r, Whose::kOurs, "monitored");
    if (r.id() == 0) {
      EXPECT_THAT(text_of([&] { other.monitored_barrier({.timeout = 50ms}); }),
                  HasSubstr("Ranks 1, 2 failed to pass monitoredBarrier in 50 ms"));
    }
    r.barrier();
    const auto third = make_group(r, Whose::kOurs, "third");
    if (r.id() == 0) {
      EXPECT_THAT(text_of([&] { third.monitored_barrier({.timeout = 3s}); }),
                  HasSubstr("Ranks 2 failed to pass monitoredBarrier"));
    } else if (r.id() == 1) {
      EXPECT_THAT(text_of([&] { third.monitored_barrier({.timeout = 3s}); }),
                  HasSubstr("Rank 1 successfully reached monitoredBarrier, but received errors "
                            "while waiting for send/recv from rank 0"));
    }
    r.barrier();
  });
}

TEST(ProcessGroupFaultTest, AbortAndShutdown) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, Whose::kOurs);
    if (r.id() == 0) {
      const auto pending = group.all_reduce_async(full(1, {2}));
      group.abort();
      EXPECT_THROW(pending.wait(), Error);
      EXPECT_NE(pending.error(), nullptr);
    } else {
      EXPECT_THAT(text_of([&] {
                    for (;;) group.barrier();
                  }),
                  HasSubstr("rank 0"));
    }
    group.shutdown();
    EXPECT_THROW(group.barrier(), Error);
    r.barrier();
  });
}

}  // namespace
}  // namespace convoy::test
