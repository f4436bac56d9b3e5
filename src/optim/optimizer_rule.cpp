#include "optim/optimizer_rule.h"

#include <string_view>

#include "base/error.h"
#include "base/id.h"

namespace convoy {
namespace {

// In the text of an error: who found it.
class Checker {
 public:
  explicit Checker(const char* who) : who_(who) {}
  void require(bool fine, const char* rule, double value) const {
    if (!fine) fail(ErrorKind::kInvalidArgument, who_, ": ", rule, ", got ", value);
  }
  void adam(double beta1, double beta2) const {
    require(beta1 >= 0 && beta1 < 1, "beta1 must be from 0 to less than 1", beta1);
    require(beta2 >= 0 && beta2 < 1, "beta2 must be from 0 to less than 1", beta2);
  }
  void operator()(const Sgd& rule) const {
    require(rule.momentum >= 0, "momentum must be >= 0", rule.momentum);
    if (rule.nesterov && (rule.momentum <= 0 || rule.dampening != 0)) {
      fail(ErrorKind::kInvalidArgument, who_, ": nesterov needs a momentum and no dampening");
    }
  }
  void operator()(const Adam& rule) const { adam(rule.beta1, rule.beta2); }
  void operator()(const AdamW& rule) const { adam(rule.beta1, rule.beta2); }
  void operator()(const Adagrad& rule) const {
    require(rule.lr_decay >= 0, "lr_decay must be >= 0", rule.lr_decay);
    require(rule.initial_accumulator_value >= 0, "initial_accumulator_value must be >= 0",
            rule.initial_accumulator_value);
  }
  void operator()(const RmsProp& rule) const {
    require(rule.alpha >= 0, "alpha must be >= 0", rule.alpha);
    require(rule.momentum >= 0, "momentum must be >= 0", rule.momentum);
  }
  void operator()(const Adadelta& rule) const {
    require(rule.rho >= 0 && rule.rho <= 1, "rho must be from 0 to 1", rule.rho);
  }
  void operator()(const Adamax& rule) const { adam(rule.beta1, rule.beta2); }
  void operator()(const Rprop& rule) const {
    require(rule.eta_minus > 0 && rule.eta_minus < 1, "eta_minus must be between 0 and 1",
            rule.eta_minus);
    require(rule.eta_plus > 1, "eta_plus must be > 1", rule.eta_plus);
    require(rule.step_min >= 0 && rule.step_min <= rule.step_max,
            "step_min must be from 0 to step_max", rule.step_min);
  }

 private:
  const char* who_;
};

// What the kernels take of a rule.
struct StepOf {
  SgdStep operator()(const Sgd& rule) const {
    return {.lr = rule.lr,
            .momentum = rule.momentum,
            .dampening = rule.dampening,
            .weight_decay = rule.weight_decay,
            .nesterov = rule.nesterov,
            .first = step.first,
            .gradient_scale = step.gradient_scale};
  }
  template <class Rule>
  AdamStep adam(const Rule& rule, bool decoupled) const {
    return {.lr = rule.lr,
            .beta1 = rule.beta1,
            .beta2 = rule.beta2,
            .eps = rule.eps,
            .weight_decay = rule.weight_decay,
            .amsgrad = rule.amsgrad,
            .decoupled = decoupled,
            .number = step.number,
            .gradient_scale = step.gradient_scale};
  }
  AdamStep operator()(const Adam& rule) const { return adam(rule, false); }
  AdamStep operator()(const AdamW& rule) const { return adam(rule, true); }
  AdagradStep operator()(const Adagrad& rule) const {
    return {.lr = rule.lr,
            .lr_decay = rule.lr_decay,
            .weight_decay = rule.weight_decay,
            .eps = rule.eps,
            .number = step.number,
            .gradient_scale = step.gradient_scale};
  }
  RmsPropStep operator()(const RmsProp& rule) const {
    return {.lr = rule.lr,
            .alpha = rule.alpha,
            .eps = rule.eps,
            .weight_decay = rule.weight_decay,
            .momentum = rule.momentum,
            .centered = rule.centered,
            .gradient_scale = step.gradient_scale};
  }
  AdadeltaStep operator()(const Adadelta& rule) const {
    return {.lr = rule.lr,
            .rho = rule.rho,
            .eps = rule.eps,
            .weight_decay = rule.weight_decay,
            .gradient_scale = step.gradient_scale};
  }
  AdamaxStep operator()(const Adamax& rule) const {
    return {.lr = rule.lr,
            .beta1 = rule.beta1,
            .beta2 = rule.beta2,
            .eps = rule.eps,
            .weight_decay = rule.weight_decay,
            .number = step.number,
            .gradient_scale = step.gradient_scale};
  }
  RpropStep operator()(const Rprop& rule) const {
    return {.eta_minus = rule.eta_minus,
            .eta_plus = rule.eta_plus,
            .step_min = rule.step_min,
            .step_max = rule.step_max,
            .gradient_scale = step.gradient_scale};
  }

