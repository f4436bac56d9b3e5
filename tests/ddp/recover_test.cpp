// One rank does not come to the backward of the others: its forward threw, or its loss, or it left
// out a batch. The others are told in their next operation, by name, and training goes on.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "base/concat.h"
#include "convoy/sharded_optimizer.h"
#include "convoy/sync_batch_norm.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;

struct RecoverNetImpl : torch::nn::Module {
  explicit RecoverNetImpl(bool buffers) : fc1(4, 8), fc2(8, 3) {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    if (buffers) norm = register_module("norm", BatchNorm1d(8));
  }
  at::Tensor forward(const at::Tensor& x, bool fails = false) {
    auto y = fc1(x);
    if (norm) y = norm(y);
    if (fails) throw std::runtime_error("boom\nframe #0: nothing");
    return fc2(torch::relu(y));
  }
  Linear fc1, fc2;
  BatchNorm1d norm{nullptr};
};
TORCH_MODULE(RecoverNet);

at::Tensor batch(int rank, int step) { return input_of(rank, step, {5, 4}); }

enum class Fault { kForward, kLoss, kSkip };

struct Case {
  std::string name;
  DdpOptions options = {};
  bool buffers = true;
  Fault fault = Fault::kForward;
  int ranks = 2;
  int culprit = 0;
  int step = 2;
  bool set_to_none = true;
};

constexpr int kSteps = 5;

// What each rank's steps threw; empty: nothing. `before` is called with the new model.
template <class Before>
void train(const Case& one, const Before& before) {
  SCOPED_TRACE(one.name);
  run_ranks(one.ranks, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [&] { return RecoverNet(one.buffers); });
    DistributedDataParallel model(net, world, one.options);
    before(model);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    std::vector<std::string> texts;
    for (int step = 0; step < kSteps; ++step) {
      const bool fails = r.id() == one.culprit && step == one.step;
      std::string text;
      try {
        sgd.zero_grad(one.set_to_none);
        if (one.options.reduce.kind() == GradReduce::Kind::kWeighted) {
          model.set_reduce(GradReduce::weighted(1));
        }
        const auto y = model(batch(r.id(), step), fails && one.fault == Fault::kForward);
        if (fails && one.fault == Fault::kSkip) continue;
        if (fails && one.fault == Fault::kLoss) throw std::runtime_error("boom");
        y.pow(2).mean().backward();
        sgd.step();
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kRemote) << e.what();
        text = e.what();
      } catch (const std::exception& e) {
        text = e.what();
      }
      if (fails) {
        EXPECT_THAT(text, HasSubstr("boom"));
      } else if (step == one.step) {
        const std::string who = "rank " + std::to_string(one.culprit) + ": ";
        const std::string number = std::to_string(step + 1);
        EXPECT_THAT(text, AllOf(HasSubstr(who), HasSubstr("group \"world\""), Not(HasSubstr("\n")),
                                Not(HasSubstr("frame #"))));
        if (one.fault == Fault::kForward) {
          EXPECT_THAT(text, HasSubstr("forward " + number + " threw: boom"));
        } else if (one.fault == Fault::kLoss) {
          EXPECT_THAT(text, HasSubstr("between forward " + number + " and its backward"));
        } else {
          EXPECT_THAT(text, HasSubstr("leave out a batch"));
        }
      } else {
        EXPECT_EQ(text, "") << "step " << step << " of rank " << r.id();
      }
    }
    expect_equal_on_all(world, net->parameters());

    // As if nobody had had that batch.
    auto local = seeded(1, [&] { return RecoverNet(one.buffers); });
    torch::optim::SGD plain(local->parameters(), 0.1);
    for (int step = 0; step < kSteps; ++step) {
      if (step == one.step) continue;
      const auto mean = mean_gradients(*local, one.ranks, [&](auto& module, int rank) {
        return module.forward(batch(rank, step)).pow(2).mean();
      });
      for (std::size_t i = 0; i < mean.size(); ++i) {
        local->parameters()[i].mutable_grad() = mean[i];
      }
      plain.step();
    }
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      expect_close(net->parameters()[i], local->parameters()[i]);
    }
    EXPECT_EQ(model.reducer().stats().backwards, kSteps);
  });
}

void train(const Case& one) {
  train(one, [](auto&) {});
}

