// Differentiable collectives: their gradients against those of one process that holds everything.
#include "convoy/nn.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <torch/autograd.h>

#include "convoy/error.h"
#include "group/support.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using Function = std::function<Tensors(const Tensors&)>;  // of all ranks' inputs, in one process

constexpr int kRanks = 3;

at::Tensor random(int seed, at::IntArrayRef sizes) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return at::randn(sizes, generator, at::kDouble);
}

at::Tensor input_of(int rank, at::IntArrayRef sizes) { return random(1000 + rank, sizes); }

at::Tensor weights_of(int rank, at::IntArrayRef sizes) { return random(2000 + rank, sizes); }

void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(at::allclose(actual, expected, 1e-9, 1e-9)) << actual << "\nexpected\n" << expected;
}

// Every rank's loss is a weighted sum of squares of its output, so that second derivatives are not
// zero. Values, gradients and gradients of gradients must be those of the sum of all losses.
void compare(const ProcessGroup& group, const std::vector<int64_t>& sizes,
             const std::function<at::Tensor(const at::Tensor&)>& distributed,
             const Function& together) {
  const auto loss_of = [](const at::Tensor& output, int rank) {
    return (weights_of(rank, output.sizes()) * output * output).sum();
  };
  Tensors all;
  for (int rank = 0; rank < group.size(); ++rank) {
    all.push_back(input_of(rank, sizes).requires_grad_());
  }
  const auto outputs = together(all);
  auto total = at::zeros({}, at::kDouble);
  for (int rank = 0; rank < group.size(); ++rank) {
    total = total + loss_of(outputs[static_cast<std::size_t>(rank)], rank);
  }
  const auto id = static_cast<std::size_t>(group.rank());
  const auto first = torch::autograd::grad({total}, all, {}, true, true);
  auto of_first = at::zeros({}, at::kDouble);
  for (const auto& gradient : first) of_first = of_first + gradient.pow(2).sum();
  const auto second = torch::autograd::grad({of_first}, all);

  const auto mine = input_of(group.rank(), sizes).requires_grad_();
  const auto output = distributed(mine);
  expect_close(output, outputs[id]);
  const auto got = torch::autograd::grad({loss_of(output, group.rank())}, {mine}, {}, true, true);
  expect_close(got[0], first[id]);
  const auto got_second = torch::autograd::grad({got[0].pow(2).sum()}, {mine});
  expect_close(got_second[0], second[id]);
}

class NnTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, NnTest, rank_modes(), rank_mode_name);

TEST_P(NnTest, AllReduce) {
  RankGroup(kRanks, GetParam()).run([](Rank& r) {
    const auto group = ProcessGroup::from(make_backend(r));
    struct Case {
      ReduceOptions options;
      std::function<at::Tensor(const at::Tensor&)> over_ranks;
    };
    const std::vector<Case> cases = {
        {{}, [](const at::Tensor& all) { return all.sum(0); }},
        {{.op = ReduceOp::kAvg}, [](const at::Tensor& all) { return all.mean(0); }},
        {{.op = ReduceOp::kPremulSum, .factor = 0.25},
         [](const at::Tensor& all) { return (0.25 * all).sum(0); }},
        {{.op = ReduceOp::kMax}, [](const at::Tensor& all) { return at::amax(all, 0); }},
        {{.op = ReduceOp::kMin}, [](const at::Tensor& all) { return at::amin(all, 0); }},
    };
    for (const auto& one : cases) {
      compare(
          group, {4, 5},
          [&](const at::Tensor& tensor) { return nn::all_reduce(tensor, group, one.options); },
          [&](const Tensors& all) { return Tensors(kRanks, one.over_ranks(at::stack(all))); });
    }
    EXPECT_THAT(text_of([&] { nn::all_reduce(full(1, {2}), group, {.op = ReduceOp::kProduct}); }),
                HasSubstr("no gradient"));
  });
}

// Equal values share the gradient.
TEST(NnTest, TiesShare) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = ProcessGroup::from(make_backend(r));
    auto x = at::tensor({1.0, r.id() + 1.0}).requires_grad_();
    nn::all_reduce(x, group, {.op = ReduceOp::kMax}).sum().backward();
    expect_equal(x.grad(), r.id() == 0 ? at::tensor({1.0, 0.0}) : at::tensor({1.0, 2.0}));
  });
}

TEST_P(NnTest, GatherAndScatter) {
  RankGroup(kRanks, GetParam()).run([](Rank& r) {
    const auto group = ProcessGroup::from(make_backend(r));
    compare(
        group, {2, 3}, [&](const at::Tensor& tensor) { return nn::all_gather(tensor.t(), group); },
        [](const Tensors& all) { return Tensors(kRanks, at::stack(all).transpose(1, 2)); });
    for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum}) {
      compare(
          group, {6, 2},
          [&](const at::Tensor& tensor) {
            return nn::reduce_scatter(tensor, group, {.op = op, .factor = 3});
          },
          [&](const Tensors& all) {
            auto sum = at::stack(all).sum(0);
            if (op == ReduceOp::kAvg) sum = sum / kRanks;
            if (op == ReduceOp::kPremulSum) sum = sum * 3;
            return sum.chunk(kRanks);
          });
    }
    EXPECT_THAT(text_of([&] { nn::reduce_scatter(full(1, {4}), group); }),
                HasSubstr("cannot be cut into 3 equal parts"));
  });
}

TEST_P(NnTest, AllToAllAndBroadcast) {
  RankGroup(kRanks, GetParam()).run([](Rank& r) {
    const auto group = ProcessGroup::from(make_backend(r));
    const auto exchanged = [](const Tensors& all, const std::vector<int64_t>& splits) {
      Tensors outputs;
      for (std::size_t to = 0; to < kRanks; ++to) {
        Tensors parts;
        for (const auto& tensor : all) parts.push_back(tensor.split_with_sizes(splits)[to]);
        outputs.push_back(at::cat(parts));
      }
      return outputs;
    };
    compare(
        group, {6, 2}, [&](const at::Tensor& tensor) { return nn::all_to_all(tensor, group); },
        [&](const Tensors& all) { return exchanged(all, {2, 2, 2}); });
    // Rows of their own for each receiver, none for the first; as one tensor and as a list.
    const std::vector<int64_t> splits = {0, 1, 3};
    const auto rows = splits[static_cast<std::size_t>(r.id())];
    compare(
        group, {4, 2},
        [&](const at::Tensor& tensor) {
          return nn::all_to_all(
              tensor, group,
              {.output_splits = std::vector<int64_t>(kRanks, rows), .input_splits = splits});
        },
        [&](const Tensors& all) { return exchanged(all, splits); });
    compare(
        group, {4, 2},
        [&](const at::Tensor& tensor) {
          return at::cat(nn::all_to_all(tensor.split_with_sizes(splits), group));
        },
        [&](const Tensors& all) { return exchanged(all, splits); });
    compare(
        group, {5},
        [&](const at::Tensor& tensor) { return nn::broadcast(tensor, group, {.root = 1}); },
        [](const Tensors& all) { return Tensors(kRanks, all[1] * 1 + 0 * (all[0] + all[2])); });
  });
}

}  // namespace
}  // namespace convoy::test
