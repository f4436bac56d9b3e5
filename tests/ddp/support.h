#pragma once

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <mutex>

#include "convoy/allocator.h"
#include "convoy/ddp.h"
#include "convoy/error.h"
#include "convoy/init.h"
#include "group/support.h"

namespace convoy::test {

using namespace std::chrono_literals;

// CONVOY_ALLOCATOR=1: all of it with the step allocator.
inline const bool kAllocatorAsAsked = (install_allocator_if_asked(), is_allocator_installed());

inline ProcessGroup make_world(const Rank& r, const std::string& name = "world") {
  return new_group(
      "convoy",
      {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = r.size(), .name = name});
}

// Runs `function(rank, world)` on ranks that are threads.
inline void run_ranks(int size, const std::function<void(Rank&, const ProcessGroup&)>& function) {
  RankGroup(size, RankMode::kThreads).run([&](Rank& r) { function(r, make_world(r)); });
}

// A module made with the same random numbers on every rank. Ranks that are threads share the
// generator.
inline std::mutex generator_mutex;
template <class Make>
auto seeded(std::uint64_t seed, Make make) {
  const std::scoped_lock lock(generator_mutex);
  torch::manual_seed(seed);
  return make();
}

inline at::Tensor random(std::uint64_t seed, at::IntArrayRef sizes,
                         const at::TensorOptions& options = {}) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), options);
}

// The Net of PyTorch's tests: 2 -> 10 -> 50 -> 4.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool bias = false)
      : fc1(register_module("fc1", linear(2, 10, bias))),
        fc2(register_module("fc2", linear(10, 50, bias))),
        fc3(register_module("fc3", linear(50, 4, bias))) {}
  static torch::nn::Linear linear(int in, int out, bool bias) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::softmax(fc3(torch::relu(fc2(torch::relu(fc1(x))))), 1);
  }
  torch::nn::Linear fc1, fc2, fc3;
};
TORCH_MODULE(Net);

struct SharedWeightImpl : torch::nn::Module {
  SharedWeightImpl() : p(register_parameter("p", at::ones({64, 64}))) {}
  at::Tensor forward(const at::Tensor& x) { return (p * x + p).sum(); }
  at::Tensor p;
};
TORCH_MODULE(SharedWeight);

// The modes that every numeric test runs in.
struct Mode {
  std::string name;
  DdpOptions options;
};
inline std::vector<Mode> modes() {
  return {
      {"views", {.launch = BucketLaunch::kEarly}},
      {"copies", {.gradient_as_bucket_view = false, .launch = BucketLaunch::kLate}},
      {"small buckets", {.bucket_cap_mb = 0.001, .launch = BucketLaunch::kEarly}},
      {"small buckets, late", {.bucket_cap_mb = 0.001, .launch = BucketLaunch::kLate}},
      {"find_unused",
       {.bucket_cap_mb = 0.001, .find_unused_parameters = true, .launch = BucketLaunch::kEarly}},
      {"static", {.bucket_cap_mb = 0.001, .static_graph = true, .launch = BucketLaunch::kEarly}},
      {"static copies", {.static_graph = true, .gradient_as_bucket_view = false}}};
}

inline at::Tensor input_of(int rank, int step, at::IntArrayRef sizes = {2, 2}) {
  return random(
      std::uint64_t{100} * static_cast<std::uint64_t>(step) + static_cast<std::uint64_t>(rank) + 1,
      sizes);
}

inline std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const auto& p : module.parameters()) {
    found.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  }
  return found;
}

// What the ranks' gradients have to be: computed by one, for the inputs of all.
template <class Module, class Loss>
std::vector<at::Tensor> mean_gradients(Module& module, int ranks, Loss loss) {
  std::vector<at::Tensor> sum;
  for (int r = 0; r < ranks; ++r) {
    module.zero_grad();
    loss(module, r).backward();
    const auto one = gradients_of(module);
    if (sum.empty()) sum.resize(one.size());
    for (std::size_t i = 0; i < one.size(); ++i) {
      if (one[i].defined()) sum[i] = sum[i].defined() ? sum[i] + one[i] : one[i];
    }
  }
  for (auto& tensor : sum) {
    if (tensor.defined()) tensor = tensor / ranks;
  }
  module.zero_grad();
  return sum;
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected,
                         const std::string& what = "") {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  EXPECT_TRUE(at::allclose(actual, expected, 1.3e-6, 1e-5))
      << what << ": off by up to " << (actual - expected).abs().max();
}

inline void expect_gradients(const torch::nn::Module& module,
                             const std::vector<at::Tensor>& expected) {
  const auto parameters = module.named_parameters();
  std::size_t i = 0;
  for (const auto& item : parameters)
    expect_close(item.value().grad(), expected.at(i++), item.key());
}

// To the bit.
inline void expect_equal_on_all(const ProcessGroup& world, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const auto all = world.all_gather(tensor.detach().contiguous());
    for (int r = 1; r < world.size(); ++r) {
      EXPECT_TRUE(at::equal(all[0], all[r])) << all[0] << "\nrank " << r << "\n" << all[r];
    }
  }
}

}  // namespace convoy::test