std::vector<Case> with_all_options(const Case& one) {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, const DdpOptions& options) {
    Case next = one;
    next.name += name;
    next.options = options;
    cases.push_back(next);
  };
  add("plain", {});
  add("small buckets", {.bucket_cap_mb = 1e-5, .launch = BucketLaunch::kEarly});
  add("find_unused", {.bucket_cap_mb = 1e-5, .find_unused_parameters = true});
  add("static", {.bucket_cap_mb = 1e-5, .static_graph = true, .launch = BucketLaunch::kLate});
  add("copies", {.gradient_as_bucket_view = false, .launch = BucketLaunch::kEarly});
  add("asks first", {.find_unused_parameters = true, .skip_all_reduce_unused_params = true});
  add("weighted", {.reduce = GradReduce::weighted(1)});
  add("replicas", {.check_replicas_every = 1});
  add("after forward", {.buffer_sync = BufferSync::kAfterForward});
  return cases;
}

void train_with_all_options(Fault fault, bool buffers) {
  for (const int ranks : {2, 3}) {
    const Case base{.name = std::to_string(ranks) + " ranks, ",
                    .buffers = buffers,
                    .fault = fault,
                    .ranks = ranks};
    for (Case one : with_all_options(base)) {
      one.culprit = ranks - 1;
      one.set_to_none = ranks == 2;
      train(one);
    }
    Case root = base;
    root.name += "rank 0";
    root.options.bucket_cap_mb = 1e-5;
    train(root);
    Case first = base;
    first.name += "first step";
    first.step = 0;
    train(first);
  }
}

TEST(RecoverTest, ForwardThrows) { train_with_all_options(Fault::kForward, false); }
TEST(RecoverTest, ForwardThrowsWithBuffers) { train_with_all_options(Fault::kForward, true); }
TEST(RecoverTest, LossThrows) { train_with_all_options(Fault::kLoss, false); }
TEST(RecoverTest, LossThrowsWithBuffers) { train_with_all_options(Fault::kLoss, true); }

// Without a collective of the next forward nobody can know before the next backward.
TEST(RecoverTest, ABackwardIsLeftOut) { train_with_all_options(Fault::kSkip, true); }

TEST(RecoverTest, WithAHook) {
  for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
    for (const bool buffers : {false, true}) {
      for (const Fault fault : {Fault::kForward, Fault::kLoss, Fault::kSkip}) {
        if (fault == Fault::kSkip && !buffers) continue;
        train({.name = launch == BucketLaunch::kEarly ? "early" : "late",
               .options = {.bucket_cap_mb = 1e-5, .launch = launch},
               .buffers = buffers,
               .fault = fault,
               .ranks = 3,
               .culprit = 1},
              [](auto& model) { model.register_comm_hook(hooks::all_reduce); });
      }
    }
  }
}

// The others wait inside of the hook, in their own thread.
TEST(RecoverTest, WithAHookThatWaits) {
  for (const Fault fault : {Fault::kForward, Fault::kSkip}) {
    train(
        {.name = "waits", .options = {.launch = BucketLaunch::kEarly}, .fault = fault, .ranks = 3},
        [](auto& model) {
          model.register_comm_hook([](const GradBucket& bucket) -> HookResult {
            bucket.group().all_reduce(bucket.buffer(), {.op = ReduceOp::kAvg});
            return bucket.buffer();
          });
        });
  }
}

TEST(RecoverTest, WithABufferHook) {
  train({.name = "buffer hook", .ranks = 3, .culprit = 1}, [](auto& model) {
    model.register_buffer_hook(
        [](const ProcessGroup& group, const NamedTensors& buffers) {
          for (const auto& [name, buffer] : buffers) group.broadcast(buffer);
        },
        BufferSync::kBeforeForward);
  });
}

// All ranks throw the same: none tells the others.
TEST(RecoverTest, AllForwardsThrow) {
  for (const bool buffers : {false, true}) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [&] { return RecoverNet(buffers); });
      DistributedDataParallel model(net, world);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        if (step == 2) {
          EXPECT_THAT(text_of([&] { model(batch(r.id(), step), true); }), HasSubstr("boom"));
        } else {
          model(batch(r.id(), step)).sum().backward();
        }
      }
      expect_equal_on_all(world, gradients_of(*net));
    });
  }
}

