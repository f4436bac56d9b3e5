#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <type_traits>
#include <variant>
#include <vector>

namespace torch::optim {
class OptimizerOptions;
}

// Update rules: how one step changes a parameter. All optimizers of this library use them. Names
// and defaults are those of torch.optim.
//
//   convoy::OptimizerInBackward optimizer(model.reducer(), convoy::AdamW{.lr = 3e-4});
//   convoy::ShardedOptimizer optimizer(model.reducer(), convoy::Sgd{.lr = 0.05});
namespace convoy {

struct Sgd {
  double lr = 1e-3;
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;  // ascend the gradient instead of descending
};
struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
};
struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
};
struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10;
  bool maximize = false;
};
struct RmsProp {
  double lr = 1e-2;
  double alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false;
  bool maximize = false;
};
// The next three exist in Python's torch.optim, but not in libtorch.
struct Adadelta {
  double lr = 1;
  double rho = 0.9, eps = 1e-6, weight_decay = 0;
  bool maximize = false;
};
struct Adamax {
  double lr = 2e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool maximize = false;
};
struct Rprop {
  double lr = 1e-2;  // the first step size; later ones adapt
  double eta_minus = 0.5, eta_plus = 1.2;
  double step_min = 1e-6, step_max = 50;
  bool maximize = false;
};

namespace detail {
using RuleVariant = std::variant<Sgd, Adam, AdamW, Adagrad, RmsProp, Adadelta, Adamax, Rprop>;
template <class T, class... Rules>
consteval bool is_one_of(std::type_identity<std::variant<Rules...>>) {
  return (std::same_as<T, Rules> || ...);
}
}  // namespace detail

// True for the rule types above.
template <class T>
concept IsRule = detail::is_one_of<T>(std::type_identity<detail::RuleVariant>());

// One of these rules. std::visit, std::get and the like take it as a variant. It is made from a
// rule, or from libtorch's options: those of SGD, Adam, AdamW, Adagrad and RMSprop.
//
//   convoy::OptimizerInBackward optimizer(model.reducer(), torch::optim::AdamWOptions(3e-4));
struct OptimizerRule : detail::RuleVariant {
  using variant::variant;
  OptimizerRule() = default;
  // Throws kInvalidArgument for options of other optimizers.
  // NOLINTNEXTLINE(google-explicit-constructor)
  OptimizerRule(const torch::optim::OptimizerOptions& options);
};

// The same conversion as a function.
OptimizerRule rule_of(const torch::optim::OptimizerOptions& options);

// Parameters that share one rule.
struct OptimizerGroup {
  std::vector<at::Tensor> parameters;
  OptimizerRule rule;
};

}  // namespace convoy
