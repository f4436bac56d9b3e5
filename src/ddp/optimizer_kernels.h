#pragma once

#include <cstddef>
#include <cstdint>

// Steps of optimizers over plain memory, in one pass. Element by element and in the type of the
// elements: bits depend neither on the CPU nor on how a tensor is divided. Without torch, for
// whoever has spans to update: a bucket, a shard.
namespace convoy {

struct SgdStep {
  double lr = 0;
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;         // the momentum buffer becomes the gradient
  double gradient_scale = 1;  // of clipping
};
// `buffer` is not used if momentum is 0.
void sgd_step(const SgdStep& step, float* parameter, const float* gradient, float* buffer,
              std::size_t count);
void sgd_step(const SgdStep& step, double* parameter, const double* gradient, double* buffer,
              std::size_t count);

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
void adam_step(const AdamStep& step, const AdamMemory<float>& memory, std::size_t count);
void adam_step(const AdamStep& step, const AdamMemory<double>& memory, std::size_t count);

struct AdagradStep {
  double lr = 0;
  double lr_decay = 0, weight_decay = 0, eps = 1e-10;
  std::int64_t number = 1;  // of this step, for the decay
  double gradient_scale = 1;
};
void adagrad_step(const AdagradStep& step, float* parameter, const float* gradient, float* sum,
                  std::size_t count);
void adagrad_step(const AdagradStep& step, double* parameter, const double* gradient, double* sum,
                  std::size_t count);

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
void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<float>& memory, std::size_t count);
void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<double>& memory, std::size_t count);

// In f64, in an order that is always the same.
double sum_of_squares(const float* values, std::size_t count);
double sum_of_squares(const double* values, std::size_t count);
// NaN if there is one.
double largest_magnitude(const float* values, std::size_t count);
double largest_magnitude(const double* values, std::size_t count);

}  // namespace convoy