// Two forwards and one backward: the others are in the second forward, or in the backward.
TEST(RecoverTest, SeveralForwards) {
  for (const bool buffers : {false, true}) {
    for (const int which : {0, 1}) {
      SCOPED_TRACE(which);
      run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
        auto net = seeded(1, [&] { return RecoverNet(buffers); });
        DistributedDataParallel model(net, world);
        int failures = 0;
        for (int step = 0; step < 5; ++step) {
          const bool fails = r.id() == 1 && step == 2;
          net->zero_grad();
          try {
            const auto a = model(batch(r.id(), step), fails && which == 0);
            const auto b = model(batch(r.id(), step + 1), fails && which == 1);
            (a.sum() + b.pow(2).sum()).backward();
          } catch (const std::exception& e) {
            ++failures;
            EXPECT_EQ(step, 2) << e.what();
            EXPECT_THAT(e.what(), HasSubstr("boom"));
          }
        }
        EXPECT_EQ(failures, 1);
        expect_equal_on_all(world, gradients_of(*net));
      });
    }
  }
}

// Batches inside of no_sync are each rank's own: nobody else hears of one that failed.
TEST(RecoverTest, InsideOfNoSync) {
  for (const bool in_loss : {false, true}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return RecoverNet(true); });
      DistributedDataParallel model(net, world);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        try {
          const auto scope = model.no_sync();
          const bool fails = r.id() == 1 && step == 2;
          const auto y = model(batch(r.id(), step), fails && !in_loss);
          if (fails) throw std::runtime_error("boom");
          y.sum().backward();
        } catch (const std::exception& e) {
          EXPECT_STREQ(std::string(e.what()).substr(0, 4).c_str(), "boom");
        }
        model(batch(r.id(), step + 1)).sum().backward();
      }
      expect_equal_on_all(world, gradients_of(*net));
    });
  }
}

// In a Join ranks have different numbers of batches anyway.
TEST(RecoverTest, InAJoin) {
  for (const bool buffers : {false, true}) {
    for (const bool in_loss : {false, true}) {
      run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
        auto net = seeded(1, [&] { return RecoverNet(buffers); });
        DistributedDataParallel model(net, world);
        torch::optim::SGD sgd(net->parameters(), 0.1);
        int done = 0;
        join({&model}, [&] {
          for (int step = 0; step < 4; ++step) {
            const bool fails = r.id() == 1 && step == 2;
            sgd.zero_grad();
            try {
              const auto y = model(batch(r.id(), step), fails && !in_loss);
              if (fails) throw std::runtime_error("boom");
              y.sum().backward();
            } catch (const std::exception& e) {
              EXPECT_TRUE(fails) << e.what();
              continue;
            }
            sgd.step();
            ++done;
          }
        });
        EXPECT_EQ(done, r.id() == 1 ? 3 : 4);
        expect_equal_on_all(world, net->parameters());
      });
    }
  }
}

TEST(RecoverTest, InAJoinThatEndsEarly) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return RecoverNet(true); });
    DistributedDataParallel model(net, world);
    int failures = 0;
    join({&model},
         [&] {
           for (int step = 0; step < 4; ++step) {
             net->zero_grad();
             try {
               model(batch(r.id(), step), r.id() == 1 && step == 2).sum().backward();
             } catch (const std::exception& e) {
               ++failures;
               EXPECT_THAT(e.what(), HasSubstr("boom"));
             }
           }
         },
         {.throw_on_early_termination = true});
    EXPECT_EQ(failures, 1);
    world.barrier();
  });
}

struct ShardedCase {
  bool in_backward;
  BucketLaunch launch;
  Fault fault;
};

void train_sharded(const ShardedCase& one) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return RecoverNet(true); });
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 1e-5, .launch = one.launch});
    ShardedOptimizer<torch::optim::SGD> sgd(model.reducer(), torch::optim::SGDOptions(0.1),
                                            {.in_backward = one.in_backward});
    int failures = 0;
    for (int step = 0; step < 5; ++step) {
      const bool fails = r.id() == 1 && step == 2;
      sgd.zero_grad();
      try {
        const auto loss =
            model(batch(r.id(), step), fails && one.fault == Fault::kForward).pow(2).mean();
        if (fails) continue;  // left out
        loss.backward();
        if (!one.in_backward) sgd.step();
      } catch (const std::exception& e) {
        ++failures;
        EXPECT_EQ(step, 2) << e.what();
        EXPECT_THAT(e.what(),
                    HasSubstr(one.fault == Fault::kForward ? "boom" : "leave out a batch"));
      }
    }
    EXPECT_EQ(failures, one.fault == Fault::kSkip && r.id() == 1 ? 0 : 1);
    expect_equal_on_all(world, net->parameters());
  });
}

