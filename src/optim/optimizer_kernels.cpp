#include "optim/optimizer_kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "optim/commit_word.h"

// Compiled with -O3 and without contraction: see CMakeLists.txt. The loops are plain, so that the
// compiler makes vectors of them; of two versions the CPU takes the one that it can run. Both give
// the same bits, as no operation is fused and sums have a fixed number of lanes.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define CONVOY_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CONVOY_CLONES
#endif
#define CONVOY_BODY inline __attribute__((always_inline))
#define CONVOY_ELEMENT __attribute__((always_inline))
// The next loop's elements do not depend on each other.
#if defined(__clang__)
#define CONVOY_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define CONVOY_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace convoy {
namespace {

// Small enough to stay in registers: memory then sees one pass over all that there is to read, side
// by side.
constexpr std::size_t kPiece = 16;
// Bytes ahead that lines are asked for: there are more streams than the processor follows by
// itself.
constexpr std::size_t kAhead = 2048;

template <class T>
CONVOY_BODY void ask_for(const T* piece) {
  const auto* const ahead = reinterpret_cast<const char*>(piece) + kAhead;
  for (std::size_t line = 0; line < kPiece * sizeof(T); line += 64) {
    __builtin_prefetch(ahead + line, 0, 0);
  }
}

// A pass with all that Passage says: change(i, gradient) for every number.
template <bool kTwoGradients, class T, std::size_t kStates, class Change>
CONVOY_BODY void pass_with(const Passage<T>& passage, const T* gradient,
                           const std::array<T*, kStates>& states, std::size_t count,
                           const Change& change) {
  // Of its own: the barrier below would have it read again.
  const std::array<T*, 3> copies = passage.copies;
  const T* const second = passage.second_gradient;
  const T share = passage.share;
  const std::size_t journal = passage.journal;
  unsigned changing = 0;
  for (std::size_t s = 0; s < kStates; ++s) changing |= copies[s] != nullptr ? 1U << s : 0U;
  const std::atomic_ref<std::uint64_t> word(*passage.word);
  const auto piece = [&](std::size_t begin, std::size_t numbers) CONVOY_ELEMENT {
    T gradients[kPiece];
    CONVOY_INDEPENDENT
    for (std::size_t i = 0; i < numbers; ++i) {
      gradients[i] = gradient[begin + i];
      if constexpr (kTwoGradients) gradients[i] = (gradients[i] + second[begin + i]) * share;
    }
    for (std::size_t s = 0; s < kStates; ++s) {
      if (copies[s] == nullptr) continue;
      std::memcpy(copies[s] + begin, states[s] + begin, numbers * sizeof(T));
    }
    // Not before the copies, and not after what they are copies of.
    word.store(CommitWord::changing(journal, changing, begin + numbers), std::memory_order_release);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    CONVOY_INDEPENDENT
    for (std::size_t i = 0; i < numbers; ++i) change(begin + i, gradients[i]);
  };
  std::size_t begin = 0;
  for (; begin + kPiece <= count; begin += kPiece) {
    ask_for(gradient + begin);
    if constexpr (kTwoGradients) ask_for(second + begin);
    piece(begin, kPiece);
  }
  if (begin < count) piece(begin, count - begin);
}

template <class T, std::size_t kStates, class Change>
CONVOY_BODY void pass(const Passage<T>& passage, const T* gradient,
                      const std::array<T*, kStates>& states, std::size_t count,
                      const Change& change) {
  if (passage.word == nullptr) {
    CONVOY_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) change(i, gradient[i]);
  } else if (passage.second_gradient == nullptr) {
    pass_with<false>(passage, gradient, states, count, change);
  } else {
    pass_with<true>(passage, gradient, states, count, change);
  }
}

enum class Momentum { kNone, kPlain, kNesterov };

