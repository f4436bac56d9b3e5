#include "ddp/optimizer_kernels.h"

#include <cmath>

// Compiled with -O3 and without contraction: see CMakeLists.txt. The loops are plain, so that the
// compiler makes vectors of them; of two versions the CPU takes the one that it can run. Both give
// the same bits, as no operation is fused and sums have a fixed number of lanes.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define CONVOY_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CONVOY_CLONES
#endif
#define CONVOY_BODY inline __attribute__((always_inline))

namespace convoy {
namespace {

enum class Momentum { kNone, kPlain, kNesterov };

template <Momentum kMomentum, class T>
CONVOY_BODY void sgd(const SgdStep& step, T* __restrict parameter, const T* __restrict gradient,
                     T* __restrict buffer, std::size_t count) {
  const T rate = static_cast<T>(-step.lr), decay = static_cast<T>(step.weight_decay);
  const T scale = static_cast<T>(step.gradient_scale);
  const T momentum = static_cast<T>(step.momentum);
  // The first gradient is taken as it is, whatever the dampening.
  const bool first = step.first;
  const T fresh = first ? T{1} : static_cast<T>(1 - step.dampening);
  for (std::size_t i = 0; i < count; ++i) {
    T change = gradient[i] * scale + decay * parameter[i];
    if constexpr (kMomentum != Momentum::kNone) {
      const T moved = (first ? T{0} : buffer[i] * momentum) + change * fresh;
      buffer[i] = moved;
      change = kMomentum == Momentum::kNesterov ? change + momentum * moved : moved;
    }
    parameter[i] += rate * change;
  }
}

template <class T>
CONVOY_BODY void sgd_any(const SgdStep& step, T* parameter, const T* gradient, T* buffer,
                         std::size_t count) {
  if (step.momentum == 0) {
    sgd<Momentum::kNone, T>(step, parameter, gradient, nullptr, count);
  } else if (step.nesterov) {
    sgd<Momentum::kNesterov, T>(step, parameter, gradient, buffer, count);
  } else {
    sgd<Momentum::kPlain, T>(step, parameter, gradient, buffer, count);
  }
}

template <bool kLargest, class T>
CONVOY_BODY void adam(const AdamStep& step, const AdamMemory<T>& memory, std::size_t count) {
  T* __restrict parameter = memory.parameter;
  const T* __restrict gradient = memory.gradient;
  T* __restrict mean = memory.mean;
  T* __restrict square = memory.square;
  T* __restrict largest = memory.largest;
  const auto number = static_cast<double>(step.number);
  const double root = std::sqrt(1 - std::pow(step.beta2, number));
  const T rate = static_cast<T>(-step.lr / (1 - std::pow(step.beta1, number)));
  const T correction = static_cast<T>(root), eps = static_cast<T>(step.eps);
  const T shrink = static_cast<T>(step.decoupled ? 1 - step.lr * step.weight_decay : 1);
  const T decay = static_cast<T>(step.decoupled ? 0 : step.weight_decay);
  const T scale = static_cast<T>(step.gradient_scale);
  const T beta1 = static_cast<T>(step.beta1), beta2 = static_cast<T>(step.beta2);
  const T rest1 = static_cast<T>(1 - step.beta1), rest2 = static_cast<T>(1 - step.beta2);
  for (std::size_t i = 0; i < count; ++i) {
    const T change = gradient[i] * scale + decay * parameter[i];
    const T m = mean[i] * beta1 + change * rest1;
    T v = square[i] * beta2 + rest2 * change * change;
    mean[i] = m;
    square[i] = v;
    if constexpr (kLargest) {
      // Not std::max, which would lose a NaN.
      v = largest[i] > v ? largest[i] : v;
      largest[i] = v;
    }
    const T bottom = std::sqrt(v) / correction + eps;
    parameter[i] = parameter[i] * shrink + rate * (m / bottom);
  }
}

template <class T>
CONVOY_BODY void adam_any(const AdamStep& step, const AdamMemory<T>& memory, std::size_t count) {
  if (memory.largest == nullptr) {
    adam<false, T>(step, memory, count);
  } else {
    adam<true, T>(step, memory, count);
  }
}

template <class T>
CONVOY_BODY void adagrad(const AdagradStep& step, T* __restrict parameter,
                         const T* __restrict gradient, T* __restrict sum, std::size_t count) {
  const auto before = static_cast<double>(step.number - 1);
  const T rate = static_cast<T>(-step.lr / (1 + before * step.lr_decay));
  const T decay = static_cast<T>(step.weight_decay), eps = static_cast<T>(step.eps);
  const T scale = static_cast<T>(step.gradient_scale);
  for (std::size_t i = 0; i < count; ++i) {
    const T change = gradient[i] * scale + decay * parameter[i];
    const T all = sum[i] + change * change;
    sum[i] = all;
    parameter[i] += rate * (change / (std::sqrt(all) + eps));
  }
}

template <bool kMomentum, bool kCentered, class T>
CONVOY_BODY void rmsprop(const RmsPropStep& step, const RmsPropMemory<T>& memory,
                         std::size_t count) {
  T* __restrict parameter = memory.parameter;
  const T* __restrict gradient = memory.gradient;
  T* __restrict square = memory.square;
  T* __restrict buffer = memory.buffer;
  T* __restrict mean = memory.mean;
  const T rate = static_cast<T>(-step.lr), decay = static_cast<T>(step.weight_decay);
  const T scale = static_cast<T>(step.gradient_scale), eps = static_cast<T>(step.eps);
  const T alpha = static_cast<T>(step.alpha), rest = static_cast<T>(1 - step.alpha);
  const T momentum = static_cast<T>(step.momentum);
  for (std::size_t i = 0; i < count; ++i) {
    const T change = gradient[i] * scale + decay * parameter[i];
    T v = square[i] * alpha + rest * change * change;
    square[i] = v;
    if constexpr (kCentered) {
      const T m = mean[i] * alpha + rest * change;
      mean[i] = m;
      v = v - m * m;
    }
    T moved = change / (std::sqrt(v) + eps);
    if constexpr (kMomentum) {
      moved = buffer[i] * momentum + moved;
      buffer[i] = moved;
    }
    parameter[i] += rate * moved;
  }
}

template <class T>
CONVOY_BODY void rmsprop_any(const RmsPropStep& step, const RmsPropMemory<T>& memory,
                             std::size_t count) {
  const bool moves = step.momentum != 0;
  if (memory.mean == nullptr) {
    moves ? rmsprop<true, false, T>(step, memory, count)
          : rmsprop<false, false, T>(step, memory, count);
  } else {
    moves ? rmsprop<true, true, T>(step, memory, count)
          : rmsprop<false, true, T>(step, memory, count);
  }
}

constexpr std::size_t kLanes = 8;

template <class T>
CONVOY_BODY double squares(const T* values, std::size_t count) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t k = 0; k < kLanes; ++k) {
      const double value = values[i + k];
      lanes[k] += value * value;
    }
  }
  for (std::size_t k = 0; i < count; ++i, ++k) {
    const double value = values[i];
    lanes[k] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class T>
CONVOY_BODY double magnitude(const T* values, std::size_t count) {
  T found = 0;
  T nothing = 0;  // stays 0 unless there is a NaN (or an infinity, which `found` has too)
  for (std::size_t i = 0; i < count; ++i) {
    const T value = std::abs(values[i]);
    found = value > found ? value : found;
    nothing += value != value ? value : T{0};
  }
  return static_cast<double>(found) + static_cast<double>(nothing);
}

}  // namespace

