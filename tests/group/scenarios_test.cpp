// PyTorch's own scenarios for a backend that backend_test.cpp leaves out, by the names of its
// tests.
#include <ATen/record_function.h>
#include <gmock/gmock.h>

#include <future>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "base/guarded.h"
#include "convoy/c10d_store.h"
#include "convoy/error.h"
#include "group/support.h"
#include "os/file.h"
#include "support/leak_oracle.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

c10::intrusive_ptr<c10d::ProcessGroup> torch_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const Rank& r) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, r.id(), r.size());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<ConvoyBackend>(store, r.id(), r.size()));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName("pg");
  return group;
}

class ScenarioTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, ScenarioTest, rank_modes(), rank_mode_name);

// test_allreduce_stress
TEST_P(ScenarioTest, AThousandOutstandingAllReduces) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    std::vector<Tensors> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 1000; ++i) tensors.push_back({full(i + r.id(), {1 + i % 7})});
    for (auto& one : tensors) works.push_back(backend->allreduce(one));
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i]->wait();
      expect_equal(tensors[i][0], full(3 * static_cast<double>(i) + 3, tensors[i][0].sizes()));
    }
  });
}

// test_empty_tensors: of every operation; the number goes on.
TEST_P(ScenarioTest, NothingToMove) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    at::Tensor none = at::empty({0}), other = at::empty({0, 3});
    Tensors one = {none}, two = {none, at::empty({0})};
    std::vector<Tensors> lists = {{at::empty({0}), at::empty({0})}};
    std::vector<Tensors> roots = r.id() == 0 ? lists : std::vector<Tensors>();
    std::vector<int64_t> splits;
    backend->allreduce(one)->wait();
    backend->broadcast(one)->wait();
    backend->reduce(one)->wait();
    backend->allgather(lists, one)->wait();
    backend->gather(roots, one)->wait();
    backend->scatter(one, roots)->wait();
    backend->reduce_scatter(one, lists)->wait();
    backend->_allgather_base(other, none)->wait();
    backend->_reduce_scatter_base(none, other)->wait();
    backend->alltoall_base(none, none, splits, splits)->wait();
    backend->alltoall(two, two)->wait();
    backend->allreduce_coalesced(two)->wait();
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 12u);
    const auto sent = backend->send(one, 1 - r.id(), 0);
    backend->recv(one, 1 - r.id(), 0)->wait();
    sent->wait();
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 12u);  // messages are apart
    // What is refused takes no number.
    Tensors floats = {full(1, {2})};
    EXPECT_THROW(backend->allreduce(floats, {.reduceOp = c10d::ReduceOp::BAND}), Error);
    EXPECT_THROW(backend->allreduce(floats, {.reduceOp = c10d::ReduceOp::BAND, .asyncOp = false}),
                 Error);
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 12u);
    backend->waitForPendingWorks();
  });
}

// Types that Gloo refuses.
TEST_P(ScenarioTest, TypesThatGlooDoesNotHave) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    for (const auto type : {at::kShort, at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn,
                            at::kFloat8_e5m2}) {
      Tensors tensors = {full(r.id() + 1, {5}).to(type)};
      backend->allreduce(tensors)->wait();
      expect_equal(tensors[0].to(at::kFloat), full(3, {5}));
      std::vector<Tensors> lists = {{at::empty({5}, type), at::empty({5}, type)}};
      Tensors mine = {full(r.id() + 1, {5}).to(type)};
      backend->allgather(lists, mine)->wait();
      expect_equal(lists[0][1].to(at::kFloat), full(2, {5}));
    }
  });
}

// Inference tensors, whichever thread puts the result in its place.
TEST_P(ScenarioTest, InferenceTensors) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    const c10::InferenceMode inference;
    Tensors strided = {full(r.id() + 1, {4, 5}).t()};
    const auto work = backend->allreduce(strided);
    while (!work->isCompleted()) std::this_thread::yield();  // not run by a waiter
    work->wait();
    expect_equal(strided[0], full(3, {5, 4}));
    Tensors two = {full(1, {2}), full(r.id(), {2})};
    const auto both = backend->allreduce(two);
    while (!both->isCompleted()) std::this_thread::yield();
    both->wait();
    expect_equal(two[1], full(3, {2}));
  });
}

