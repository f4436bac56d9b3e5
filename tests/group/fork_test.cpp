// A forked child of a rank (a worker of a DataLoader, for example) can use neither its group, nor
// the group's backend, windows, works, events or store; it can only end. The ranks do not notice.
#include "convoy/c10d_store.h"
#include "convoy/nn.h"
#include "convoy/window.h"
#include "group/support.h"
#include "support/forked.h"

namespace convoy::test {
namespace {

using std::chrono::milliseconds;

// Threads have no process of their own to fork.
std::vector<RankMode> process_modes() {
  auto modes = all_rank_modes();
  std::erase(modes, RankMode::kThreads);
  return modes;
}

class GroupForkTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, GroupForkTest, testing::ValuesIn(process_modes()), rank_mode_name);

constexpr std::int64_t kSmall = 6;
constexpr std::int64_t kLarge = 300'000;

struct Member {
  explicit Member(const Rank& r)
      : backend(make_backend(r)),
        group(ProcessGroup::from(backend, {.name = "world", .store = with_prefix(r.store(), "g")})),
        shares(backend->shares_memory()) {
    // Both threads of the group run; a message and a listener are left.
    group.barrier_async().wait();
    const int peer = 1 - r.id();
    group.batch().send(at::ones({1}), peer, 1).recv(at::ones({1}), peer, 1).run();
    pending = group.recv_async(late, peer, {.tag = 9});
    events = group.on_event([](const Event&) {});
    if (shares) window = group.window(group.allocate({4}));
  }

