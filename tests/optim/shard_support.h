#pragma once

#include "convoy/sharded_optimizer.h"
#include "ddp/support.h"

namespace convoy::test {

// Two blocks and more in its second matrix, and less than one in the others.
inline torch::nn::Sequential make_net() {
  return seeded(21, [] {
    return torch::nn::Sequential(torch::nn::Linear(6, 300), torch::nn::Tanh(),
                                 torch::nn::Linear(300, 250), torch::nn::Tanh(),
                                 torch::nn::Linear(250, 3));
  });
}

inline void expect_close_parameters(const torch::nn::Module& actual,
                                    const torch::nn::Module& expected) {
  const auto a = actual.parameters(), e = expected.parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i], e[i], 1e-6, 1e-6))
        << i << ": off by " << (a[i] - e[i]).abs().max();
  }
}
inline void expect_equal_parameters(const torch::nn::Module& actual,
                                    const torch::nn::Module& expected) {
  const auto a = actual.parameters(), e = expected.parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], e[i])) << i << ": off by " << (a[i] - e[i]).abs().max();
  }
}
inline std::vector<at::Tensor> copies_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> made;
  for (const auto& p : module.parameters()) made.push_back(p.detach().clone());
  return made;
}

// The ways in which a sharded optimizer steps.
struct How {
  std::string name;
  DdpOptions options;
  bool in_backward = false;
};
inline std::vector<How> hows() {
  return {
      {"at step", {}},
      {"at step, copies", {.gradient_as_bucket_view = false}},
      {"in backward, late", {.launch = BucketLaunch::kLate}, true},
      {"in backward, overlapped", {.bucket_cap_mb = 0.05, .launch = BucketLaunch::kEarly}, true}};
}

}  // namespace convoy::test