// What could only fail at the end is refused at the beginning.
TEST_P(ScenarioTest, OutputsThatCannotBeWritten) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors expanded = {full(r.id(), {4, 1}).expand({4, 4})};
    EXPECT_THROW(backend->allreduce(expanded), c10::Error);
    EXPECT_THROW(backend->allreduce(expanded, {.asyncOp = false}), c10::Error);
    Tensors inputs = {full(1, {1}), full(1, {1})};
    std::vector<Tensors> wider(2, Tensors(4, at::empty({4})));
    EXPECT_THAT(text_of([&] { backend->allgather(wider, inputs); }),
                HasSubstr("invalid tensor size"));
    EXPECT_THROW(backend->allreduce(inputs, {.timeout = -5ms}), c10::Error);
    EXPECT_THROW(backend->setTimeout(0ms), c10::Error);
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 0u);
    backend->setTimeout(29s);
    EXPECT_EQ(backend->getBackendOptions()->timeout, 29s);
    backend->barrier()->wait();
  });
}

// test_sparse_allreduce_basics, _checks: 1 to 3 sparse dimensions, 0 to 3 dense ones.
TEST_P(ScenarioTest, SparseOfAllShapes) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    for (int64_t sparse = 1; sparse <= 3; ++sparse) {
      for (int64_t dense = 0; dense <= 3; ++dense) {
        const int64_t entries = r.id() + 1;
        const auto indices = at::zeros({sparse, entries}, at::kLong);
        if (entries == 2) indices.select(1, 1).fill_(1);
        std::vector<int64_t> values_sizes(static_cast<std::size_t>(dense) + 1, 2);
        values_sizes[0] = entries;
        const std::vector<int64_t> sizes(static_cast<std::size_t>(sparse + dense), 2);
        Tensors tensors = {at::sparse_coo_tensor(indices, at::ones(values_sizes), sizes)};
        backend->allreduce(tensors)->wait();
        auto expected = at::zeros(sizes);
        auto first = expected, second = expected;
        for (int64_t d = 0; d < sparse; ++d) {
          first = first[0];
          second = second[1];
        }
        first.fill_(2);
        second.fill_(1);
        expect_equal(tensors[0].to_dense(), expected);
      }
    }
    // Several of a call; the numbers of entries differ.
    Tensors two = {at::ones({4}).to_sparse(), full(r.id(), {4}).to_sparse()};
    backend->allreduce(two)->wait();
    for (const auto& one : two) expect_equal(one.to_dense(), full(3, {4}));
    Tensors mixed = {at::ones({2}).to_sparse(), at::ones({2})};
    EXPECT_THAT(text_of([&] { backend->allreduce(mixed); }), HasSubstr("requires sparse"));
    Tensors sizes = {at::ones({2}).to_sparse(), at::ones({3}).to_sparse()};
    EXPECT_THAT(text_of([&] { backend->allreduce(sizes); }), HasSubstr("invalid tensor size"));
    Tensors types = {at::ones({2}).to_sparse(), at::ones({2}, at::kLong).to_sparse()};
    EXPECT_THAT(text_of([&] { backend->allreduce(types); }), HasSubstr("invalid tensor type"));
    // Ranks that disagree are all told, and go on.
    Tensors other = {at::ones({2 + r.id()}).to_sparse()};
    EXPECT_THAT(text_of([&] { backend->allreduce(other); }),
                HasSubstr("Sparse dimensions do not match"));
    Tensors strided = {at::ones({2})};
    EXPECT_THAT(text_of([&] { backend->allreduce_sparse(strided); }), HasSubstr("sparse"));
    backend->barrier()->wait();
  });
}

// test_all_reduce_complex_unsupported_ops, test_all_reduce_sum_complex
TEST_P(ScenarioTest, WhatHasNoMeaningIsRefused) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors complex = {at::complex(full(r.id(), {3}), full(1, {3}))};
    for (const auto op : {c10d::ReduceOp::MIN, c10d::ReduceOp::MAX, c10d::ReduceOp::BAND,
                          c10d::ReduceOp::BOR, c10d::ReduceOp::BXOR}) {
      EXPECT_THROW(backend->allreduce(complex, {.reduceOp = op}), Error);
    }
    backend->allreduce(complex)->wait();
    expect_equal(complex[0], at::complex(full(1, {3}), full(2, {3})));
    Tensors floats = {full(1, {2})};
    EXPECT_THAT(text_of([&] { backend->allreduce(floats, {.reduceOp = c10d::ReduceOp::BXOR}); }),
                AllOf(HasSubstr("bxor"), HasSubstr("f32")));
    Tensors quantized = {at::empty({2}, at::kComplexHalf)};
    EXPECT_THAT(text_of([&] { backend->allreduce(quantized); }), HasSubstr("ComplexHalf"));
    Tensors elsewhere = {at::empty({2}, at::kMeta)};
    EXPECT_THAT(text_of([&] { backend->allreduce(elsewhere); }), HasSubstr("on meta"));
  });
}

