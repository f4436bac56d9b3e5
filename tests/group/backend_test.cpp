// ConvoyBackend as torch's users know a backend. Names in comments are PyTorch's own tests.
#include "convoy/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/concat.h"
#include "convoy/c10d_store.h"
#include "convoy/error.h"
#include "group/support.h"
#include "support/rank_group.h"
#include "tensor/memory.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

c10d::BarrierOptions barrier_options(bool async) {
  c10d::BarrierOptions options;
  options.asyncOp = async;
  return options;
}

class BackendTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, BackendTest, rank_modes(), rank_mode_name);

// test_allreduce_basics, test_allreduce_basics: sum, product, min, max, avg.
TEST_P(BackendTest, AllReduce) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    for (const bool async : {true, false}) {
      for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt,
                              at::kLong, at::kShort, at::kByte, at::kComplexFloat}) {
        Tensors tensors = {full(r.id() + 1, {5, 7}, type)};
        const auto work = backend->allreduce(tensors, {.asyncOp = async});
        EXPECT_EQ(work != nullptr, async);
        if (work) work->wait();
        expect_equal(tensors[0], full(6, {5, 7}, type));
      }
    }
    const auto reduced = [&](const c10d::ReduceOp& op, c10::ScalarType type) {
      Tensors tensors = {full(r.id() + 1, {4}, type)};
      backend->allreduce(tensors, {.reduceOp = op})->wait();
      return tensors[0];
    };
    expect_equal(reduced(c10d::ReduceOp::PRODUCT, at::kFloat), full(6, {4}));
    expect_equal(reduced(c10d::ReduceOp::MIN, at::kInt), full(1, {4}, at::kInt));
    expect_equal(reduced(c10d::ReduceOp::MAX, at::kLong), full(3, {4}, at::kLong));
    expect_equal(reduced(c10d::ReduceOp::AVG, at::kFloat), full(2, {4}));
    expect_equal(reduced(c10d::ReduceOp::AVG, at::kInt), full(2, {4}, at::kInt));  // Gloo: an error
    expect_equal(reduced(c10d::ReduceOp::BOR, at::kInt), full(3, {4}, at::kInt));
    expect_equal(reduced(c10d::makePreMulSum(0.5), at::kFloat), full(3, {4}));
    // Bool: a sum is "or"; Gloo stores a 2 in it.
    expect_equal(reduced(c10d::ReduceOp::SUM, at::kBool), at::ones({4}, at::kBool));
    EXPECT_THAT(text_of([&] { reduced(c10d::ReduceOp::BAND, at::kFloat); }), HasSubstr("band"));
  });
}

// Gloo reads numel elements from data_ptr here and is silently wrong.
TEST_P(BackendTest, AnyStrides) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    const auto base = at::arange(24, at::kFloat).reshape({4, 6});
    const auto mine = (base + 100 * r.id()).t();  // transposed
    Tensors tensors = {mine.clone(at::MemoryFormat::Preserve)};
    ASSERT_FALSE(tensors[0].is_contiguous());
    backend->allreduce(tensors)->wait();
    expect_equal(tensors[0], (2 * base + 100).t());

    auto whole = at::zeros({8});
    Tensors every_other = {whole.slice(0, 0, 8, 2)};
    every_other[0].fill_(r.id() + 1);
    backend->allreduce(every_other, {.asyncOp = false});
    expect_equal(whole, at::tensor({3, 0, 3, 0, 3, 0, 3, 0}, at::kFloat));

    Tensors strided = {at::zeros({3, 4}).t()};
    if (r.id() == 1) strided[0].copy_(at::arange(12).reshape({4, 3}));
    backend->broadcast(strided, {.rootRank = 1})->wait();
    expect_equal(strided[0], at::arange(12, at::kFloat).reshape({4, 3}));

    // A lazy conjugate has other bits than values.
    const auto complex = at::complex(at::ones({3}), at::ones({3}));
    Tensors conjugate = {complex.conj()};
    backend->allreduce(conjugate)->wait();
    expect_equal(conjugate[0], at::complex(full(2, {3}), full(-2, {3})));

    Tensors in = {(base + r.id()).t()};
    std::vector<Tensors> out = {{at::zeros({6, 4}), at::zeros({4, 6}).t()}};
    backend->allgather(out, in)->wait();
    expect_equal(out[0][0], base.t());
    expect_equal(out[0][1], (base + 1).t());
  });
}

