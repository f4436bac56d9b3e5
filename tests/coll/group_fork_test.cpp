// A forked child of a rank takes no part in its group: everything is refused before anything shared
// is touched, and the ranks go on as if there were no child.
#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "coll/window.h"
#include "support.h"
#include "support/forked.h"

namespace convoy::coll::test {
namespace {

using convoy::test::in_forked_child;
using convoy::test::Refusals;
using namespace std::chrono_literals;

constexpr auto kType = DataType::kF32;

// A rank with everything that a group can have: both its threads, a window, work under way.
struct Member {
  Member(const Rank& r, Place place, std::size_t elements)
      : group(make_group(r)),
        n(static_cast<std::size_t>(r.size())),
        count(elements),
        in(*group, place, 4 * n * elements),
        out(*group, place, 4 * n * elements),
        block(group->allocate(4096)),
        window(Window::create(*group, {block.data(), 4096})) {
    // Starts the progress thread and the mail thread, and leaves one operation of each kind.
    const std::array<Message, 2> both = {
        Message{Message::Kind::kSend, in.data(), 1, kType, 1 - r.id(), 77},
        Message{Message::Kind::kReceive, out.data(), 1, kType, 1 - r.id(), 77}};
    group->start(group->calls().barrier()).wait();
    group->batch_async(both).wait();
    message = group->recv_async(late.data(), 1, kType, 1 - r.id(), {.tag = 99});
  }

  std::vector<Piece> pieces(Region& region) const {
    std::vector<Piece> all;
    for (std::size_t i = 0; i < n; ++i) all.push_back({region.data() + 4 * i * count, count});
    return all;
  }
  float* floats(Region& region) const { return reinterpret_cast<float*>(region.data()); }