// Coalescing blocks: messages as one batch, collectives together, errors before anything is sent.
TEST_P(ScenarioTest, CoalescingBlocks) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    const int other = 1 - r.id();
    Tensors in = {full(0, {4})}, out = {full(r.id(), {4})}, sum = {full(1, {3})};
    backend->startCoalescing();
    const auto received = backend->recv(in, other, 0);  // before the send: only a batch can do that
    backend->send(out, other, 0);
    backend->allreduce(sum, {.asyncOp = false});
    EXPECT_THAT(text_of([&] { received->wait(); }), HasSubstr("end the block first"));
    std::jthread([&] {  // has its own
      EXPECT_THAT(text_of([&] { backend->endCoalescing(); }), HasSubstr("has not begun"));
      backend->startCoalescing();
      backend->endCoalescing()->wait();
    })
        .join();
    const auto work = backend->endCoalescing();
    work->wait();
    received->wait();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->result().size(), 3u);
    const auto future = work->getFuture();
    future->wait();
    EXPECT_EQ(future->value().toTensorVector().size(), 3u);
    expect_equal(in[0], full(other, {4}));
    expect_equal(sum[0], full(2, {3}));
    backend->startCoalescing();
    backend->endCoalescing()->wait();  // nothing in it
    // A block that is given up sends nothing.
    backend->startCoalescing();
    const auto given_up = backend->send(out, other, 5);
    backend->cancel_coalescing();
    EXPECT_THAT(text_of([&] { given_up->wait(); }), HasSubstr("given up"));
    EXPECT_TRUE(given_up->getFuture()->hasError());
    backend->waitForPendingWorks();
    // So does one that was left by an exception, when the next begins.
    backend->startCoalescing();
    const auto left = backend->send(out, other, 5);
    backend->startCoalescing();
    EXPECT_TRUE(left->isCompleted());
    backend->endCoalescing();
    // An error of one of them is the block's.
    Tensors uneven = {full(1, {2 + r.id()})};
    backend->startCoalescing();
    backend->allreduce(sum);
    const auto failing = backend->allreduce(uneven);
    const auto whole = backend->endCoalescing();
    EXPECT_THAT(text_of([&] { whole->wait(); }), HasSubstr("ranks disagree"));
    EXPECT_FALSE(whole->isSuccess());
    whole->getFuture()->wait();
    EXPECT_TRUE(whole->getFuture()->hasError());
    backend->barrier()->wait();
  });
}

// registerOnCompletionHook: every operation once, whatever its form, with its number and times.
TEST_P(ScenarioTest, CompletionHooks) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    EXPECT_FALSE(backend->hasHooks());
    std::mutex mutex;
    std::vector<std::pair<c10d::OpType, std::uint64_t>> seen;
    backend->registerOnCompletionHook([&](const std::shared_ptr<c10d::WorkInfo>& info) {
      EXPECT_LE(info->timeStarted, info->timeFinished);
      const std::lock_guard lock(mutex);
      seen.emplace_back(info->opType, info->seq);
      throw std::runtime_error("a hook's own affair");
    });
    EXPECT_TRUE(backend->hasHooks());
    Tensors tensors = {full(1, {100})}, strided = {full(1, {4, 5}).t()};
    backend->allreduce(tensors, {.asyncOp = false});
    backend->allreduce(strided, {.asyncOp = false});
    backend->broadcast(tensors);
    backend->waitForPendingWorks();
    c10d::BarrierOptions now;
    now.asyncOp = false;
    backend->barrier(now);
    const std::lock_guard lock(mutex);
    using c10d::OpType;
    EXPECT_THAT(seen, ElementsAre(std::pair(OpType::ALLREDUCE, 1), std::pair(OpType::ALLREDUCE, 2),
                                  std::pair(OpType::BROADCAST, 3), std::pair(OpType::BARRIER, 4)));
  });
}