TEST_P(BackendTest, SeveralTensorsACall) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    // test_allreduce_multi... : all tensors of all ranks together, into each.
    Tensors two = {full(r.id() + 1, {3}), full(10 * (r.id() + 1), {3})};
    backend->allreduce(two)->wait();
    for (const auto& tensor : two) expect_equal(tensor, full(33, {3}));
    // broadcast: the root's chosen tensor into each.
    Tensors some = {full(r.id(), {2}), full(10 + r.id(), {2})};
    backend->broadcast(some, {.rootRank = 1, .rootTensor = 1})->wait();
    for (const auto& tensor : some) expect_equal(tensor, full(11, {2}));
    // allgather of two inputs: every list gets all four.
    Tensors in = {full(2 * r.id(), {2}), full(2 * r.id() + 1, {2})};
    std::vector<Tensors> out(2);
    for (auto& list : out) {
      for (int i = 0; i < 4; ++i) list.push_back(at::zeros({2}));
    }
    backend->allgather(out, in)->wait();
    for (const auto& list : out) {
      for (int i = 0; i < 4; ++i) expect_equal(list[static_cast<std::size_t>(i)], full(i, {2}));
    }
  });
}

TEST_P(BackendTest, Coalesced) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors tensors = {full(r.id() + 1, {3}), full(r.id() + 2, {2, 5}).t(), full(1, {0})};
    c10d::AllreduceCoalescedOptions options;
    backend->allreduce_coalesced(tensors, options)->wait();
    expect_equal(tensors[0], full(3, {3}));
    expect_equal(tensors[1], full(5, {5, 2}));

    Tensors in = {full(r.id(), {2}), full(10 + r.id(), {3}, at::kLong)};
    Tensors out = {at::zeros({4}), at::zeros({6}, at::kLong)};
    backend->allgather_into_tensor_coalesced(out, in)->wait();
    expect_equal(out[0], at::tensor({0, 0, 1, 1}, at::kFloat));
    expect_equal(out[1], at::tensor({10, 10, 10, 11, 11, 11}, at::kLong));

    std::vector<Tensors> lists = {{at::zeros({2}), at::zeros({3}, at::kLong)},
                                  {at::zeros({2}), at::zeros({3}, at::kLong)}};
    backend->allgather_coalesced(lists, in)->wait();
    expect_equal(lists[1][0], full(1, {2}));
    expect_equal(lists[0][1], full(10, {3}, at::kLong));

    Tensors big = {at::arange(4, at::kFloat) + r.id(), at::arange(6, at::kFloat)};
    Tensors small = {at::zeros({2}), at::zeros({3})};
    backend->reduce_scatter_tensor_coalesced(small, big)->wait();
    expect_equal(small[0],
                 r.id() == 0 ? at::tensor({1, 3}, at::kFloat) : at::tensor({5, 7}, at::kFloat));
    expect_equal(small[1], 2 * at::arange(3, at::kFloat) + 6 * r.id());
  });
}