  std::shared_ptr<Group> group;
  std::size_t n;
  std::size_t count;
  Region in, out;
  shm::Block block;
  std::shared_ptr<Window> window;
  std::array<float, 1> late{};
  Work message;     // pending
  Work collective;  // likewise, on rank 0
};

std::string use_all(Member& m, int rank) {
  Refusals refused;
  Group& g = *m.group;
  void* const in = m.in.data();
  void* const out = m.out.data();
  const std::size_t c = m.count;
  const int peer = 1 - rank;
  const auto inputs = m.pieces(m.in), outputs = m.pieces(m.out);
  const std::array<Piece, 1> whole_in = {Piece{in, c * m.n}}, whole_out = {Piece{out, c * m.n}};
  const std::array<Piece, 1> part_in = {Piece{in, c}}, part_out = {Piece{out, c}};

  refused.expect("all_reduce", [&] { g.all_reduce(in, out, c, kType); });
  refused.expect("all_reduce in place", [&] { g.all_reduce(in, in, c, kType); });
  refused.expect("reduce", [&] { g.run(g.calls().reduce(in, out, c, kType, 0)); });
  refused.expect("reduce_scatter", [&] { g.run(g.calls().reduce_scatter(in, out, c, kType)); });
  refused.expect("broadcast", [&] { g.broadcast(in, in, c, kType, 0); });
  refused.expect("all_gather", [&] { g.all_gather(in, out, c, kType); });
  refused.expect("gather", [&] { g.run(g.calls().gather(in, out, c, kType, 0)); });
  refused.expect("scatter", [&] { g.run(g.calls().scatter(in, out, c, kType, 0)); });
  refused.expect("all_to_all", [&] { g.run(g.calls().all_to_all(in, out, c, kType)); });
  refused.expect("reduce_scatter_v",
                 [&] { g.run(g.calls().reduce_scatter_v(inputs, part_out[0], kType)); });
  refused.expect("all_gather_v",
                 [&] { g.run(g.calls().all_gather_v(part_in[0], outputs, kType)); });
  refused.expect("gather_v", [&] { g.run(g.calls().gather_v(part_in[0], outputs, kType, 0)); });
  refused.expect("scatter_v", [&] { g.run(g.calls().scatter_v(inputs, part_out[0], kType, 0)); });
  refused.expect("all_to_all_v", [&] { g.run(g.calls().all_to_all_v(inputs, outputs, kType)); });
  refused.expect("all_reduce_coalesced",
                 [&] { g.run(g.calls().all_reduce_coalesced(inputs, outputs, kType)); });
  refused.expect("reduce_scatter_coalesced",
                 [&] { g.run(g.calls().reduce_scatter_coalesced(whole_in, part_out, kType)); });
  refused.expect("broadcast_coalesced",
                 [&] { g.run(g.calls().broadcast_coalesced(outputs, kType, 0)); });
  refused.expect("all_gather_coalesced",
                 [&] { g.run(g.calls().all_gather_coalesced(part_in, whole_out, kType)); });
  refused.expect("barrier", [&] { g.barrier(); });
  refused.expect("monitored_barrier", [&] { g.run(g.calls().monitored_barrier()); });

  const auto drop = [](const Work&) {};
  refused.expect("all_reduce_async",
                 [&] { drop(g.start(g.calls().all_reduce(in, out, c, kType))); });
  refused.expect("reduce_async", [&] { drop(g.start(g.calls().reduce(in, out, c, kType, 0))); });
  refused.expect("reduce_scatter_async",
                 [&] { drop(g.start(g.calls().reduce_scatter(in, out, c, kType))); });
  refused.expect("broadcast_async",
                 [&] { drop(g.start(g.calls().broadcast(in, in, c, kType, 0))); });
  refused.expect("all_gather_async",
                 [&] { drop(g.start(g.calls().all_gather(in, out, c, kType))); });
  refused.expect("gather_async", [&] { drop(g.start(g.calls().gather(in, out, c, kType, 0))); });
  refused.expect("scatter_async", [&] { drop(g.start(g.calls().scatter(in, out, c, kType, 0))); });
  refused.expect("all_to_all_async",
                 [&] { drop(g.start(g.calls().all_to_all(in, out, c, kType))); });
  refused.expect("reduce_scatter_v_async",
                 [&] { drop(g.start(g.calls().reduce_scatter_v(inputs, part_out[0], kType))); });
  refused.expect("all_gather_v_async",
                 [&] { drop(g.start(g.calls().all_gather_v(part_in[0], outputs, kType))); });
  refused.expect("gather_v_async",
                 [&] { drop(g.start(g.calls().gather_v(part_in[0], outputs, kType, 0))); });
  refused.expect("scatter_v_async",
                 [&] { drop(g.start(g.calls().scatter_v(inputs, part_out[0], kType, 0))); });
  refused.expect("all_to_all_v_async",
                 [&] { drop(g.start(g.calls().all_to_all_v(inputs, outputs, kType))); });
  refused.expect("all_reduce_coalesced_async",
                 [&] { drop(g.start(g.calls().all_reduce_coalesced(inputs, outputs, kType))); });
  refused.expect("reduce_scatter_coalesced_async", [&] {
    drop(g.start(g.calls().reduce_scatter_coalesced(whole_in, part_out, kType)));
  });
  refused.expect("broadcast_coalesced_async",
                 [&] { drop(g.start(g.calls().broadcast_coalesced(outputs, kType, 0))); });
  refused.expect("all_gather_coalesced_async",
                 [&] { drop(g.start(g.calls().all_gather_coalesced(part_in, whole_out, kType))); });
  refused.expect("barrier_async", [&] { drop(g.start(g.calls().barrier())); });
  refused.expect("monitored_barrier_async", [&] { drop(g.start(g.calls().monitored_barrier())); });

  const std::array<Message, 2> both = {Message{Message::Kind::kSend, in, c, kType, peer, 5},
                                       Message{Message::Kind::kReceive, out, c, kType, peer, 5}};
  refused.expect("send", [&] { g.send(in, c, kType, peer); });
  refused.expect("send of a letter", [&] { g.send(in, 1, kType, peer); });
  refused.expect("send to itself", [&] { g.send(in, c, kType, rank); });
  refused.expect("recv", [&] { g.recv(out, c, kType, peer); });
  refused.expect("recv of a letter", [&] { g.recv(out, 1, kType, peer); });
  refused.expect("recv from any", [&] { g.recv(out, c, kType, kAnyRank); });
  refused.expect("batch", [&] { g.batch(both); });
  refused.expect("empty batch", [&] { g.batch({}); });
  refused.expect("send_async", [&] { drop(g.send_async(in, c, kType, peer)); });
  refused.expect("recv_async", [&] { drop(g.recv_async(out, c, kType, peer)); });
  refused.expect("batch_async", [&] { drop(g.batch_async(both)); });
  refused.expect("empty batch_async", [&] { drop(g.batch_async({})); });

  refused.expect("wait for a message", [&] { m.message.wait(); });
  refused.expect("wait for a message, limited", [&] { m.message.wait(1ms); });
  refused.expect("done of a message", [&] { static_cast<void>(m.message.done()); });
  refused.expect("source of a message", [&] { static_cast<void>(m.message.source()); });
  if (rank == 0) {
    refused.expect("wait for a collective", [&] { m.collective.wait(); });
    refused.expect("wait for a collective, limited", [&] { m.collective.wait(1ms); });
    refused.expect("done of a collective", [&] { static_cast<void>(m.collective.done()); });
  }

  refused.expect("on_event", [&] { static_cast<void>(g.on_event([](const Event&) {})); });
  refused.expect("allocate", [&] { g.allocate(1); });
  refused.expect("abort", [&] { g.abort("a child says so"); });
  refused.expect("settle", [&] { g.settle(Deadline::after(1s)); });
  refused.expect("fence", [&] { g.fence({}, Deadline::after(1s)); });
  refused.expect("processes", [&] { static_cast<void>(g.processes()); });
  refused.expect("broken", [&] { static_cast<void>(g.broken()); });
  refused.expect("lost_ranks", [&] { static_cast<void>(g.lost_ranks()); });
  refused.expect("late_ranks", [&] { static_cast<void>(g.late_ranks()); });
  refused.expect("failure", [&] { static_cast<void>(g.failure()); });
  refused.expect("last_issued", [&] { static_cast<void>(g.last_issued()); });
  refused.expect("last_completed", [&] { static_cast<void>(g.last_completed()); });

  refused.expect("window", [&] { Window::create(g, {}); });
  refused.expect("window at", [&] { static_cast<void>(m.window->at(peer)); });
  refused.expect("window at itself", [&] { static_cast<void>(m.window->at(rank)); });
  refused.expect("signal", [&] { m.window->signal(peer); });
  refused.expect("wait_signal", [&] { m.window->wait_signal(peer, Deadline::after(100ms)); });

  // What needs nobody.
  std::string text = refused.text();
  if (g.rank() != rank || g.size() != 2 || g.name() != "world") text += "rank, size, name\n";
  return text;
}

struct Case {
  Place place;
  std::size_t count;