TEST(RecoverTest, ShardedOptimizers) {
  for (const bool in_backward : {false, true}) {
    for (const BucketLaunch launch : {BucketLaunch::kLate, BucketLaunch::kEarly}) {
      for (const Fault fault : {Fault::kForward, Fault::kSkip}) {
        SCOPED_TRACE(concat(in_backward, launch == BucketLaunch::kEarly, fault == Fault::kSkip));
        train_sharded({in_backward, launch, fault});
      }
    }
  }
}

// One backward through two models of one group.
TEST(RecoverTest, TwoModels) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto first = seeded(1, [] { return RecoverNet(true); });
    auto second = seeded(2, [] { return RecoverNet(true); });
    DistributedDataParallel a(first, world), b(second, world);
    for (const int which : {0, 1}) {
      int failures = 0;
      for (int step = 0; step < 4; ++step) {
        const bool fails = r.id() == 1 && step == 2;
        first->zero_grad();
        second->zero_grad();
        try {
          const auto y = a(batch(r.id(), step), fails && which == 0).sum();
          (y + b(batch(r.id(), step), fails && which == 1).sum()).backward();
        } catch (const std::exception& e) {
          ++failures;
          EXPECT_THAT(e.what(), HasSubstr("boom"));
        }
      }
      EXPECT_EQ(failures, 1);
    }
    expect_equal_on_all(world, gradients_of(*first));
    expect_equal_on_all(world, gradients_of(*second));
  });
}

// Others wait in the layer's own group, in forward.
TEST(RecoverTest, SyncBatchNorms) {
  struct Normed : torch::nn::Module {
    Normed()
        : fc(register_module("fc", Linear(4, 3))),
          norm(register_module("norm", nn::SyncBatchNorm1d(3))) {}
    at::Tensor forward(const at::Tensor& x, bool fails) {
      auto y = fc(x);
      if (fails) throw std::runtime_error("boom");
      return norm(y);
    }
    Linear fc;
    nn::SyncBatchNorm1d norm;
  };
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return std::make_shared<Normed>(); });
    nn::convert_sync_batchnorm(*net, world);
    DistributedDataParallel model(net, world);
    int failures = 0;
    for (int step = 0; step < 5; ++step) {
      net->zero_grad();
      try {
        model(batch(r.id(), step), r.id() == 1 && step == 2).pow(3).sum().backward();
      } catch (const std::exception& e) {
        ++failures;
        EXPECT_EQ(step, 2) << e.what();
      }
    }
    EXPECT_EQ(failures, 1);
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// The rank that has no such backward is in its next forward, which goes on.
TEST(RecoverTest, ABackwardTooMany) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return RecoverNet(true); });
    DistributedDataParallel model(net, world);
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const auto loss = model(batch(r.id(), step)).sum();
      loss.backward({}, /*retain_graph=*/true);
      if (r.id() != 1 || step != 2) continue;
      EXPECT_THAT(text_of([&] { loss.backward(); }),
                  AllOf(HasSubstr("rank 0: is in forward 4"), HasSubstr("it has none to run")));
    }
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// --- what the others are in is named ---

TEST(DisagreementTest, AHookOnOneRank) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return RecoverNet(true); });
    DistributedDataParallel model(net, world);
    const auto text = text_of([&] {
      if (r.id() == 0) model.register_comm_hook(hooks::all_reduce);
      model(batch(r.id(), 0)).sum().backward();
    });
    EXPECT_THAT(text,
                AllOf(HasSubstr("in register_comm_hook"), HasSubstr("called on some of them only"),
                      Not(HasSubstr("were they started"))));
    world.barrier();
  });
}

TEST(DisagreementTest, ASaveOnOneRank) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return RecoverNet(true); });
    DistributedDataParallel model(net, world);
    ShardedOptimizer<torch::optim::SGD> sgd(model.reducer(), torch::optim::SGDOptions(0.1));
    const auto step = [&] {
      sgd.zero_grad();
      model(batch(r.id(), 0)).sum().backward();
      sgd.step();
    };
    step();
    const auto text = text_of([&] {
      std::ostringstream out;
      if (r.id() == 0) torch::save(sgd, out);
      step();
    });
    EXPECT_THAT(text, AllOf(HasSubstr("in torch::save or states() of a ShardedOptimizer"),
                            HasSubstr("in forward 2")));
    step();
    expect_equal_on_all(world, net->parameters());
  });
}