TEST_P(BackendTest, MovingForms) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    const auto id = static_cast<std::size_t>(r.id());
    for (const bool async : {true, false}) {
      const auto finish = [](const c10::intrusive_ptr<c10d::Work>& work) {
        if (work) work->wait();
      };
      // In place: the input is the own part of the output, as FSDP2 gathers.
      auto whole = at::zeros({3, 4});
      auto part = whole[r.id()];
      part.fill_(r.id() + 1);
      finish(backend->_allgather_base(whole, part, {.asyncOp = async}));
      expect_equal(whole, at::tensor({1, 2, 3}, at::kFloat).unsqueeze(1).expand({3, 4}));
      // From (W, n) to (n): Gloo refuses.
      auto shard = at::zeros({4});
      finish(backend->_reduce_scatter_base(shard, whole, {.asyncOp = async}));
      expect_equal(shard, full(3 * (r.id() + 1), {4}));

      // Lists of unequal lengths.
      Tensors in = {full(r.id(), {r.id() + 1})};
      std::vector<Tensors> out = {{at::zeros({1}), at::zeros({2}), at::zeros({3})}};
      finish(backend->allgather(out, in, {.asyncOp = async}));
      for (int i = 0; i < 3; ++i) {
        expect_equal(out[0][static_cast<std::size_t>(i)], full(i, {i + 1}));
      }
      std::vector<Tensors> gathered;
      if (r.id() == 2) gathered = {{at::zeros({1}), at::zeros({2}), at::zeros({3})}};
      finish(backend->gather(gathered, in, {.rootRank = 2, .asyncOp = async}));
      if (r.id() == 2) expect_equal(gathered[0][1], full(1, {2}));
      std::vector<Tensors> scattered;
      if (r.id() == 1) scattered = {{full(5, {1}), full(6, {2}), full(7, {3})}};
      Tensors mine = {at::zeros({r.id() + 1})};
      finish(backend->scatter(mine, scattered, {.rootRank = 1, .asyncOp = async}));
      expect_equal(mine[0], full(5 + r.id(), {r.id() + 1}));
      std::vector<Tensors> lists = {{full(1, {1}), full(2, {2}), full(3, {3})}};
      finish(backend->reduce_scatter(mine, lists, {.asyncOp = async}));
      expect_equal(mine[0], full(3 * (r.id() + 1), {r.id() + 1}));

      // all_to_all: of a tensor with splits (one of them zero), and of lists.
      auto from = at::arange(6, at::kFloat).reshape({3, 2}) + 10 * r.id();
      std::vector<int64_t> send = {1, 2, 0};
      std::vector<int64_t> receive(3, send[id]);
      auto to = at::zeros({3 * send[id], 2});
      finish(backend->alltoall_base(to, from, receive, send, {.asyncOp = async}));
      if (r.id() == 0) {
        expect_equal(to, at::tensor({0, 1, 10, 11, 20, 21}, at::kFloat).reshape({3, 2}));
      }
      Tensors inputs, outputs;
      for (int i = 0; i < 3; ++i) {
        inputs.push_back(full(10 * r.id() + i, {i}));
        outputs.push_back(at::zeros({r.id()}));
      }
      finish(backend->alltoall(outputs, inputs, {.asyncOp = async}));
      for (int i = 0; i < 3; ++i) {
        expect_equal(outputs[static_cast<std::size_t>(i)], full(10 * i + r.id(), {r.id()}));
      }
      Tensors reduced = {full(r.id(), {4})};
      finish(backend->reduce(reduced, {.rootRank = 1, .asyncOp = async}));
      expect_equal(reduced[0], full(r.id() == 1 ? 3 : r.id(), {4}));
      finish(backend->barrier(barrier_options(async)));
    }
    backend->monitoredBarrier(barrier_options(false));
  });
}

// test_sparse_allreduce_basics
TEST_P(BackendTest, SparseAllReduce) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    // Different numbers of entries; rank 0 has none.
    const auto indices = at::arange(r.id(), at::kLong).unsqueeze(0);
    auto sparse = at::sparse_coo_tensor(indices, at::ones({r.id(), 2}), {4, 2});
    const auto dense = at::zeros({4, 2});
    dense[0].fill_(2);
    dense[1].fill_(1);
    Tensors tensors = {sparse};
    backend->allreduce(tensors)->wait();
    expect_equal(tensors[0].to_dense(), dense);
    Tensors minimum = {sparse};
    EXPECT_THAT(text_of([&] { backend->allreduce(minimum, {.reduceOp = c10d::ReduceOp::MIN}); }),
                HasSubstr("unsupported reduction operation"));
  });
}

// test_send_recv, test_send_recv_with_tag, test_send_recv_all_to_all, recv from any source.
TEST_P(BackendTest, Messages) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<Tensors> received(3), sent(3);
    for (int peer = 0; peer < 3; ++peer) {
      const auto i = static_cast<std::size_t>(peer);
      sent[i] = {full(10 * r.id() + peer, {50, 60}).t()};
      received[i] = {at::zeros({60, 50})};
      works.push_back(backend->send(sent[i], peer, 7));
      works.push_back(backend->recv(received[i], peer, 7));
    }
    for (const auto& work : works) {
      work->wait();
      EXPECT_TRUE(work->isCompleted());
    }
    for (int peer = 0; peer < 3; ++peer) {
      expect_equal(received[static_cast<std::size_t>(peer)][0], full(10 * peer + r.id(), {60, 50}));
    }
    if (r.id() == 0) {
      std::vector<int> sources;
      for (int i = 0; i < 2; ++i) {
        Tensors any = {at::zeros({2})};
        const auto work = backend->recvAnysource(any, 1);
        work->wait();
        sources.push_back(work->sourceRank());
        expect_equal(any[0], full(work->sourceRank(), {2}));
      }
      EXPECT_THAT(sources, testing::UnorderedElementsAre(1, 2));
    } else {
      Tensors mine = {full(r.id(), {2})};
      backend->send(mine, 0, 1)->wait();
    }
  });
}

