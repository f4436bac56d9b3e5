#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// Steps of optimizers over plain memory, in one pass. Element by element and in the type of the
// elements: bits depend neither on the CPU nor on how a tensor is divided. Without torch, for
// whoever has spans to update: a bucket, a shard.
namespace convoy {

// What else a step does in its one pass, over numbers whose state survives this process.
template <class T>
struct Passage {
  // A CommitWord, `changing` this journal while the step goes on; nullptr: none of all this. Before
  // numbers of a state are changed they are copied to its journal, by the place of the state in the
  // step's memory, and counted in the word.
  std::uint64_t* word = nullptr;
  std::size_t journal = 0;
  std::array<T*, 3> copies = {};
  // The gradient of a second rank: the step is one with the sum of both, times `share`.
  const T* second_gradient = nullptr;
  T share = 1;
};

// Numbers that a rule keeps for each one of a parameter, at most. Which: SGD the momentum; Adam
// and AdamW means, squares, largest squares; Adagrad the sum; RMSprop squares, momentum, means;
// Adadelta squares, squares of changes; Adamax means, largest, which fade; Rprop the size of each
// number's step, which begins with the learning rate, and its last gradient.
inline constexpr std::size_t kMostStates = 3;

// What a step works on.
template <class T>
struct RuleMemory {
  T* parameter;
  const T* gradient;
  std::array<T*, kMostStates> states;  // nullptr where it keeps none
  Passage<T> passage = {};
};

struct SgdStep {
  double lr = 0;
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;         // the momentum buffer becomes the gradient
  double gradient_scale = 1;  // of clipping
};
struct AdamStep {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false;
  bool decoupled = true;    // weight decay as AdamW has it; false: as a part of the gradient
  std::int64_t number = 1;  // of this step, for the corrections of the averages
  double gradient_scale = 1;
};
struct AdagradStep {
  double lr = 0;
  double lr_decay = 0, weight_decay = 0, eps = 1e-10;
  std::int64_t number = 1;  // of this step, for the decay
  double gradient_scale = 1;
};
struct RmsPropStep {
  double lr = 0;
  double alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false;
  double gradient_scale = 1;
};
struct AdadeltaStep {
  double lr = 1;
  double rho = 0.9, eps = 1e-6, weight_decay = 0;
  double gradient_scale = 1;
};
struct AdamaxStep {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  std::int64_t number = 1;
  double gradient_scale = 1;
};
struct RpropStep {
  double eta_minus = 0.5, eta_plus = 1.2, step_min = 1e-6, step_max = 50;
  double gradient_scale = 1;
};

// One step of each rule, over so many numbers.
#define CONVOY_RULE_STEP(Step)                                                          \
  void rule_step(const Step& step, const RuleMemory<float>& memory, std::size_t count); \
  void rule_step(const Step& step, const RuleMemory<double>& memory, std::size_t count)
CONVOY_RULE_STEP(SgdStep);
CONVOY_RULE_STEP(AdamStep);
CONVOY_RULE_STEP(AdagradStep);
CONVOY_RULE_STEP(RmsPropStep);
CONVOY_RULE_STEP(AdadeltaStep);
CONVOY_RULE_STEP(AdamaxStep);
CONVOY_RULE_STEP(RpropStep);
#undef CONVOY_RULE_STEP

// In f64, in an order that is always the same.
double sum_of_squares(const float* values, std::size_t count);
double sum_of_squares(const double* values, std::size_t count);
// NaN if there is one.
double largest_magnitude(const float* values, std::size_t count);
double largest_magnitude(const double* values, std::size_t count);

}  // namespace convoy