  c10::intrusive_ptr<ConvoyBackend> backend;
  ProcessGroup group;
  bool shares;
  at::Tensor late = at::zeros({1});
  Work pending;
  EventHandle events;
  Window window;
};

std::string use_group(Member& m, int rank, std::int64_t n) {
  Refusals refused;
  const ProcessGroup& g = m.group;
  const int peer = 1 - rank;
  const auto x = at::ones({n});
  const auto twice = at::ones({2 * n});
  const Tensors two = {at::ones({n}), at::ones({n})}, other = {at::ones({n}), at::ones({n})};
  const Tensors at_root = rank == 0 ? two : Tensors();
  const auto version = x._version();

  refused.expect("all_reduce", [&] { return g.all_reduce(x); });
  refused.expect("all_reduce strided", [&] { return g.all_reduce(at::ones({n, 2}).t()); });
  refused.expect("all_reduce of no elements", [&] { return g.all_reduce(at::ones({0})); });
  refused.expect("all_reduce_async", [&] { return g.all_reduce_async(x); });
  refused.expect("all_reduce_coalesced", [&] { return g.all_reduce_coalesced(two); });
  refused.expect("all_reduce_coalesced_async", [&] { return g.all_reduce_coalesced_async(two); });
  refused.expect("all_reduce of sparse tensors", [&] { return g.all_reduce(x.to_sparse()); });
  refused.expect("reduce", [&] { return g.reduce(x); });
  refused.expect("reduce_async", [&] { return g.reduce_async(x); });
  refused.expect("broadcast", [&] { return g.broadcast(x); });
  refused.expect("broadcast_async", [&] { return g.broadcast_async(x); });
  refused.expect("all_gather list", [&] { return g.all_gather(two, x); });
  refused.expect("all_gather_async", [&] { return g.all_gather_async(two, x); });
  refused.expect("all_gather_single", [&] { return g.all_gather_single(twice, x); });
  refused.expect("all_gather_single_async", [&] { return g.all_gather_single_async(twice, x); });
  refused.expect("all_gather", [&] { return g.all_gather(x); });
  refused.expect("gather", [&] { return g.gather(at_root, x); });
  refused.expect("gather_async", [&] { return g.gather_async(at_root, x); });
  refused.expect("scatter", [&] { return g.scatter(x, at_root); });
  refused.expect("scatter_async", [&] { return g.scatter_async(x, at_root); });
  refused.expect("reduce_scatter", [&] { return g.reduce_scatter(x, two); });
  refused.expect("reduce_scatter_async", [&] { return g.reduce_scatter_async(x, two); });
  refused.expect("reduce_scatter_single", [&] { return g.reduce_scatter_single(x, twice); });
  refused.expect("reduce_scatter_single_async",
                 [&] { return g.reduce_scatter_single_async(x, twice); });
  refused.expect("all_to_all", [&] { return g.all_to_all(two, other); });
  refused.expect("all_to_all_async", [&] { return g.all_to_all_async(two, other); });
  refused.expect("all_to_all_single",
                 [&] { return g.all_to_all_single(twice, at::ones({2 * n})); });
  refused.expect("all_to_all_single_async",
                 [&] { return g.all_to_all_single_async(twice, at::ones({2 * n})); });
  refused.expect("barrier", [&] { return g.barrier(); });
  refused.expect("barrier_async", [&] { return g.barrier_async(); });
  refused.expect("monitored_barrier", [&] { return g.monitored_barrier(); });
  refused.expect("send", [&] { return g.send(x, peer); });
  refused.expect("send_async", [&] { return g.send_async(x, peer); });
  refused.expect("recv", [&] { return g.recv(x, peer); });
  refused.expect("recv from any", [&] { return g.recv(x); });
  refused.expect("recv_async", [&] { return g.recv_async(x, peer); });
  refused.expect("batch run", [&] { return g.batch().send(x, peer).recv(two[0], peer).run(); });
  refused.expect("batch start", [&] { return g.batch().send(x, peer).start(); });
  const std::string bytes(static_cast<std::size_t>(n), 'x');
  refused.expect("all_gather_object", [&] { return g.all_gather_object(bytes); });
  refused.expect("gather_object", [&] { return g.gather_object(bytes); });
  refused.expect("broadcast_object", [&] { return g.broadcast_object(bytes); });
  refused.expect("scatter_object", [&] {
    return g.scatter_object(rank == 0 ? std::vector{bytes, bytes} : std::vector<std::string>());
  });
  refused.expect("send_object", [&] { return g.send_object(bytes, peer); });
  refused.expect("recv_object", [&] { return g.recv_object(peer); });
  refused.expect("split", [&] { return g.split({0, 1}); });
  refused.expect("split of others", [&] { return g.split({peer}); });
  refused.expect("split_by", [&] { return g.split_by(0); });
  if (m.shares) {
    refused.expect("shrink", [&] { return g.shrink({.timeout = milliseconds(100)}); });
    refused.expect("shrink to some",
                   [&] { return g.shrink(std::vector{rank}, {.timeout = milliseconds(100)}); });
    refused.expect("merge", [&] { return g.merge(m.group.store(), 2); });
    refused.expect("window", [&] { return g.window(x); });
    refused.expect("window at", [&] { return m.window.at(peer); });
    refused.expect("window put", [&] { return m.window.put(peer, at::ones({1})); });
    refused.expect("window fence", [&] { return m.window.fence(); });
    refused.expect("window signal", [&] { return m.window.signal(peer); });
    refused.expect("window wait_signal",
                   [&] { return m.window.wait_signal(peer, Deadline::after(milliseconds(100))); });
  }
  refused.expect("allocate", [&] { return g.allocate({n}); });
  refused.expect("hosts", [&] { return g.hosts(); });
  refused.expect("local_rank", [&] { return (g.local_rank()); });
  refused.expect("local_size", [&] { return (g.local_size()); });
  refused.expect("on_event", [&] { return (g.on_event([](const Event&) {})); });
  refused.expect("abort", [&] { return g.abort(); });
  refused.expect("nn::all_reduce",
                 [&] { return nn::all_reduce(x.clone().requires_grad_(true), g); });
  refused.expect("store set", [&] { return g.store()->set("child", "1"); });
  refused.expect("store get", [&] { return g.store()->get("nothing"); });
  refused.expect("work wait", [&] { return m.pending.wait(); });
  refused.expect("work wait, limited", [&] { return m.pending.wait(milliseconds(10)); });
  refused.expect("work done", [&] { return (m.pending.done()); });
  refused.expect("work source", [&] { return (m.pending.source()); });
  refused.expect("work result", [&] { return m.pending.result(); });
  refused.expect("work error", [&] { return m.pending.error(); });
  refused.expect("work then", [&] { return m.pending.then([](const std::exception_ptr&) {}); });

  std::string text = refused.text();
  if (x._version() != version) text += "autograd was told of a change\n";
  if (at::ones({n}).ne(x).any().item<bool>()) text += "a tensor was changed\n";
  if (g.rank() != rank || g.size() != 2 || g.name() != "world" || g.timeout().count() <= 0) {
    text += "rank, size, name, timeout\n";
  }
  return text;
}

std::string use_backend(Member& m, int rank, std::int64_t n) {
  Refusals refused;
  ConvoyBackend& b = *m.backend;
  const int peer = 1 - rank;
  Tensors one = {at::ones({n})}, two = {at::ones({n}), at::ones({n})},
          other = {at::ones({n}), one[0]};
  std::vector<Tensors> lists = {two}, by_rank = {{at::ones({n})}, {at::ones({n})}}, none;
  auto& at_root = rank == 0 ? lists : none;
  Tensors whole = {at::ones({2 * n})};
  auto out = at::ones({2 * n}), in = at::ones({n});
  std::vector<std::int64_t> splits;
  for (const bool async : {false, true}) {
    refused.expect("allreduce", [&] { return b.allreduce(one, {.asyncOp = async}); });
    refused.expect("allreduce of several", [&] { return b.allreduce(two, {.asyncOp = async}); });
    c10d::AllreduceCoalescedOptions coalesced;
    coalesced.asyncOp = async;
    refused.expect("allreduce_coalesced", [&] { return b.allreduce_coalesced(two, coalesced); });
    refused.expect("reduce", [&] { return b.reduce(one, {.asyncOp = async}); });
    refused.expect("broadcast", [&] { return b.broadcast(one, {.asyncOp = async}); });
    refused.expect("allgather", [&] { return b.allgather(lists, one, {.asyncOp = async}); });
    refused.expect("_allgather_base",
                   [&] { return b._allgather_base(out, in, {.asyncOp = async}); });
    refused.expect("allgather_coalesced",
                   [&] { return b.allgather_coalesced(by_rank, one, {.asyncOp = async}); });
    refused.expect("allgather_into_tensor_coalesced", [&] {
      return b.allgather_into_tensor_coalesced(whole, one, {.asyncOp = async});
    });
    refused.expect("gather", [&] { return b.gather(at_root, one, {.asyncOp = async}); });
    refused.expect("scatter", [&] { return b.scatter(one, at_root, {.asyncOp = async}); });
    refused.expect("reduce_scatter",
                   [&] { return b.reduce_scatter(one, lists, {.asyncOp = async}); });
    refused.expect("_reduce_scatter_base",
                   [&] { return b._reduce_scatter_base(in, out, {.asyncOp = async}); });
    refused.expect("reduce_scatter_tensor_coalesced", [&] {
      return b.reduce_scatter_tensor_coalesced(one, whole, {.asyncOp = async});
    });
    refused.expect("alltoall_base", [&] {
      return b.alltoall_base(out, whole[0], splits, splits, {.asyncOp = async});
    });
    refused.expect("alltoall", [&] { return b.alltoall(two, other, {.asyncOp = async}); });
    c10d::BarrierOptions barrier;
    barrier.asyncOp = async;
    refused.expect("barrier", [&] { return b.barrier(barrier); });
  }
  refused.expect("send", [&] { return b.send(one, peer, 0); });
  refused.expect("recv", [&] { return b.recv(one, peer, 0); });
  refused.expect("recvAnysource", [&] { return b.recvAnysource(one, 0); });
  refused.expect("send with a limit", [&] { return b.send(one, peer, 0, milliseconds(100)); });
  refused.expect("recv with a limit", [&] { return b.recv(one, peer, 0, milliseconds(100)); });
  refused.expect("send_now", [&] { return b.send_now(in, peer, 0, milliseconds(100)); });
  refused.expect("recv_now", [&] { return b.recv_now(in, peer, 0, milliseconds(100)); });
  refused.expect("monitoredBarrier", [&] { return b.monitoredBarrier({}); });
  refused.expect("startCoalescing", [&] { return b.startCoalescing(); });
  refused.expect("endCoalescing", [&] { return b.endCoalescing(); });
  refused.expect("cancel_coalescing", [&] { return b.cancel_coalescing(); });
  refused.expect("registerOnCompletionHook",
                 [&] { return b.registerOnCompletionHook([](const auto&) {}); });
  refused.expect("waitForPendingWorks", [&] { return b.waitForPendingWorks(); });
  refused.expect("getSequenceNumberForGroup", [&] { return (b.getSequenceNumberForGroup()); });
  const auto store = to_c10d(make_local_store());
  refused.expect("split", [&] { return b.split(store, {0, 1}, b.getBackendOptions()); });
  if (m.shares)
    refused.expect("merge", [&] { return b.merge(store, b.getBackendOptions(), rank, 2); });
  refused.expect("allocateTensor", [&] { return b.allocateTensor(n); });
  refused.expect("lost_ranks", [&] { return (b.lost_ranks()); });
  refused.expect("abort", [&] { return b.abort(); });
  refused.expect("getError", [&] { return (b.getError()); });
  return refused.text();
}

// Everything that a child may do, and in the end what its exit() would do.
std::string be_a_child(Member& m, int rank) {
  std::string text;
  for (const auto n : {kSmall, kLarge}) {
    text += use_group(m, rank, n) + use_backend(m, rank, n);
  }
  m.backend->shutdown();
  m.group.shutdown();
  m.pending = {};
  m.window = {};
  m.events = {};
  m.group = {};
  m.backend.reset();
  return text;
}

TEST_P(GroupForkTest, NothingIsAcceptedAndTheRanksGoOn) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    Member m(r);
    for (int child = 0; child < 2; ++child) {
      r.barrier();
      EXPECT_EQ(in_forked_child([&] { return be_a_child(m, r.id()); }), "");
      r.barrier();
      for (const auto n : {kSmall, kLarge}) {
        const auto x = full(r.id() + 1, {n});
        m.group.all_reduce(x);
        expect_equal(x, full(3, {n}));
        m.group.all_reduce_async(x).wait();
        expect_equal(x, full(6, {n}));
      }
    }
    m.group.send(full(r.id(), {1}), 1 - r.id(), {.tag = 9});
    m.pending.wait();
    expect_equal(m.late, full(1 - r.id(), {1}));
    if (m.shares) {
      EXPECT_TRUE(m.backend->lost_ranks().empty());
      m.window.signal(1 - r.id());
      m.window.wait_signal(1 - r.id(), r.deadline());
    }
    EXPECT_EQ(m.backend->getError(), c10d::ErrorType::SUCCESS);
    m.group.barrier();
  });
}

// Of the default group, whose second init() would give the parent's away.
TEST(GroupForkInitTest, InitInAChild) {
  run_in_process([] {
    const auto group = init({.rank = 0, .size = 1});
    EXPECT_EQ(in_forked_child([] {
                Refusals refused;
                refused.expect("init", [] { init({.rank = 0, .size = 1}); });
                refused.expect("new_group", [] { new_group("convoy", {.rank = 0, .size = 1}); });
                refused.expect("an operation", [] { current_group().barrier(); });
                return refused.text();
              }),
              "");
    group.barrier();
  });
}

}  // namespace
}  // namespace convoy::test
