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
template <bool kTwoGradients, std::size_t kStates, class T, class Change>
CONVOY_BODY void pass_with(const RuleMemory<T>& memory, std::size_t count, const Change& change) {
  const Passage<T>& passage = memory.passage;
  const T* const gradient = memory.gradient;
  const std::array<T*, kMostStates> states = memory.states;
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

// The loop of every rule, which has this many states.
template <std::size_t kStates, class T, class Change>
CONVOY_BODY void pass(const RuleMemory<T>& memory, std::size_t count, const Change& change) {
  const T* const gradient = memory.gradient;
  if (memory.passage.word == nullptr) {
    CONVOY_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) change(i, gradient[i]);
  } else if (memory.passage.second_gradient == nullptr) {
    pass_with<false, kStates>(memory, count, change);
  } else {
    pass_with<true, kStates>(memory, count, change);
  }
}

enum class Momentum { kNone, kPlain, kNesterov };

template <Momentum kMomentum, class T>
CONVOY_BODY void sgd(const SgdStep& step, const RuleMemory<T>& memory, std::size_t count) {
  T* const parameter = memory.parameter;
  T* const buffer = memory.states[0];
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
  pass<1>(memory, count, change_one);
}

template <class T>
CONVOY_BODY void change_by(const SgdStep& step, const RuleMemory<T>& memory, std::size_t count) {
  if (step.momentum == 0) {
    sgd<Momentum::kNone>(step, memory, count);
  } else if (step.nesterov) {
    sgd<Momentum::kNesterov>(step, memory, count);
  } else {
    sgd<Momentum::kPlain>(step, memory, count);
  }
}

template <bool kLargest, class T>
CONVOY_BODY void adam(const AdamStep& step, const RuleMemory<T>& memory, std::size_t count) {
  T* const parameter = memory.parameter;
  T* const mean = memory.states[0];
  T* const square = memory.states[1];
  T* const largest = memory.states[2];
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
  pass<kLargest ? 3 : 2>(memory, count, change_one);
}

template <class T>
CONVOY_BODY void change_by(const AdamStep& step, const RuleMemory<T>& memory, std::size_t count) {
  step.amsgrad ? adam<true>(step, memory, count) : adam<false>(step, memory, count);
}

template <class T>
CONVOY_BODY void change_by(const AdagradStep& step, const RuleMemory<T>& memory,
                           std::size_t count) {
  T* const parameter = memory.parameter;
  T* const sum = memory.states[0];
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
  pass<1>(memory, count, change_one);
}

template <bool kMomentum, bool kCentered, class T>
CONVOY_BODY void rmsprop(const RmsPropStep& step, const RuleMemory<T>& memory, std::size_t count) {
  T* const parameter = memory.parameter;
  T* const square = memory.states[0];
  T* const buffer = memory.states[1];
  T* const mean = memory.states[2];
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
  pass<3>(memory, count, change_one);
}

template <class T>
CONVOY_BODY void change_by(const RmsPropStep& step, const RuleMemory<T>& memory,
                           std::size_t count) {
  if (step.momentum != 0) {
    step.centered ? rmsprop<true, true>(step, memory, count)
                  : rmsprop<true, false>(step, memory, count);
  } else {
    step.centered ? rmsprop<false, true>(step, memory, count)
                  : rmsprop<false, false>(step, memory, count);
  }
}

template <class T>
CONVOY_BODY void change_by(const AdadeltaStep& step, const RuleMemory<T>& memory,
                           std::size_t count) {
  T* const parameter = memory.parameter;
  T* const square = memory.states[0];
  T* const moved = memory.states[1];
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
  pass<2>(memory, count, change_one);
}

template <class T>
CONVOY_BODY void change_by(const AdamaxStep& step, const RuleMemory<T>& memory, std::size_t count) {
  T* const parameter = memory.parameter;
  T* const mean = memory.states[0];
  T* const largest = memory.states[1];
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
  pass<2>(memory, count, change_one);
}

template <class T>
CONVOY_BODY void change_by(const RpropStep& step, const RuleMemory<T>& memory, std::size_t count) {
  T* const parameter = memory.parameter;
  T* const size = memory.states[0];
  T* const last = memory.states[1];
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
  pass<2>(memory, count, change_one);
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

#define CONVOY_RULE_STEP(Step)                                                     \
  CONVOY_CLONES void rule_step(const Step& step, const RuleMemory<float>& memory,  \
                               std::size_t count) {                                \
    change_by(step, memory, count);                                                \
  }                                                                                \
  CONVOY_CLONES void rule_step(const Step& step, const RuleMemory<double>& memory, \
                               std::size_t count) {                                \
    change_by(step, memory, count);                                                \
  }
CONVOY_RULE_STEP(SgdStep)
CONVOY_RULE_STEP(AdamStep)
CONVOY_RULE_STEP(AdagradStep)
CONVOY_RULE_STEP(RmsPropStep)
CONVOY_RULE_STEP(AdadeltaStep)
CONVOY_RULE_STEP(AdamaxStep)
CONVOY_RULE_STEP(RpropStep)

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
