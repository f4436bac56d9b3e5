// elastic::run: members die and others join, and training goes on.
#include <signal.h>

#include "base/concat.h"
#include "convoy/elastic.h"
#include "convoy/sharded_optimizer.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using torch::nn::Linear;
namespace optim = torch::optim;

torch::nn::Sequential make_elastic_net() {
  return seeded(
      5, [] { return torch::nn::Sequential(Linear(6, 40), torch::nn::Tanh(), Linear(40, 1)); });
}

constexpr int kBatch = 12;                  // of all members together, however many they are
constexpr std::uint64_t kLastBatch = 1000;  // for comparisons
struct Batch {
  at::Tensor input, target;
};
Batch batch_of(std::uint64_t step, int rank, int size) {
  const auto input = random(step + 1, {kBatch, 6});
  const auto target = (input.sum(1, true) / 3).tanh();
  const int first = kBatch * rank / size, last = kBatch * (rank + 1) / size;
  return {input.slice(0, first, last), target.slice(0, first, last)};
}
at::Tensor loss_of(const at::Tensor& output, const Batch& batch) {
  return (output - batch.target).pow(2).mean();
}

// What one process gets that nobody disturbs.
double undisturbed_loss(std::uint64_t steps) {
  auto net = make_elastic_net();
  optim::AdamW optimizer(net->parameters(), optim::AdamWOptions(1e-2));
  for (std::uint64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto batch = batch_of(step, 0, 1);
    loss_of(net->forward(batch.input), batch).backward();
    optimizer.step();
  }
  const auto batch = batch_of(kLastBatch, 0, 1);
  return loss_of(net->forward(batch.input), batch).item<double>();
}

ProcessGroup make_members(const Rank& r, int rank, int size, const std::string& name) {
  return new_group("convoy",
                   {.timeout = 60s, .store = r.store(), .rank = rank, .size = size, .name = name});
}

// Three members; each that is killed is replaced by another process.
TEST(ElasticTest, KilledMembersAreReplaced) {
  static constexpr int kMembers = 3, kKills = 3;
  static constexpr std::uint64_t kEvery = 20, kSteps = kEvery * (kKills + 1);
  RankGroup ranks(kMembers + kKills, RankMode::kProcesses, {.limit = 110s});
  ranks.start([](Rank& r) {
    const bool joins = r.id() >= kMembers;
    if (joins) r.wait_for(concat("kill ", r.id() - kMembers + 1));
    auto net = make_elastic_net();
    DistributedDataParallel model(net, joins ? make_members(r, 0, 1, concat("own ", r.id()))
                                             : make_members(r, r.id(), kMembers, "world"));
    ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), optim::AdamWOptions(1e-2));
    int changes = 0;
    const auto made = elastic::run(model,
                                   {.store = r.store(),
                                    .joins = joins,
                                    .min_size = kMembers,
                                    .timeout = 60s,
                                    .on_change =
                                        [&](const elastic::Change& change) {
                                          ++changes;
                                          EXPECT_EQ(change.group.size(), kMembers);
                                          expect_equal_on_all(change.group, net->parameters());
                                        }},
                                   [&](std::uint64_t step) {
                                     const auto batch =
                                         batch_of(step, model.group().rank(), model.group().size());
                                     loss_of(model(batch.input), batch).backward();
                                     optimizer.step();
                                     if ((step + 1) % kEvery == 0 && step + 1 < kSteps) {
                                       r.mark(concat("step ", step + 1));
                                     }
                                     return step + 1 < kSteps;
                                   });
    EXPECT_EQ(made, kSteps);
    EXPECT_GE(changes, 1);
    const auto batch = batch_of(kLastBatch, 0, 1);
    const double loss = loss_of(net->forward(batch.input), batch).item<double>();
    EXPECT_NEAR(loss, undisturbed_loss(kSteps), 0.05);
    EXPECT_GT(undisturbed_loss(0), undisturbed_loss(kSteps) + 0.1);  // it learns something
    expect_equal_on_all(model.group(), net->parameters());
  });
  for (int kill = 0; kill < kKills; ++kill) {
    // The killed are 0, 1 and 2; who marks is not among them any more.
    ranks.wait_mark(concat("step ", kEvery * static_cast<std::uint64_t>(kill + 1)), kill);
    ranks.kill(kill, SIGKILL);
    ranks.post(concat("kill ", kill + 1));
  }
  ranks.join();
}

