#pragma once

#include <ATen/core/Tensor.h>

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
using OptimizerRule = std::variant<Sgd, Adam, AdamW, Adagrad, RmsProp, Adadelta, Adamax, Rprop>;

// True for the rule types above.
template <class T>
concept IsRule = requires(OptimizerRule& rule) { std::get_if<T>(&rule); };

// Converts libtorch's options to a rule: those of SGD, Adam, AdamW, Adagrad and RMSprop. Throws
// kInvalidArgument for other options.
OptimizerRule rule_of(const torch::optim::OptimizerOptions& options);

// Parameters that share one rule.
struct OptimizerGroup {
  std::vector<at::Tensor> parameters;
  OptimizerRule rule;
};

}  // namespace convoy
