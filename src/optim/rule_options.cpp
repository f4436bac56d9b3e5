// Rules beside libtorch's options.
#include "base/error.h"
#include "convoy/sharded_optimizer.h"

namespace convoy {

OptimizerRule rule_of(const torch::optim::OptimizerOptions& options) {
  namespace optim = torch::optim;
  if (const auto* o = dynamic_cast<const RuleOptions*>(&options)) return o->rule();
  if (const auto* o = dynamic_cast<const optim::SGDOptions*>(&options)) {
    return Sgd{.lr = o->lr(),
               .momentum = o->momentum(),
               .dampening = o->dampening(),
               .weight_decay = o->weight_decay(),
               .nesterov = o->nesterov()};
  }
  const auto adam = [](auto rule, const auto& o) -> OptimizerRule {
    rule.lr = o.lr();
    rule.beta1 = std::get<0>(o.betas());
    rule.beta2 = std::get<1>(o.betas());
    rule.eps = o.eps();
    rule.weight_decay = o.weight_decay();
    rule.amsgrad = o.amsgrad();
    return rule;
  };
  if (const auto* o = dynamic_cast<const optim::AdamOptions*>(&options)) return adam(Adam(), *o);
  if (const auto* o = dynamic_cast<const optim::AdamWOptions*>(&options)) return adam(AdamW(), *o);
  if (const auto* o = dynamic_cast<const optim::AdagradOptions*>(&options)) {
    return Adagrad{.lr = o->lr(),
                   .lr_decay = o->lr_decay(),
                   .weight_decay = o->weight_decay(),
                   .initial_accumulator_value = o->initial_accumulator_value(),
                   .eps = o->eps()};
  }
  if (const auto* o = dynamic_cast<const optim::RMSpropOptions*>(&options)) {
    return RmsProp{.lr = o->lr(),
                   .alpha = o->alpha(),
                   .eps = o->eps(),
                   .weight_decay = o->weight_decay(),
                   .momentum = o->momentum(),
                   .centered = o->centered()};
  }
  fail(ErrorKind::kInvalidArgument,
       "there is no rule for these options; give those of SGD, Adam, AdamW, Adagrad or RMSprop, or "
       "a rule of convoy/optimizer_rules.h");
}

OptimizerRule::OptimizerRule(const torch::optim::OptimizerOptions& options)
    : OptimizerRule(rule_of(options)) {}

RuleOptions::RuleOptions(const torch::optim::OptimizerOptions& options) : rule_(rule_of(options)) {}

std::unique_ptr<torch::optim::OptimizerOptions> RuleOptions::clone() const {
  return std::make_unique<RuleOptions>(*this);
}

double RuleOptions::get_lr() const {
  return std::visit([](const auto& one) { return one.lr; }, rule_);
}

void RuleOptions::set_lr(double lr) {
  std::visit([lr](auto& one) { one.lr = lr; }, rule_);
}

std::vector<torch::optim::OptimizerParamGroup> detail::param_groups_of(
    const std::vector<OptimizerGroup>& groups) {
  std::vector<torch::optim::OptimizerParamGroup> made;
  for (const OptimizerGroup& group : groups) {
    made.emplace_back(group.parameters, std::make_unique<RuleOptions>(group.rule));
  }
  return made;
}

}  // namespace convoy