template <Momentum kMomentum, class T>
CONVOY_BODY void sgd(const SgdStep& step, T* parameter, const T* gradient, T* buffer,
                     std::size_t count, const Passage<T>& passage) {
  const T rate = static_cast<T>(-step.lr), decay = static_cast<T>(step.weight_decay);
  const T scale = static_cast<T>(step.gradient_scale);
  const T momentum = static_cast<T>(step.momentum);
  // The first gradient is taken as it is, whatever the dampening.
  const bool first = step.first;
  const T fresh = first ? T{1} : static_cast<T>(1 - step.dampening);
  const auto change_one = [=](std::size_t i, T own) CONVOY_ELEMENT {
    T change = own * scale + decay * parameter[i];
    if constexpr (kMomentum != Momentum::kNone) {
      const T moved = (first ? T{0} : buffer[i] * momentum) + change * fresh;
      buffer[i] = moved;
      change = kMomentum == Momentum::kNesterov ? change + momentum * moved : moved;
    }
    parameter[i] += rate * change;
  };
  pass<T, 1>(passage, gradient, {buffer}, count, change_one);
}

template <class T>
CONVOY_BODY void sgd_any(const SgdStep& step, T* parameter, const T* gradient, T* buffer,
                         std::size_t count, const Passage<T>& passage) {
  if (step.momentum == 0) {
    sgd<Momentum::kNone, T>(step, parameter, gradient, nullptr, count, passage);
  } else if (step.nesterov) {
    sgd<Momentum::kNesterov, T>(step, parameter, gradient, buffer, count, passage);
  } else {
    sgd<Momentum::kPlain, T>(step, parameter, gradient, buffer, count, passage);
  }
}

template <bool kLargest, class T>
CONVOY_BODY void adam(const AdamStep& step, const AdamMemory<T>& memory, std::size_t count,
                      const Passage<T>& passage) {
  T* const parameter = memory.parameter;
  T* const mean = memory.mean;
  T* const square = memory.square;
  T* const largest = memory.largest;
  const auto number = static_cast<double>(step.number);
  const double root = std::sqrt(1 - std::pow(step.beta2, number));
  const T rate = static_cast<T>(-step.lr / (1 - std::pow(step.beta1, number)));
  const T correction = static_cast<T>(1 / root), eps = static_cast<T>(step.eps);
  const T shrink = static_cast<T>(step.decoupled ? 1 - step.lr * step.weight_decay : 1);
  const T decay = static_cast<T>(step.decoupled ? 0 : step.weight_decay);
  const T scale = static_cast<T>(step.gradient_scale);
  const T beta1 = static_cast<T>(step.beta1), beta2 = static_cast<T>(step.beta2);
  const T rest1 = static_cast<T>(1 - step.beta1), rest2 = static_cast<T>(1 - step.beta2);
  const auto change_one = [=](std::size_t i, T own) CONVOY_ELEMENT {
    const T change = own * scale + decay * parameter[i];
    const T m = mean[i] * beta1 + change * rest1;
    T v = square[i] * beta2 + rest2 * change * change;
    mean[i] = m;
    square[i] = v;
    if constexpr (kLargest) {
      // Not std::max, which would lose a NaN.
      v = largest[i] > v ? largest[i] : v;
      largest[i] = v;
    }
    const T bottom = std::sqrt(v) * correction + eps;
    parameter[i] = parameter[i] * shrink + rate * (m / bottom);
  };
  pass<T, 3>(passage, memory.gradient, {mean, square, largest}, count, change_one);
}

template <class T>
CONVOY_BODY void adam_any(const AdamStep& step, const AdamMemory<T>& memory, std::size_t count,
                          const Passage<T>& passage) {
  if (memory.largest == nullptr) {
    adam<false, T>(step, memory, count, passage);
  } else {
    adam<true, T>(step, memory, count, passage);
  }
}

template <class T>
CONVOY_BODY void adagrad(const AdagradStep& step, T* parameter, const T* gradient, T* sum,
                         std::size_t count, const Passage<T>& passage) {
  const auto before = static_cast<double>(step.number - 1);
  const T rate = static_cast<T>(-step.lr / (1 + before * step.lr_decay));
  const T decay = static_cast<T>(step.weight_decay), eps = static_cast<T>(step.eps);
  const T scale = static_cast<T>(step.gradient_scale);
  const auto change_one = [=](std::size_t i, T own) CONVOY_ELEMENT {
    const T change = own * scale + decay * parameter[i];
    const T all = sum[i] + change * change;
    sum[i] = all;
    parameter[i] += rate * (change / (std::sqrt(all) + eps));
  };
  pass<T, 1>(passage, gradient, {sum}, count, change_one);
}