  std::string name() const { return concat(place == Place::kShared ? "Shared" : "Private", count); }
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name(); }

class GroupForkTest : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Sizes, GroupForkTest,
                         testing::Values(Case{Place::kPrivate, 1}, Case{Place::kShared, 1},
                                         Case{Place::kPrivate, 1000}, Case{Place::kShared, 1000},
                                         Case{Place::kPrivate, 300000},
                                         Case{Place::kShared, 300000}),
                         [](const auto& test) { return test.param.name(); });

// Every rank has a child, as with a DataLoader; both try everything at the same moment.
TEST_P(GroupForkTest, NothingIsAcceptedAndTheRanksGoOn) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    auto m = std::make_unique<Member>(r, GetParam().place, GetParam().count);
    if (r.id() == 0)
      m->collective = m->group->start(m->group->calls().barrier());  // rank 1 comes after its child
    std::fill_n(m->floats(m->in), m->n * m->count, static_cast<float>(r.id() + 1));
    std::memset(m->block.data(), 0, 4096);
    r.barrier();
    EXPECT_EQ(in_forked_child([&] {
                std::fill_n(m->floats(m->out), m->count, 1000.F);
                const std::string text = use_all(*m, r.id());
                // Everything ends here as it does in a child that returns from main().
                m->message = {};
                m->collective = {};
                m->window.reset();
                m->group->close();
                m->group.reset();
                return text;
              }),
              "");
    r.barrier();
    if (r.id() == 1) {
      m->group->barrier();
    } else {
      m->collective.wait();
    }
    for (int i = 0; i < 3; ++i) {
      m->group->all_reduce(m->in.data(), m->out.data(), m->count, kType);
      const float* const sums = m->floats(m->out);
      ASSERT_EQ(std::count(sums, sums + m->count, 3.F), static_cast<std::ptrdiff_t>(m->count));
    }
    // Messages and signals are the ranks' own.
    const float word = 40.F + static_cast<float>(r.id());
    m->group->send(&word, 1, kType, 1 - r.id(), {.tag = 99});
    m->message.wait();
    EXPECT_EQ(m->late[0], 41.F - static_cast<float>(r.id()));
    m->window->signal(1 - r.id());
    m->window->wait_signal(1 - r.id(), r.deadline());
    EXPECT_FALSE(m->group->broken());
    EXPECT_TRUE(m->group->lost_ranks().empty());
    m->group->barrier();
  });
}

// The fork may come while other threads hold the group's locks: the child must not wait for them.
TEST(GroupForkBusyTest, AForkInTheMiddleOfOperations) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    const auto group = make_group(r);
    std::atomic<int> forks = 0;
    constexpr int kForks = 40;
    // Both ranks make the same number of rounds: rank 0 says when it is enough.
    std::jthread busy([&] {
      std::vector<float> x(2000, 1.F);
      for (float go = 1; go != 0;) {
        go = r.id() == 0 && forks == kForks ? 0.F : 1.F;
        group->broadcast(&go, &go, 1, kType, 0);
        group
            ->start(group->calls().all_reduce(x.data(), x.data(), x.size(), kType,
                                              {.op = ReduceOp::kMax}))
            .wait();
        group->send_async(&go, 1, kType, 1 - r.id()).wait();
        float other = 0;
        group->recv_async(&other, 1, kType, 1 - r.id()).wait();
      }
      EXPECT_EQ(std::count(x.begin(), x.end(), 1.F), 2000);
    });
    for (; forks < kForks; ++forks) {
      EXPECT_EQ(in_forked_child([&] {
                  Refusals refused;
                  float x = 1;
                  refused.expect("all_reduce", [&] { group->all_reduce(&x, &x, 1, kType); });
                  refused.expect("send", [&] { group->send(&x, 1, kType, 0); });
                  refused.expect("last_issued", [&] { static_cast<void>(group->last_issued()); });
                  const_cast<std::shared_ptr<Group>&>(group).reset();
                  return refused.text();
                }),
                "");
    }
  });
}

}  // namespace
}  // namespace convoy::coll::test