CONVOY_CLONES void sgd_step(const SgdStep& step, float* parameter, const float* gradient,
                            float* buffer, std::size_t count) {
  sgd_any(step, parameter, gradient, buffer, count);
}
CONVOY_CLONES void sgd_step(const SgdStep& step, double* parameter, const double* gradient,
                            double* buffer, std::size_t count) {
  sgd_any(step, parameter, gradient, buffer, count);
}
CONVOY_CLONES void adam_step(const AdamStep& step, const AdamMemory<float>& memory,
                             std::size_t count) {
  adam_any(step, memory, count);
}
CONVOY_CLONES void adam_step(const AdamStep& step, const AdamMemory<double>& memory,
                             std::size_t count) {
  adam_any(step, memory, count);
}
CONVOY_CLONES void adagrad_step(const AdagradStep& step, float* parameter, const float* gradient,
                                float* sum, std::size_t count) {
  adagrad(step, parameter, gradient, sum, count);
}
CONVOY_CLONES void adagrad_step(const AdagradStep& step, double* parameter, const double* gradient,
                                double* sum, std::size_t count) {
  adagrad(step, parameter, gradient, sum, count);
}
CONVOY_CLONES void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<float>& memory,
                                std::size_t count) {
  rmsprop_any(step, memory, count);
}
CONVOY_CLONES void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<double>& memory,
                                std::size_t count) {
  rmsprop_any(step, memory, count);
}
CONVOY_CLONES double sum_of_squares(const float* values, std::size_t count) {
  return squares(values, count);
}
CONVOY_CLONES double sum_of_squares(const double* values, std::size_t count) {
  return squares(values, count);
}
CONVOY_CLONES double largest_magnitude(const float* values, std::size_t count) {
  return magnitude(values, count);
}
CONVOY_CLONES double largest_magnitude(const double* values, std::size_t count) {
  return magnitude(values, count);
}

}  // namespace convoy