template <bool kMomentum, bool kCentered, class T>
CONVOY_BODY void rmsprop(const RmsPropStep& step, const RmsPropMemory<T>& memory, std::size_t count,
                         const Passage<T>& passage) {
  T* const parameter = memory.parameter;
  T* const square = memory.square;
  T* const buffer = memory.buffer;
  T* const mean = memory.mean;
  const T rate = static_cast<T>(-step.lr), decay = static_cast<T>(step.weight_decay);
  const T scale = static_cast<T>(step.gradient_scale), eps = static_cast<T>(step.eps);
  const T alpha = static_cast<T>(step.alpha), rest = static_cast<T>(1 - step.alpha);
  const T momentum = static_cast<T>(step.momentum);
  const auto change_one = [=](std::size_t i, T own) CONVOY_ELEMENT {
    const T change = own * scale + decay * parameter[i];
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
  };
  pass<T, 3>(passage, memory.gradient, {square, buffer, mean}, count, change_one);
}

template <class T>
CONVOY_BODY void rmsprop_any(const RmsPropStep& step, const RmsPropMemory<T>& memory,
                             std::size_t count, const Passage<T>& passage) {
  const bool moves = step.momentum != 0;
  if (memory.mean == nullptr) {
    moves ? rmsprop<true, false, T>(step, memory, count, passage)
          : rmsprop<false, false, T>(step, memory, count, passage);
  } else {
    moves ? rmsprop<true, true, T>(step, memory, count, passage)
          : rmsprop<false, true, T>(step, memory, count, passage);
  }
}

template <class T>
CONVOY_BODY void adadelta(const AdadeltaStep& step, const TwoStates<T>& memory, std::size_t count,
                          const Passage<T>& passage) {
  T* const parameter = memory.parameter;
  T* const square = memory.first;
  T* const moved = memory.second;
  const T rate = static_cast<T>(-step.lr), decay = static_cast<T>(step.weight_decay);
  const T scale = static_cast<T>(step.gradient_scale), eps = static_cast<T>(step.eps);
  const T rho = static_cast<T>(step.rho), rest = static_cast<T>(1 - step.rho);
  const auto change_one = [=](std::size_t i, T own) CONVOY_ELEMENT {
    const T change = own * scale + decay * parameter[i];
    const T v = square[i] * rho + rest * change * change;
    const T delta = std::sqrt(moved[i] + eps) / std::sqrt(v + eps) * change;
    square[i] = v;
    moved[i] = moved[i] * rho + rest * delta * delta;
    parameter[i] += rate * delta;
  };
  pass<T, 2>(passage, memory.gradient, {square, moved}, count, change_one);
}

template <class T>
CONVOY_BODY void adamax(const AdamaxStep& step, const TwoStates<T>& memory, std::size_t count,
                        const Passage<T>& passage) {
  T* const parameter = memory.parameter;
  T* const mean = memory.first;
  T* const largest = memory.second;
  const auto number = static_cast<double>(step.number);
  const T rate = static_cast<T>(-step.lr / (1 - std::pow(step.beta1, number)));
  const T decay = static_cast<T>(step.weight_decay), eps = static_cast<T>(step.eps);
  const T scale = static_cast<T>(step.gradient_scale);
  const T rest = static_cast<T>(1 - step.beta1), beta2 = static_cast<T>(step.beta2);
  const auto change_one = [=](std::size_t i, T own) CONVOY_ELEMENT {
    const T change = own * scale + decay * parameter[i];
    const T m = mean[i] + rest * (change - mean[i]);
    const T faded = largest[i] * beta2, here = std::abs(change) + eps;
    // Not std::max, which would lose a NaN.
    const T most = faded > here || faded != faded ? faded : here;
    mean[i] = m;
    largest[i] = most;
    parameter[i] += rate * (m / most);
  };
  pass<T, 2>(passage, memory.gradient, {mean, largest}, count, change_one);
}