TEST_P(BackendTest, WorkAndFuture) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors tensors = {full(r.id() + 1, {1000})};
    const auto work = backend->allreduce(tensors);
    const auto future = work->getFuture();
    future->wait();
    expect_equal(future->value().toTensorVector()[0], full(3, {1000}));
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    expect_equal(work->result()[0], full(3, {1000}));
    EXPECT_EQ(work->getSequencenumber(), 1u);
    EXPECT_GE(work->getDuration(), 0);
    const auto verdict = work->getFutureResult();
    verdict->wait();
    EXPECT_EQ(verdict->value().toInt(), static_cast<int>(c10d::WorkResult::SUCCESS));
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 1u);
    // An error reaches the future too; the group goes on.
    Tensors other = {full(1, {3 + r.id()})};
    const auto failing = backend->allreduce(other);
    EXPECT_THAT(text_of([&] { failing->wait(); }), HasSubstr("ranks disagree"));
    EXPECT_TRUE(failing->getFuture()->hasError());
    EXPECT_FALSE(failing->isSuccess());
    EXPECT_TRUE(failing->exception());
    backend->barrier()->wait();
    EXPECT_EQ(backend->getError(), c10d::ErrorType::SUCCESS);
    // A limit of the waiter's own.
    if (r.id() == 0) {
      Tensors late = {full(0, {2})};
      const auto receive = backend->recv(late, 1, 3);
      EXPECT_THAT(text_of([&] { receive->wait(20ms); }), HasSubstr(" Timed out "));
      r.barrier();
      receive->wait();
    } else {
      r.barrier();
      Tensors late = {full(1, {2})};
      backend->send(late, 0, 3)->wait();
    }
  });
}

TEST_P(BackendTest, TorchsOwnTextsForBadArguments) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors none, one = {at::zeros({2})}, mixed = {at::zeros({2}), at::zeros({2}, at::kLong)};
    Tensors uneven = {at::zeros({2}), at::zeros({3})};
    std::vector<Tensors> no_lists, lists = {{at::zeros({2})}};
    const auto refused = [](const char* part, const auto& call) {
      EXPECT_THAT(text_of(call), HasSubstr(part));
    };
    refused("requires non-empty tensor list", [&] { backend->allreduce(none); });
    refused("invalid tensor type", [&] { backend->allreduce(mixed); });
    refused("invalid tensor size", [&] { backend->allreduce(uneven); });
    refused("invalid root rank: -1", [&] { backend->broadcast(one, {.rootRank = -1}); });
    refused("invalid root rank: 2", [&] { backend->reduce(one, {.rootRank = 2}); });
    refused("invalid root tensor: 1", [&] { backend->broadcast(one, {.rootTensor = 1}); });
    refused("requires a single-element tensor list", [&] { backend->reduce(uneven); });
    refused("requires a single-element input tensor list",
            [&] { backend->gather(lists, uneven, {.rootRank = r.id()}); });
    refused("Incorrect output list size 1",
            [&] { backend->gather(lists, one, {.rootRank = r.id()}); });
    refused("requires empty output on non-root",
            [&] { backend->gather(lists, one, {.rootRank = 1 - r.id()}); });
    refused("Incorrect input list size 1",
            [&] { backend->scatter(one, lists, {.rootRank = r.id()}); });
    refused("requires empty input on non-root",
            [&] { backend->scatter(one, lists, {.rootRank = 1 - r.id()}); });
    at::Tensor two = at::zeros({2}), three = at::zeros({3});
    refused("output tensor size must be equal", [&] { backend->_allgather_base(three, two); });
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 0u);
    backend->barrier()->wait();
  });
}

