#include "torch_rules.h"

#include <pybind11/stl.h>

#include <tuple>
#include <utility>

#include "convoy/error.h"

namespace py = pybind11;

namespace convoy::python {

OptimizerRule rule_of(const std::string& kind, const py::dict& group) {
  const auto number = [&](const char* name) {
    return static_cast<double>(py::float_(group[name]));
  };
  // Groups that an older torch has saved do not have all of them.
  const auto flag = [&](const char* name) {
    return group.contains(name) && group[name].cast<bool>();
  };
  const auto pair = [&](const char* name) { return group[name].cast<std::pair<double, double>>(); };
  const auto adam = [&](auto rule) -> OptimizerRule {
    rule.lr = number("lr");
    std::tie(rule.beta1, rule.beta2) = pair("betas");
    rule.eps = number("eps");
    rule.weight_decay = number("weight_decay");
    rule.maximize = flag("maximize");
    if constexpr (requires { rule.amsgrad; }) rule.amsgrad = flag("amsgrad");
    return rule;
  };
  if (kind == "SGD") {
    return Sgd{number("lr"),           number("momentum"), number("dampening"),
               number("weight_decay"), flag("nesterov"),   flag("maximize")};
  }
  if (kind == "Adam") return adam(Adam());
  if (kind == "AdamW") return adam(AdamW());
  if (kind == "Adamax") return adam(Adamax());
  if (kind == "Adagrad") {
    return Adagrad{number("lr"),           number("lr_decay"),
                   number("weight_decay"), number("initial_accumulator_value"),
                   number("eps"),          flag("maximize")};
  }
  if (kind == "RMSprop") {
    return RmsProp{number("lr"),       number("alpha"),  number("eps"),   number("weight_decay"),
                   number("momentum"), flag("centered"), flag("maximize")};
  }
  if (kind == "Adadelta") {
    return Adadelta{number("lr"), number("rho"), number("eps"), number("weight_decay"),
                    flag("maximize")};
  }
  if (kind == "Rprop") {
    const auto [minus, plus] = pair("etas");
    const auto [least, most] = pair("step_sizes");
    return Rprop{number("lr"), minus, plus, least, most, flag("maximize")};
  }
  throw Error(ErrorKind::kUnsupported, "there is no rule for torch.optim." + kind);
}

}  // namespace convoy::python