  const RuleStep step;
};

template <class Rule>
std::string describe_adam(const char* name, const Rule& rule) {
  return concat(name, ", lr ", rule.lr, ", betas ", rule.beta1, " and ", rule.beta2, ", eps ",
                rule.eps, ", weight decay ", rule.weight_decay, rule.amsgrad ? ", amsgrad" : "");
}

struct Describer {
  std::string operator()(const Sgd& rule) const {
    return concat("SGD, lr ", rule.lr, ", momentum ", rule.momentum, ", dampening ", rule.dampening,
                  ", weight decay ", rule.weight_decay, rule.nesterov ? ", nesterov" : "");
  }
  std::string operator()(const Adam& rule) const { return describe_adam("Adam", rule); }
  std::string operator()(const AdamW& rule) const { return describe_adam("AdamW", rule); }
  std::string operator()(const Adagrad& rule) const {
    return concat("Adagrad, lr ", rule.lr, ", lr_decay ", rule.lr_decay, ", eps ", rule.eps,
                  ", weight decay ", rule.weight_decay, ", initial_accumulator_value ",
                  rule.initial_accumulator_value);
  }
  std::string operator()(const RmsProp& rule) const {
    return concat("RMSprop, lr ", rule.lr, ", alpha ", rule.alpha, ", eps ", rule.eps,
                  ", weight decay ", rule.weight_decay, ", momentum ", rule.momentum,
                  rule.centered ? ", centered" : "");
  }
  std::string operator()(const Adadelta& rule) const {
    return concat("Adadelta, lr ", rule.lr, ", rho ", rule.rho, ", eps ", rule.eps,
                  ", weight decay ", rule.weight_decay);
  }
  std::string operator()(const Adamax& rule) const {
    return concat("Adamax, lr ", rule.lr, ", betas ", rule.beta1, " and ", rule.beta2, ", eps ",
                  rule.eps, ", weight decay ", rule.weight_decay);
  }
  std::string operator()(const Rprop& rule) const {
    return concat("Rprop, lr ", rule.lr, ", etas ", rule.eta_minus, " and ", rule.eta_plus,
                  ", step sizes ", rule.step_min, " to ", rule.step_max);
  }
};

}  // namespace

void check_rule(const char* who, const OptimizerRule& rule) {
  const Checker checker(who);
  std::visit(
      [&](const auto& one) {
        checker.require(one.lr >= 0, "lr must be >= 0", one.lr);
        if constexpr (requires { one.weight_decay; }) {
          checker.require(one.weight_decay >= 0, "weight_decay must be >= 0", one.weight_decay);
        }
        if constexpr (requires { one.eps; })
          checker.require(one.eps >= 0, "eps must be >= 0", one.eps);
        checker(one);
      },
      rule);
}

namespace {
using Values = std::array<double, 7>;  // in every bit, `maximize` last

double number(bool flag) { return flag ? 1 : 0; }

Values values_of(const Sgd& r) {
  return {r.lr, r.momentum, r.dampening, r.weight_decay, number(r.nesterov), 0, number(r.maximize)};
}
template <class AnyAdam>
Values values_of_adam(const AnyAdam& r) {
  return {r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, number(r.amsgrad), number(r.maximize)};
}
Values values_of(const Adam& r) { return values_of_adam(r); }
Values values_of(const AdamW& r) { return values_of_adam(r); }
Values values_of(const Adagrad& r) {
  return {r.lr,  r.lr_decay, r.weight_decay,    r.initial_accumulator_value,
          r.eps, 0,          number(r.maximize)};
}
Values values_of(const RmsProp& r) {
  return {r.lr, r.alpha, r.eps, r.weight_decay, r.momentum, number(r.centered), number(r.maximize)};
}
Values values_of(const Adadelta& r) {
  return {r.lr, r.rho, r.eps, r.weight_decay, 0, 0, number(r.maximize)};
}
Values values_of(const Adamax& r) {
  return {r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, 0, number(r.maximize)};
}
Values values_of(const Rprop& r) {
  return {r.lr, r.eta_minus, r.eta_plus, r.step_min, r.step_max, 0, number(r.maximize)};
}

bool maximizes(const OptimizerRule& rule) {
  return std::visit([](const auto& one) { return one.maximize; }, rule);
}

template <class T>
void apply(const OptimizerRule& rule, RuleStep step, const RuleMemory<T>& memory,
           std::size_t count) {
  if (maximizes(rule)) step.gradient_scale = -step.gradient_scale;
  const StepOf step_of{step};
  std::visit([&](const auto& one) { rule_step(step_of(one), memory, count); }, rule);
}
}  // namespace

std::uint64_t hash_of(const OptimizerRule& rule, std::uint64_t seed) {
  const auto values = std::visit([](const auto& one) { return values_of(one); }, rule);
  const std::string_view bytes(reinterpret_cast<const char*>(values.data()), sizeof(values));
  return hash_text(bytes, seed + rule.index() + 1);
}

std::string describe(const OptimizerRule& rule) {
  return std::visit(Describer(), rule) + (maximizes(rule) ? ", maximize" : "");
}

unsigned states_of(const OptimizerRule& rule) {
  if (const auto* sgd = std::get_if<Sgd>(&rule)) return sgd->momentum != 0 ? 1 : 0;
  if (const auto* adam = std::get_if<Adam>(&rule)) return adam->amsgrad ? 7 : 3;
  if (const auto* adamw = std::get_if<AdamW>(&rule)) return adamw->amsgrad ? 7 : 3;
  if (const auto* rms = std::get_if<RmsProp>(&rule)) {
    return 1U | (rms->momentum != 0 ? 2U : 0U) | (rms->centered ? 4U : 0U);
  }
  return std::holds_alternative<Adagrad>(rule) ? 1 : 3;
}

double initial_state(const OptimizerRule& rule) {
  if (const auto* adagrad = std::get_if<Adagrad>(&rule)) return adagrad->initial_accumulator_value;
  const auto* const rprop = std::get_if<Rprop>(&rule);
  return rprop != nullptr ? rprop->lr : 0;
}

void apply_rule(const OptimizerRule& rule, const RuleStep& step, const RuleMemory<float>& memory,
                std::size_t count) {
  apply(rule, step, memory, count);
}
void apply_rule(const OptimizerRule& rule, const RuleStep& step, const RuleMemory<double>& memory,
                std::size_t count) {
  apply(rule, step, memory, count);
}

double join_norms(double a, double b, double norm_type) {
  if (norm_type == 2) return a + b;
  return !(b <= a) ? b : a;  // or NaN
}

double norm_of(const float* values, std::size_t count, double norm_type) {
  return norm_type == 2 ? sum_of_squares(values, count) : largest_magnitude(values, count);
}
double norm_of(const double* values, std::size_t count, double norm_type) {
  return norm_type == 2 ? sum_of_squares(values, count) : largest_magnitude(values, count);
}

double clip_scale(double norm, double max_norm) {
  if (max_norm <= 0) return 1;
  const double scale = max_norm / (norm + 1e-6);
  return scale > 1 ? 1 : scale;  // not std::min, which would lose a NaN
}

}  // namespace convoy
