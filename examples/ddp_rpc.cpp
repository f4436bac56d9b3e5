// Data parallel training with a table that is too large for every trainer: PyTorch's tutorial
// "Combining Distributed DataParallel with Distributed RPC Framework".
//
// Four workers. "ps" has an embedding table. Two trainers each have a copy of a dense layer, whose
// gradients DistributedDataParallel averages; they look up rows of the table over RPC, and
// gradients go back to it in the same backward pass. "master" starts the trainers and compares with
// one process.
//
//   convoy run -n 4 ddp_rpc
#include <convoy/convoy.h>
#include <convoy/remote_module.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
namespace autograd = convoy::autograd;
namespace rpc = convoy::rpc;

constexpr int kRows = 100, kWidth = 16, kClasses = 8, kTrainers = 2, kSteps = 20;
const convoy::Sgd kRule{.lr = 0.1};

// --- the table, on "ps" ---

class TableImpl : public torch::nn::Module {
 public:
  TableImpl() : bag_(register_module("bag", torch::nn::EmbeddingBag(bag_options()))) {}
  torch::Tensor forward(const torch::Tensor& rows, const torch::Tensor& offsets) {
    return bag_(rows, offsets);
  }

 private:
  static torch::nn::EmbeddingBagOptions bag_options() {
    torch::manual_seed(1);
    return torch::nn::EmbeddingBagOptions(kRows, kWidth).mode(torch::kSum);
  }
  torch::nn::EmbeddingBag bag_;
};
TORCH_MODULE(Table);
CONVOY_REMOTE_MODULE(Table);
using RemoteTable = convoy::RemoteModule<Table>;

// --- what trainers compute ---

torch::nn::Linear make_dense() {
  torch::manual_seed(2);
  return torch::nn::Linear(kWidth, kClasses);
}

struct Batch {
  Batch(int trainer, int step) {
    torch::manual_seed(1000 * step + trainer);
    rows = torch::randint(kRows, {12});
    offsets = torch::arange(0, 12, 3);
    target = rows.index_select(0, offsets) % kClasses;  // the class of a bag is that of its first
  }
  torch::Tensor rows, offsets, target;
};
torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::cross_entropy_loss(output, target);
}

// --- a trainer ---

convoy::ProcessGroup trainers;  // of the trainers' processes

// Called by "master": the loss of each step.
std::vector<double> run_trainer(const convoy::RRef<Table>& table_reference) {
  const auto session = rpc::current().session();
  const RemoteTable table(table_reference);
  convoy::DistributedDataParallel dense(make_dense(), trainers);

  // One list of parameters, wherever they are: those of the table, and this trainer's own.
  auto parameters = table.parameters();
  for (const auto& parameter : dense->parameters()) parameters.push_back(session.rref(parameter));
  const convoy::DistributedOptimizer optimizer(session, parameters, kRule);

  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch(trainers.rank(), step);
    const autograd::Context context(session);
    const auto loss = loss_of(dense(table(batch.rows, batch.offsets)), batch.target);
    context.backward({loss});  // dense gradients are averaged; the table's go to "ps"
    optimizer.step(context);
    trainers.barrier();  // all have stepped the table before the next look-up
    losses.push_back(loss.item<double>());
  }
  return losses;
}
CONVOY_RPC(run_trainer);

// --- the same in one process ---

std::vector<double> run_alone() {
  Table table;
  const auto dense = make_dense();
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<torch::Tensor> all;
    for (int trainer = 0; trainer < kTrainers; ++trainer) {
      const Batch batch(trainer, step);
      all.push_back(
          loss_of(torch::nn::Linear(dense)(table(batch.rows, batch.offsets)), batch.target));
    }
    const auto sum = torch::stack(all).sum();
    sum.backward();
    const torch::NoGradGuard no_grad;
    const auto step_by = [](const torch::nn::Module& module, double lr) {
      for (auto& parameter : module.parameters()) {
        parameter -= lr * parameter.grad();
        parameter.mutable_grad().reset();
      }
    };
    step_by(*table, kRule.lr);              // each trainer steps it
    step_by(*dense, kRule.lr / kTrainers);  // they step their mean
    losses.push_back(sum.item<double>() / kTrainers);
  }
  return losses;
}

int main() {
  const auto world = convoy::init();
  if (world.size() != kTrainers + 2) {
    std::cerr << "four workers: convoy run -n 4 ddp_rpc" << std::endl;
    return 1;
  }
  const int rank = world.rank();
  const bool trains = rank < kTrainers;
  if (trains) trainers = world.split({0, 1}).value();
  const rpc::Session session({.name = trains              ? "trainer" + std::to_string(rank)
                                      : rank == kTrainers ? "master"
                                                          : "ps"});
  if (rank == kTrainers) {
    const RemoteTable table(session, "ps");
    std::vector<rpc::Future<std::vector<double>>> running;
    for (int trainer = 0; trainer < kTrainers; ++trainer) {
      running.push_back(
          session.rpc_async<run_trainer>("trainer" + std::to_string(trainer), table.reference()));
    }
    const auto losses = rpc::wait_all(running);
    const auto alone = run_alone();
    bool same = true;
    for (std::size_t step = 0; step < alone.size(); ++step) {
      const double mean = (losses[0][step] + losses[1][step]) / kTrainers;
      same = same && std::abs(mean - alone[step]) < 1e-4;
      if (step % 5 == 0 || step + 1 == alone.size()) {
        std::cout << "step " << step << ": loss " << mean << ", in one process " << alone[step]
                  << std::endl;
      }
    }
    std::cout << (same ? "the same loss as one process" : "NOT the same loss") << std::endl;
  }
  session.shutdown();
  trainers = {};
}
