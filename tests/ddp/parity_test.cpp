// The same training as with Python's DistributedDataParallel on Gloo: python_oracle.py has the same
// models, from the same parameters and on the same data, and writes what it got after each step.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/concat.h"
#include "ddp/support.h"
#include "group/launched_ranks.h"

namespace convoy::test {
namespace {

using torch::nn::Linear;

constexpr int kSteps = 3;

// As in python_oracle.py.
at::Tensor wave(std::int64_t count, double phase, double scale = 1) {
  const auto x = at::arange(count, at::kDouble);
  return x.mul(0.7).add(phase).sin().mul(scale).to(at::kFloat);
}

at::Tensor tokens(std::int64_t count, std::int64_t limit, std::int64_t phase) {
  return at::arange(count, at::kLong).mul(7).add(phase).remainder(limit);
}

// A model makes its own data.
struct ModelImpl : torch::nn::Module {
  virtual at::Tensor forward(std::int64_t phase) = 0;
};

struct MlpImpl : ModelImpl {
  MlpImpl()
      : first(register_module("first", Linear(8, 16))),
        second(register_module("second", Linear(16, 16))),
        last(register_module("last", Linear(16, 4))) {}
  at::Tensor forward(std::int64_t phase) override {
    const auto x = wave(5 * 8, static_cast<double>(phase)).view({5, 8});
    return last(torch::relu(second(torch::relu(first(x)))));
  }
  Linear first, second, last;
};

struct ConvNetImpl : ModelImpl {
  ConvNetImpl()
      : first(register_module("first",
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(8))),
        second(register_module("second",
                               torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 6, 3).stride(2)))),
        last(register_module("last", Linear(6, 4))) {
    for (auto& parameter : parameters()) {
      if (parameter.dim() != 4) continue;
      parameter.set_data(parameter.detach().contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  at::Tensor forward(std::int64_t phase) override {
    const auto x = wave(4 * 3 * 9 * 9, static_cast<double>(phase))
                       .view({4, 3, 9, 9})
                       .contiguous(at::MemoryFormat::ChannelsLast);
    return last(second(torch::relu(norm(first(x)))).mean({2, 3}));
  }
  torch::nn::Conv2d first;
  torch::nn::BatchNorm2d norm;
  torch::nn::Conv2d second;
  Linear last;
};

struct GptBlockImpl : ModelImpl {
  static torch::nn::LayerNorm layer_norm() {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({16}));
  }
  GptBlockImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(11, 16))),
        norm1(register_module("norm1", layer_norm())),
        norm2(register_module("norm2", layer_norm())),
        qkv(register_module("qkv", Linear(16, 48))),
        out(register_module("out", Linear(16, 16))),
        up(register_module("up", Linear(16, 64))),
        down(register_module("down", Linear(64, 16))) {}
  at::Tensor forward(std::int64_t phase) override {
    auto x = embedding(tokens(2 * 6, 11, phase).view({2, 6}));
    const auto parts = qkv(norm1(x)).view({2, 6, 3, 4, 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + out(y.transpose(1, 2).reshape({2, 6, 16}));
    return x + down(torch::gelu(up(norm2(x))));
  }
  torch::nn::Embedding embedding;
  torch::nn::LayerNorm norm1, norm2;
  Linear qkv, out, up, down;
};

struct BagImpl : ModelImpl {
  BagImpl()
      : bag(register_module(
            "bag", torch::nn::EmbeddingBag(
                       torch::nn::EmbeddingBagOptions(23, 6).mode(torch::kSum).sparse(true)))),
        last(register_module("last", Linear(6, 3))) {}
  at::Tensor forward(std::int64_t phase) override {
    const auto rows = tokens(12, 23, phase).remainder(17);
    return last(bag(rows, at::tensor({0, 5, 9}, at::kLong)));
  }
  torch::nn::EmbeddingBag bag;
  Linear last;
};

std::shared_ptr<ModelImpl> make_model(const std::string& name) {
  if (name == "mlp") return std::make_shared<MlpImpl>();
  if (name == "conv") return std::make_shared<ConvNetImpl>();
  if (name == "gpt") return std::make_shared<GptBlockImpl>();
  return std::make_shared<BagImpl>();
}

// Python's modes. Its default copies gradients; ours has views. The cap makes several buckets.
const std::map<std::string, DdpOptions>& modes() {
  constexpr double kCap = 0.001;
  static const std::map<std::string, DdpOptions> all{
      {"default", {.bucket_cap_mb = kCap, .gradient_as_bucket_view = false}},
      {"gradient_as_bucket_view", {.bucket_cap_mb = kCap}},
      {"find_unused_parameters", {.bucket_cap_mb = kCap, .find_unused_parameters = true}},
      {"static_graph", {.bucket_cap_mb = kCap, .static_graph = true}}};
  return all;
}

// What Python got, by name; undefined where it had none.
using Oracle = std::map<std::string, at::Tensor>;

Oracle ask_python() {
  Oracle oracle;
  std::string folder = (std::filesystem::temp_directory_path() / "convoy-parity.XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) {
    ADD_FAILURE() << "no folder " << folder;
    return oracle;
  }
  const auto result =
      run_one({CONVOY_PYTHON, CONVOY_ORACLE, folder},
              {{"TMPDIR", folder}, {"GLOO_SOCKET_IFNAME", "lo"}, {"PYTHONDONTWRITEBYTECODE", "1"}});
  EXPECT_EQ(result.code, 0) << result.output;
  std::ifstream index(folder + "/index"), values(folder + "/values", std::ios::binary);
  std::string name;
  for (std::int64_t count = 0; index >> name >> count;) {
    at::Tensor& tensor = oracle[name];
    if (count < 0) continue;
    tensor = at::empty({count});
    values.read(static_cast<char*>(tensor.mutable_data_ptr()),
                count * static_cast<std::int64_t>(sizeof(float)));
    EXPECT_TRUE(values) << name;
  }
  std::filesystem::remove_all(folder);
  return oracle;
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_sparse() ? tensor.to_dense() : tensor;
}

void expect_as_python(const Oracle& oracle, const std::string& name, const at::Tensor& tensor) {
  const auto found = oracle.find(name);
  if (found == oracle.end()) {
    ADD_FAILURE() << "Python has no " << name;
  } else if (tensor.defined()) {
    expect_close(tensor.detach().to(at::kFloat).contiguous().view({-1}), found->second, name);
  } else {
    expect_close(tensor, found->second, name);
  }
}

void train(const ProcessGroup& world, const std::string& name, const std::string& mode,
           const Oracle& oracle) {
  const auto net = make_model(name);
  if (mode == "find_unused_parameters") net->register_module("idle", Linear(3, 2));
  {
    const torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : net->parameters()) {
      parameter.copy_(wave(parameter.numel(), phase += 1, 0.2).view(parameter.sizes()));
    }
  }
  DistributedDataParallel model(net, world, modes().at(mode));
  torch::optim::SGD sgd(net->parameters(), 0.01);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    model(10 * step + world.rank()).square().sum().backward();
    sgd.step();

    std::vector<at::Tensor> same;
    const auto prefix = concat(world.size(), "/", name, "/", mode, "/", step, "/");
    for (const auto& item : net->named_parameters()) {
      const at::Tensor gradient = dense(item.value().grad());
      same.push_back(item.value());
      if (gradient.defined()) same.push_back(gradient);
      expect_as_python(oracle, prefix + "parameter/" + item.key(), item.value());
      expect_as_python(oracle, prefix + "gradient/" + item.key(), gradient);
    }
    expect_equal_on_all(world, same);
    if (world.rank() != 0) continue;  // statistics of a batch are each rank's own
    for (const auto& item : net->named_buffers()) {
      expect_as_python(oracle, prefix + "buffer/" + item.key(), item.value());
    }
  }
}

// One test for all: Python needs seconds to start.
TEST(ParityTest, WithPythonOnGloo) {
  const Oracle oracle = ask_python();
  ASSERT_FALSE(oracle.empty());
  for (const int size : {2, 3, 4}) {
    run_ranks(size, [&](Rank&, const ProcessGroup& world) {
      for (const char* name : {"mlp", "conv", "gpt", "bag"}) {
        for (const auto& [mode, options] : modes()) train(world, name, mode, oracle);
      }
    });
  }
}

}  // namespace
}  // namespace convoy::test
