// A forked child of a rank that trains: it can evaluate, and nothing that would change the rank's
// gradients, parameters or optimizer, which lie in memory that both of them have.
#include <sstream>

#include "optim/shard_support.h"
#include "support/forked.h"

namespace convoy::test {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

at::Tensor fork_input(int rank) { return random(7 + static_cast<std::uint64_t>(rank), {5, 6}); }

std::string use_ddp(DistributedDataParallel<torch::nn::SequentialImpl>& ddp, const at::Tensor& loss,
                    const ProcessGroup& world) {
  Refusals refused;
  const auto x = fork_input(0);
  refused.expect("forward", [&] { return ddp.forward(x); });
  refused.expect("forward inside of no_sync", [&] {
    const auto scope = ddp.no_sync();
    return ddp.forward(x);
  });
  // After a backward of the parent's torch refuses, too; it does not matter who does.
  const auto grad = ddp->parameters()[0].grad();
  const auto before = grad.defined() ? grad.clone() : grad;
  try {
    loss.backward();
    refused.expect("backward of the parent's graph", [] {});
  } catch (const std::exception&) {
  }
  if (grad.defined() && !at::equal(before, grad)) return "the rank's gradients were changed";
  refused.expect("sync_gradients", [&] { return ddp.sync_gradients(); });
  refused.expect("update_process_group", [&] { return ddp.update_process_group(world); });
  refused.expect("write_trace", [&] { return ddp.reducer().write_trace("/tmp/never"); });
  refused.expect("another model", [&] {
    const DistributedDataParallel<torch::nn::SequentialImpl> other(make_net(), world);
  });
  std::string text = refused.text();
  const at::NoGradGuard no_grad;
  ddp->eval();
  if (ddp.forward(x).sizes() != at::IntArrayRef({5, 3})) text += "it cannot evaluate\n";
  return text;
}

std::string use_optimizer(ShardedOptimizerBase& optimizer) {
  Refusals refused;
  refused.expect("step", [&] { return optimizer.step(); });
  refused.expect("states", [&] { return optimizer.states(); });
  refused.expect("load_states", [&] { return optimizer.load_states({}); });
  refused.expect("save", [&] {
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
  });
  return refused.text();
}

TEST(DdpForkTest, AChildCanOnlyEvaluate) {
  for (const How& how : hows()) {
    SCOPED_TRACE(how.name);
    RankGroup(2, RankMode::kProcesses).run([&](Rank& r) {
      const auto world = make_world(r);
      auto ddp = std::make_unique<DistributedDataParallel<torch::nn::SequentialImpl>>(
          make_net(), world, how.options);
      auto alone = make_net();
      const auto options = SGDOptions(0.1).momentum(0.9);
      auto optimizer = std::make_unique<ShardedOptimizer<SGD>>(
          ddp->reducer(), options, ShardedOptimizerOptions{.in_backward = how.in_backward});
      SGD expected(alone->parameters(), options);
      const auto step = [&] {
        optimizer->zero_grad();
        ddp->forward(fork_input(r.id())).pow(2).mean().backward();
        if (!how.in_backward) optimizer->step();
        expected.zero_grad();
        ((alone->forward(fork_input(0)).pow(2).mean() +
          alone->forward(fork_input(1)).pow(2).mean()) /
         2)
            .backward();
        expected.step();
      };
      step();
      for (int child = 0; child < 2; ++child) {
        const auto loss = ddp->forward(fork_input(r.id())).pow(2).mean();
        r.barrier();
        EXPECT_EQ(in_forked_child([&] {
                    const auto text = use_ddp(*ddp, loss, world) + use_optimizer(*optimizer);
                    optimizer.reset();
                    ddp.reset();
                    return text;
                  }),
                  "");
        r.barrier();
        step();
      }
      expect_close_parameters(*ddp->module(), *alone);
    });
  }
}

}  // namespace
}  // namespace convoy::test