// allocateTensor: memory that all ranks work on in place.
TEST_P(BackendTest, GroupMemory) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    ASSERT_TRUE(backend->supportsTensorAlloc(0));
    auto tensor = backend->allocateTensor(100'000, at::kFloat);
    EXPECT_EQ(is_shared_memory(tensor), backend->shares_memory());
    EXPECT_FALSE(is_shared_memory(at::zeros({3})));
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({100'000}));
    tensor.fill_(r.id() + 1);
    Tensors views = {tensor.view({100, 1000})};
    backend->allreduce(views, {.asyncOp = false});
    expect_equal(tensor, full(3, {100'000}));
    const auto bytes = backend->getMemAllocator()->allocate(4096);
    EXPECT_NE(bytes.get(), nullptr);
    EXPECT_THAT(text_of([&] { backend->allocateTensor(1, at::TensorOptions(at::kMeta)); }),
                HasSubstr("CPU memory"));
  });
}

TEST_P(BackendTest, SplitTimeoutAndEnd) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    const auto store = to_c10d(with_prefix(r.store(), "split"));
    const std::vector<int> ranks = {3, 1};
    const auto options = backend->getBackendOptions();
    options->group_name = "odd";
    const auto child = backend->split(store, ranks, options);
    EXPECT_EQ(child != nullptr, r.id() % 2 == 1);
    if (child) {
      EXPECT_EQ(child->getRank(), r.id() == 3 ? 0 : 1);
      Tensors tensors = {full(r.id(), {3})};
      child->allreduce(tensors)->wait();
      expect_equal(tensors[0], full(4, {3}));
    }
    r.barrier();
    if (r.id() == 0) {
      backend->setTimeout(50ms);
      EXPECT_THAT(text_of([&] { backend->barrier(barrier_options(false)); }),
                  HasSubstr("imed out"));
      EXPECT_EQ(backend->getError(), c10d::ErrorType::TIMEOUT);
    }
    r.barrier();
    Tensors tensors = {full(1, {2})};
    // MPI does not tell the others: they meet what rank 0 has left behind.
    const bool told = r.id() == 0 || r.mode() != RankMode::kMpi;
    EXPECT_THAT(text_of([&] { backend->allreduce(tensors)->wait(); }),
                HasSubstr(told ? "imed out" : "rank 0 called barrier()"));
    backend->abort();
    backend->shutdown();
    backend->shutdown();
    r.barrier();
  });
}

// Under torch's own ProcessGroup, on torch's own store, through its dispatcher.
TEST(ProcessGroupTest, OfTorchsOwn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RankGroup(2, RankMode::kThreads).run([&](Rank& r) {
    const auto prefixed =
        c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::PrefixStore>("pg", store));
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(prefixed, r.id(), r.size());
    const auto backend = c10::make_intrusive<ConvoyBackend>(prefixed, r.id(), r.size());
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    group->setGroupName("pg");
    Tensors tensors = {full(r.id() + 1, {5})};
    group->allreduce(tensors)->wait();
    expect_equal(tensors[0], full(3, {5}));
    group->barrier()->wait();
    std::vector<Tensors> out = {{at::zeros({5}), at::zeros({5})}};
    Tensors in = {full(r.id(), {5})};
    group->allgather(out, in)->wait();
    expect_equal(out[0][1], full(1, {5}));
  });
}

// A killed rank through tensors: named on all survivors.
TEST(BackendFaultTest, AKilledRankIsNamed) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors tensors = {full(1, {300'000})};
    backend->allreduce(tensors)->wait();
    r.mark("looping");
    EXPECT_THAT(text_of([&] {
                  for (;;) backend->allreduce(tensors)->wait();
                }),
                testing::AllOf(HasSubstr("rank 1 (pid "), HasSubstr("SIGKILL")));
    r.store()->set(concat("told/", r.id()), "");
  });
  ranks.wait_mark("looping");
  ranks.kill(1, SIGKILL);
  for (const int r : {0, 2}) ranks.store()->get(concat("told/", r), Deadline::after(20s));
  ranks.join();
}

TEST(BackendSizeOneTest, WorksAlone) {
  const auto backend = c10::make_intrusive<ConvoyBackend>(make_local_store(), 0, 1);
  Tensors tensors = {full(3, {4}).t()};
  backend->allreduce(tensors)->wait();
  expect_equal(tensors[0], full(3, {4}));
  auto out = at::zeros({4});
  backend->_allgather_base(out, tensors[0])->wait();
  expect_equal(out, full(3, {4}));
  backend->barrier()->wait();
}

}  // namespace
}  // namespace convoy::test
