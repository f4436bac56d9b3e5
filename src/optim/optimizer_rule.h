#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "convoy/optimizer_rules.h"
#include "optim/optimizer_kernels.h"

namespace convoy {

// Of the states in an archive, and of the numbers of steps and of all steps.
inline constexpr std::array<const char*, kMostStates> kStateNames = {"first", "second", "third"};
inline constexpr const char* kCountsName = "counts";
inline constexpr const char* kStepsName = "steps";

// kInvalidArgument for values without a meaning; the text begins with `who`.
void check_rule(const char* who, const OptimizerRule& rule);
// One line, for ranks to compare.
std::string describe(const OptimizerRule& rule);
// Of all its values, in every bit.
std::uint64_t hash_of(const OptimizerRule& rule, std::uint64_t seed);
// Bit k is set if it keeps state k.
unsigned states_of(const OptimizerRule& rule);
// What state 0 begins with; the others begin with 0.
double initial_state(const OptimizerRule& rule);

struct RuleStep {
  std::int64_t number = 1;  // of this step of this parameter: 1, 2, ...
  bool first = false;       // state 0 was never used
  double gradient_scale = 1;
};
// Element by element: bits do not depend on how a parameter is divided.
void apply_rule(const OptimizerRule& rule, const RuleStep& step, const RuleMemory<float>& memory,
                std::size_t count);
void apply_rule(const OptimizerRule& rule, const RuleStep& step, const RuleMemory<double>& memory,
                std::size_t count);

// Norms of gradients are made of parts of so many numbers, in order: their bits depend neither on
// the number of threads nor on who has computed a part.
inline constexpr std::int64_t kNormBlock = 1 << 15;
// Of two partial norms: of type 2 (squares) or of the largest magnitude, which a NaN stays.
double join_norms(double a, double b, double norm_type);
// The part of one block. `norm_type` is 2 or infinity.
double norm_of(const float* values, std::size_t count, double norm_type);
double norm_of(const double* values, std::size_t count, double norm_type);
// As torch::nn::utils::clip_grad_norm_ scales; `max_norm` 0: not at all.
double clip_scale(double norm, double max_norm);

}  // namespace convoy
