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

struct SgdStep {
  double lr = 0;
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;         // the momentum buffer becomes the gradient
  double gradient_scale = 1;  // of clipping
};
// `buffer` is not used if momentum is 0.
void sgd_step(const SgdStep& step, float* parameter, const float* gradient, float* buffer,
              std::size_t count, const Passage<float>& passage = {});
void sgd_step(const SgdStep& step, double* parameter, const double* gradient, double* buffer,
              std::size_t count, const Passage<double>& passage = {});

struct AdamStep {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = true;    // weight decay as AdamW has it; false: as a part of the gradient
  std::int64_t number = 1;  // of this step, for the corrections of the averages
  double gradient_scale = 1;
};
// `largest`: of the second moments so far (amsgrad); may be nullptr.
template <class T>
struct AdamMemory {
  T* parameter;
  const T* gradient;
  T* mean;
  T* square;
  T* largest;
};
void adam_step(const AdamStep& step, const AdamMemory<float>& memory, std::size_t count,
               const Passage<float>& passage = {});
void adam_step(const AdamStep& step, const AdamMemory<double>& memory, std::size_t count,
               const Passage<double>& passage = {});

struct AdagradStep {
  double lr = 0;
  double lr_decay = 0, weight_decay = 0, eps = 1e-10;
  std::int64_t number = 1;  // of this step, for the decay
  double gradient_scale = 1;
};
void adagrad_step(const AdagradStep& step, float* parameter, const float* gradient, float* sum,
                  std::size_t count, const Passage<float>& passage = {});
void adagrad_step(const AdagradStep& step, double* parameter, const double* gradient, double* sum,
                  std::size_t count, const Passage<double>& passage = {});

struct RmsPropStep {
  double lr = 0;
  double alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  double gradient_scale = 1;
};
// `buffer` is there if momentum is not 0; `mean` may be nullptr: not centered.
template <class T>
struct RmsPropMemory {
  T* parameter;
  const T* gradient;
  T* square;
  T* buffer;
  T* mean;
};
void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<float>& memory, std::size_t count,
                  const Passage<float>& passage = {});
void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<double>& memory, std::size_t count,
                  const Passage<double>& passage = {});

// Of the next three: which states they are is said there.
template <class T>
struct TwoStates {
  T* parameter;
  const T* gradient;
  T* first;
  T* second;
};

struct AdadeltaStep {
  double lr = 1;
  double rho = 0.9, eps = 1e-6, weight_decay = 0;
  double gradient_scale = 1;
};
// Means of squares: of gradients, and of changes.
void adadelta_step(const AdadeltaStep& step, const TwoStates<float>& memory, std::size_t count,
                   const Passage<float>& passage = {});
void adadelta_step(const AdadeltaStep& step, const TwoStates<double>& memory, std::size_t count,
                   const Passage<double>& passage = {});

struct AdamaxStep {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  std::int64_t number = 1;
  double gradient_scale = 1;
};
// Means, and the largest magnitudes, which fade.
void adamax_step(const AdamaxStep& step, const TwoStates<float>& memory, std::size_t count,
                 const Passage<float>& passage = {});
void adamax_step(const AdamaxStep& step, const TwoStates<double>& memory, std::size_t count,
                 const Passage<double>& passage = {});

struct RpropStep {
  double eta_minus = 0.5, eta_plus = 1.2, step_min = 1e-6, step_max = 50;
  double gradient_scale = 1;
};
// The size of each number's step, which begins with the learning rate, and its last gradient.
void rprop_step(const RpropStep& step, const TwoStates<float>& memory, std::size_t count,
                const Passage<float>& passage = {});
void rprop_step(const RpropStep& step, const TwoStates<double>& memory, std::size_t count,
                const Passage<double>& passage = {});

// In f64, in an order that is always the same.
double sum_of_squares(const float* values, std::size_t count);
double sum_of_squares(const double* values, std::size_t count);
// NaN if there is one.
double largest_magnitude(const float* values, std::size_t count);
double largest_magnitude(const double* values, std::size_t count);

}  // namespace convoy