template <class T>
CONVOY_BODY void rprop(const RpropStep& step, const TwoStates<T>& memory, std::size_t count,
                       const Passage<T>& passage) {
  T* const parameter = memory.parameter;
  T* const size = memory.first;
  T* const last = memory.second;
  const T scale = static_cast<T>(step.gradient_scale);
  const T minus = static_cast<T>(step.eta_minus), plus = static_cast<T>(step.eta_plus);
  const T least = static_cast<T>(step.step_min), most = static_cast<T>(step.step_max);
  const auto change_one = [=](std::size_t i, T own) CONVOY_ELEMENT {
    const T change = own * scale;
    const T same = change * last[i];  // more than 0: the sign is that of the step before
    T next = size[i] * (same > 0 ? plus : same < 0 ? minus : T{1});
    next = next < least ? least : next;
    next = next > most ? most : next;
    const T used = same < 0 ? T{0} : change;
    size[i] = next;
    last[i] = used;
    parameter[i] -= used > 0 ? next : used < 0 ? -next : T{0};
  };
  pass<T, 2>(passage, memory.gradient, {size, last}, count, change_one);
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
                            float* buffer, std::size_t count, const Passage<float>& passage) {
  sgd_any(step, parameter, gradient, buffer, count, passage);
}
CONVOY_CLONES void sgd_step(const SgdStep& step, double* parameter, const double* gradient,
                            double* buffer, std::size_t count, const Passage<double>& passage) {
  sgd_any(step, parameter, gradient, buffer, count, passage);
}
CONVOY_CLONES void adam_step(const AdamStep& step, const AdamMemory<float>& memory,
                             std::size_t count, const Passage<float>& passage) {
  adam_any(step, memory, count, passage);
}
CONVOY_CLONES void adam_step(const AdamStep& step, const AdamMemory<double>& memory,
                             std::size_t count, const Passage<double>& passage) {
  adam_any(step, memory, count, passage);
}
CONVOY_CLONES void adagrad_step(const AdagradStep& step, float* parameter, const float* gradient,
                                float* sum, std::size_t count, const Passage<float>& passage) {
  adagrad(step, parameter, gradient, sum, count, passage);
}
CONVOY_CLONES void adagrad_step(const AdagradStep& step, double* parameter, const double* gradient,
                                double* sum, std::size_t count, const Passage<double>& passage) {
  adagrad(step, parameter, gradient, sum, count, passage);
}
CONVOY_CLONES void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<float>& memory,
                                std::size_t count, const Passage<float>& passage) {
  rmsprop_any(step, memory, count, passage);
}
CONVOY_CLONES void rmsprop_step(const RmsPropStep& step, const RmsPropMemory<double>& memory,
                                std::size_t count, const Passage<double>& passage) {
  rmsprop_any(step, memory, count, passage);
}
CONVOY_CLONES void adadelta_step(const AdadeltaStep& step, const TwoStates<float>& memory,
                                 std::size_t count, const Passage<float>& passage) {
  adadelta(step, memory, count, passage);
}
CONVOY_CLONES void adadelta_step(const AdadeltaStep& step, const TwoStates<double>& memory,
                                 std::size_t count, const Passage<double>& passage) {
  adadelta(step, memory, count, passage);
}
CONVOY_CLONES void adamax_step(const AdamaxStep& step, const TwoStates<float>& memory,
                               std::size_t count, const Passage<float>& passage) {
  adamax(step, memory, count, passage);
}
CONVOY_CLONES void adamax_step(const AdamaxStep& step, const TwoStates<double>& memory,
                               std::size_t count, const Passage<double>& passage) {
  adamax(step, memory, count, passage);
}
CONVOY_CLONES void rprop_step(const RpropStep& step, const TwoStates<float>& memory,
                              std::size_t count, const Passage<float>& passage) {
  rprop(step, memory, count, passage);
}
CONVOY_CLONES void rprop_step(const RpropStep& step, const TwoStates<double>& memory,
                              std::size_t count, const Passage<double>& passage) {
  rprop(step, memory, count, passage);
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