// Profilers see every operation with its inputs.
TEST(ProfilerTest, OperationsAreRecorded) {
  static Guarded<std::vector<std::pair<std::string, std::size_t>>> seen;
  const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function)
                                                           -> std::unique_ptr<at::ObserverContext> {
                              const std::string name = function.name();
                              if (name.starts_with("convoy:"))
                                seen.lock()->emplace_back(name, function.inputs().size());
                              return nullptr;
                            }).needsInputs(true));
  RankGroup(1, RankMode::kThreads).run([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors tensors = {full(1, {3})}, strided = {full(1, {2, 2}).t()};
    backend->allreduce(tensors, {.asyncOp = false});
    backend->allreduce(strided, {.asyncOp = false});
    backend->allreduce(tensors)->wait();
    backend->send(tensors, 0, 0);
    backend->recv(tensors, 0, 0)->wait();
  });
  at::removeCallback(handle);
  using Seen = std::pair<std::string, std::size_t>;
  EXPECT_THAT(*seen.lock(), ElementsAre(Seen("convoy:all_reduce", 1), Seen("convoy:all_reduce", 1),
                                        Seen("convoy:all_reduce", 1), Seen("convoy:send", 1),
                                        Seen("convoy:recv", 1)));
}

c10::intrusive_ptr<c10d::TCPStore> serve_tcp() {
  c10d::TCPStoreOptions server;
  server.port = 0;
  server.isServer = true;
  server.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", server);
}

// libuv, which serves it, keeps one pipe for ever.
[[maybe_unused]] const bool kWarm = [] {
  LeakOracle::warm_up([] { serve_tcp(); });
  return true;
}();

// test_remote_group_merge: split twice, then merge, over a TCPStore.
TEST(TorchStoresTest, SplitAndMergeOverATcpStore) {
  const auto tcp = serve_tcp();
  RankGroup(4, RankMode::kThreads).run([&](Rank& r) {
    c10d::TCPStoreOptions client;
    client.port = tcp->getPort();
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", client);
    const auto group = torch_group(c10::make_intrusive<c10d::PrefixStore>("pg", store), r);
    const auto add_up = [&](const c10::intrusive_ptr<c10d::ProcessGroup>& some) {
      Tensors tensors = {full(r.id() + 1, {2})};
      some->allreduce(tensors)->wait();
      return tensors[0][0].item<double>();
    };
    EXPECT_EQ(add_up(group), 10);
    const bool low = r.id() < 2;
    const auto half =
        group->splitGroup(low ? std::vector<int>{0, 1} : std::vector<int>{2, 3}, 30s, std::nullopt,
                          low ? "low" : "high", std::nullopt, std::nullopt);
    ASSERT_TRUE(half);
    EXPECT_EQ(add_up(half), low ? 3 : 7);
    c10d::ProcessGroup::MergeOptions merging;
    merging.timeout = 30s;
    const auto merged =
        half->mergeRemoteGroup(c10::make_intrusive<c10d::PrefixStore>("merge", store), merging, 4);
    EXPECT_EQ(merged->getSize(), 4);
    EXPECT_EQ(add_up(merged), 10);
    r.barrier();
  });
}

TEST(TorchStoresTest, OverAFileStore) {
  const TempFolder folder("file-store");
  RankGroup(2, RankMode::kThreads).run([&](Rank& r) {
    const auto group =
        torch_group(c10::make_intrusive<c10d::FileStore>(folder.path() + "/store", r.size()), r);
    Tensors tensors = {full(r.id() + 1, {2})};
    group->allreduce(tensors)->wait();
    expect_equal(tensors[0], full(3, {2}));
    r.barrier();
  });
}

// ReducerTest.test_forward_backward(_unused_parameters): torch's own reducer on our backend.
TEST(TorchReducerTest, AveragesGradients) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = torch_group(to_c10d(with_prefix(r.store(), "pg")), r);
    auto used = full(1, {3, 4}).requires_grad_(), unused = full(1, {5}).requires_grad_();
    const std::vector<at::Tensor> parameters = {used, unused};
    c10d::Reducer reducer(parameters, {{0}, {1}}, group, {false, false}, 1 << 20,
                          /*find_unused_parameters=*/true, /*gradient_as_bucket_view=*/false, {},
                          1 << 20, false, false, {});
    for (int step = 0; step < 3; ++step) {
      used.mutable_grad().reset();
      reducer.prepare_for_forward();
      const auto loss = (used * (r.id() + 1)).sum();
      reducer.prepare_for_backward({loss});
      loss.backward();
      expect_equal(used.grad(), full(1.5, {3, 4}));
    }
  });
}

}  // namespace
}  // namespace convoy::test