// A newcomer that hangs on its way in is not waited for, and cannot go on later with the members'
// memory; the next one is taken in. The members wait for a deadline, and for the newcomer to
// notice.
TEST(ElasticTest, NewcomerThatHangsIsKilled) {
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const bool joins = r.id() >= 2;
    if (r.id() == 3) r.wait_for("the other one hangs");
    ProcessGroup group =
        joins ? make_members(r, 0, 1, concat("own ", r.id())) : make_members(r, r.id(), 2, "world");
    group.set_timeout(500ms);
    const elastic::Model model{.group = [&] { return group; },
                               .update =
                                   [&](const ProcessGroup& next) {
                                     if (r.id() == 2) {
                                       r.mark("hangs");
                                       r.wait_for("never");
                                     }
                                     next.barrier();
                                     group = next;
                                   }};
    elastic::run(model, {.store = r.store(), .joins = joins, .min_size = 3, .timeout = 50s},
                 [&](std::uint64_t) {
                   EXPECT_EQ(group.size(), 3);
                   return false;
                 });
  });
  ranks.wait_mark("hangs", 2);
  ranks.kill(2, SIGCONT);  // it may end in any way
  ranks.post("the other one hangs");
  EXPECT_EQ(ranks.join()[2].status.signal, SIGKILL);
}

// Without a death: who asks is taken in at the next look; who comes too late is told so.
TEST(ElasticTest, MembersJoin) {
  RankGroup(3, RankMode::kThreads).run([](Rank& r) {
    auto net = make_elastic_net();
    const bool joins = r.id() != 0;
    DistributedDataParallel model(net, make_members(r, 0, 1, concat("own ", r.id())));
    optim::SGD sgd(net->parameters(), 0.01);
    int size = 1;
    const auto body = [&](std::uint64_t) {
      sgd.zero_grad();
      model(input_of(r.id(), 0, {4, 6})).sum().backward();
      sgd.step();
      return size < 3;
    };
    const elastic::Options options{
        .store = r.store(), .joins = joins, .timeout = 60s, .on_change = [&](const auto& change) {
          size = change.group.size();
        }};
    EXPECT_GT(elastic::run(model, options, body), 0U);
    expect_equal_on_all(model.group(), net->parameters());
    r.barrier();
    if (joins) {
      DistributedDataParallel late(make_elastic_net(),
                                   make_members(r, 0, 1, concat("late ", r.id())));
      EXPECT_EQ(elastic::run(late, options, body), 0U);
    }
  });
}

// A step that fails again and again although nobody has died ends the run.
TEST(ElasticTest, NobodyHasDied) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    DistributedDataParallel model(make_elastic_net(), world);
    int times = 0;
    EXPECT_THAT(text_of([&] {
                  elastic::run(model, {.store = r.store()}, [&](std::uint64_t) -> bool {
                    if (++times > 20) throw std::runtime_error("for ever");
                    throw Error(ErrorKind::kPeerLost, "another peer");
                  });
                }),
                HasSubstr("another peer"));
    EXPECT_GT(times, 1);
  });
}

// Who has given up waiting is not called any more.
TEST(ElasticTest, WhoWaitsInVain) {
  run_ranks(1, [](Rank& r, const ProcessGroup& own) {
    DistributedDataParallel model(make_elastic_net(), own);
    EXPECT_THAT(text_of([&] {
                  elastic::run(model, {.store = r.store(), .joins = true, .timeout = 100ms},
                               [](std::uint64_t) { return false; });
                }),
                HasSubstr("elastic"));
    EXPECT_TRUE(r.store()->keys("elastic/waiting/").empty());
  });
}

TEST(ElasticTest, WhatItRefuses) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    DistributedDataParallel model(make_elastic_net(), world);
    const auto text = [&](const elastic::Options& options) {
      return text_of([&] { elastic::run(model, options, [](std::uint64_t) { return false; }); });
    };
    EXPECT_THAT(text({}), HasSubstr("members need a store"));
    EXPECT_THAT(text({.store = r.store(), .joins = true}),
                HasSubstr("must come with a group of 1 rank, got"));
    EXPECT_THAT(text({.store = r.store(), .min_size = 3, .timeout = 200ms}),
                HasSubstr("2 members are left, 3 are needed"));
    // What a step throws otherwise is its own.
    EXPECT_THAT(text_of([&] {
                  elastic::run(model, {.store = r.store()},
                               [](std::uint64_t) -> bool { throw std::runtime_error("mine"); });
                }),
                HasSubstr("mine"));
  });
  const elastic::StoreHost host;
  const auto one = connect_store(host.path(), Deadline::after(10s));
  one->set("a", "b");
  EXPECT_EQ(connect_store(host.path(), Deadline::after(10s))->get("a"), "b");
}

}  // namespace
}  // namespace convoy::test