// A rank that has fewer batches goes on to something else.
TEST(DisagreementTest, ABatchFewer) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return RecoverNet(false); });
    DistributedDataParallel model(net, world);
    const auto text = text_of([&] {
      for (int step = 0; step < 3 - r.id(); ++step) {
        net->zero_grad();
        model(batch(r.id(), step)).sum().backward();
      }
      world.barrier();
    });
    EXPECT_THAT(text, AllOf(HasSubstr("backward 3"), HasSubstr("rank 1 called barrier"),
                            HasSubstr("convoy::join")));
  });
}

// --- deaths ---

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / 1ns; }

// Survivors wait in a backward for a rank that is killed. CONVOY_DETECTIONS=100 prints how soon
// they know, after so many kills: docs/reference/reliability.md has the figures.
TEST(DetectionTest, InBackward) {
  const char* const asked = std::getenv("CONVOY_DETECTIONS");
  const int kills = asked ? std::atoi(asked) : 2;
  std::vector<double> milliseconds;
  for (int i = 0; i < kills; ++i) {
    RankGroup ranks(3, RankMode::kProcesses);
    ranks.start([](Rank& r) {
      const auto world = make_world(r);
      auto net = seeded(1, [] { return RecoverNet(true); });
      DistributedDataParallel model(net, world);
      try {
        for (int step = 0;; ++step) {
          const auto y = model(batch(r.id(), step));
          if (step == 3) r.mark("in backward");
          if (step == 3 && r.id() == 1) r.wait_for("never");
          y.sum().backward();
        }
      } catch (const Error& e) {
        const auto told = now_ns();
        EXPECT_EQ(e.kind(), ErrorKind::kPeerLost) << e.what();
        EXPECT_THAT(e.what(), AllOf(HasSubstr("backward 4"), HasSubstr("rank 1 (pid")));
        const auto killed = std::stoll(r.store()->get("killed", r.deadline()));
        r.store()->set("took/" + std::to_string(r.id()), std::to_string(told - killed));
      }
    });
    if (in_rank()) {
      ranks.join();
      continue;
    }
    ranks.wait_mark("in backward");
    const auto store = ranks.store();
    store->set("killed", std::to_string(now_ns()));
    ranks.kill(1, SIGKILL);
    for (const char* const rank : {"0", "2"}) {
      const std::string took = store->get(std::string("took/") + rank, Deadline::after(30s));
      milliseconds.push_back(std::stod(took) / 1e6);
    }
    ranks.join();
  }
  if (in_rank()) return;
  std::sort(milliseconds.begin(), milliseconds.end());
  const auto at = [&](double part) {
    return milliseconds[static_cast<std::size_t>(part *
                                                 static_cast<double>(milliseconds.size() - 1))];
  };
  EXPECT_LT(at(1), 10'000);
  if (asked) {
    std::cout << kills << " kills, survivors told after " << at(0.5) << " ms (median), " << at(0.99)
              << " ms (p99), " << at(1) << " ms (maximum)\n";
  }
}

// --- mistakes are their own rank's ---

template <class Make, class Break>
void expect_mistake(const Make& make, const Break& mistake, const std::string& text) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(true); });
    auto model = make(net, world, r.id());
    (*model)(at::ones({2, 2})).sum().backward();
    try {
      net->zero_grad();
      mistake(*model, *net, r.id());
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), r.id() == 1 ? ErrorKind::kInvalidArgument : ErrorKind::kRemote)
          << e.what();
      EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 1: "), HasSubstr(text)));
    }
    net->zero_grad();
    (*model)(at::ones({2, 2})).sum().backward();
    expect_equal_on_all(world, gradients_of(*net));
  });
}

TEST(MistakeTest, AHooksResult) {
  for (const int which : {0, 1, 2}) {
    expect_mistake(
        [&](const Net& net, const ProcessGroup& world, int rank) {
          auto model = std::make_shared<DistributedDataParallel<NetImpl>>(net, world);
          const auto count = std::make_shared<int>(0);
          model->register_comm_hook([=](const GradBucket& bucket) -> HookResult {
            const bool wrong = rank == 1 && ++*count == 2;
            if (!wrong) return hooks::all_reduce(bucket);
            hooks::all_reduce(bucket).wait();
            if (which == 0) return at::Tensor();
            if (which == 1) return bucket.buffer().to(at::kHalf);
            return bucket.buffer().slice(0, 1);
          });
          return model;
        },
        [](auto& model, auto&, int) { model(at::ones({2, 2})).sum().backward(); },
        "the comm hook returned");
  }
}

}  // namespace
}  // namespace convoy::test
