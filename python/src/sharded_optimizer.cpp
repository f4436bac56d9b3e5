// The sharded optimizer for Python, whose groups and options are its own: they are handed over
// before each step.
#include "sharded_optimizer.h"

#include <pybind11/stl.h>

#include "convoy/sharded_optimizer.h"
#include "torch_rules.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

namespace optim = torch::optim;
using OptionsPtr = std::unique_ptr<optim::OptimizerOptions>;

OptionsPtr options_of(const std::string& kind, const py::dict& group) {
  return std::make_unique<RuleOptions>(rule_of(kind, group));
}

// Any of them: what ShardedOptimizer<Opt> adds is only the type of its options.
class AnySharded final : public ShardedOptimizerBase {
 public:
  AnySharded(Reducer& reducer, std::string kind,
             const std::vector<optim::OptimizerParamGroup>& groups, OptionsPtr defaults,
             const ShardedOptimizerOptions& options)
      : ShardedOptimizerBase(reducer, groups, std::move(defaults), options),
        kind_(std::move(kind)) {}

  using ShardedOptimizerBase::refuse_step;

  void set_options(const py::list& groups) {
    auto& mine = param_groups();
    if (groups.size() != mine.size()) {
      throw std::invalid_argument("groups cannot be added to a sharded optimizer");
    }
    for (std::size_t g = 0; g < mine.size(); ++g) {
      mine[g].set_options(options_of(kind_, groups[g].cast<py::dict>()));
    }
  }

 private:
  const std::string kind_;
};

std::unique_ptr<AnySharded> make(Reducer& reducer, const std::string& kind, const py::list& groups,
                                 const ShardedOptimizerOptions& options) {
  std::vector<optim::OptimizerParamGroup> made;
  for (const auto& item : groups) {
    const auto group = item.cast<py::dict>();
    made.emplace_back(group["params"].cast<std::vector<at::Tensor>>(), options_of(kind, group));
  }
  if (made.empty()) throw std::invalid_argument("a sharded optimizer needs parameters");
  auto defaults = made[0].options().clone();
  const py::gil_scoped_release no_gil;
  return std::make_unique<AnySharded>(reducer, kind, made, std::move(defaults), options);
}

// {parameter: (steps, [tensor or None, ...])}
py::dict states_of(const AnySharded& optimizer) {
  ShardedOptimizerBase::States states;
  {
    const py::gil_scoped_release no_gil;
    states = optimizer.states();
  }
  py::dict made;
  for (const auto& [index, state] : states) {
    py::list tensors;
    for (const at::Tensor& tensor : state.states) {
      tensors.append(tensor.defined() ? py::cast(tensor) : py::none());
    }
    made[py::int_(index)] = py::make_tuple(state.steps, tensors);
  }
  return made;
}

void load_states(AnySharded& optimizer, const py::dict& given) {
  ShardedOptimizerBase::States states;
  for (const auto& [index, value] : given) {
    const auto pair = value.cast<std::pair<std::int64_t, py::list>>();
    auto& state = states[index.cast<std::size_t>()];
    state.steps = pair.first;
    for (std::size_t k = 0; k < std::min(state.states.size(), pair.second.size()); ++k) {
      if (!pair.second[k].is_none()) state.states[k] = pair.second[k].cast<at::Tensor>();
    }
  }
  const py::gil_scoped_release no_gil;
  optimizer.load_states(states);
}

py::dict sharded_stats_of(const AnySharded& optimizer) {
  using namespace pybind11::literals;
  const auto stats = optimizer.stats();
  return py::dict("steps"_a = stats.steps, "skipped"_a = stats.skipped, "norm"_a = stats.norm,
                  "numbers"_a = stats.numbers, "state_bytes"_a = stats.state_bytes);
}

}  // namespace

void add_sharded_optimizer(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<AnySharded, Joinable>(module, "ShardedOptimizer", py::multiple_inheritance())
      .def(py::init([](Reducer& reducer, const std::string& kind, const py::list& groups,
                       bool in_backward, double max_norm, double norm_type, bool skip_nonfinite) {
             return make(reducer, kind, groups,
                         {.in_backward = in_backward,
                          .max_norm = max_norm,
                          .norm_type = norm_type,
                          .skip_nonfinite = skip_nonfinite});
           }),
           py::arg("reducer"), py::arg("kind"), py::arg("groups"), py::kw_only(),
           py::arg("in_backward") = false, py::arg("max_norm") = 0.0, py::arg("norm_type") = 2.0,
           py::arg("skip_nonfinite") = false, py::keep_alive<1, 2>())
      .def("set_options", &AnySharded::set_options)
      .def(
          "step", [](AnySharded& self) { self.step(); }, no_gil)
      .def(
          "refuse_step",
          [](AnySharded& self, const std::string& reason) { self.refuse_step(reason); }, no_gil)
      .def("states", &states_of)
      .def("load_states", &load_states)
      .def("stats", &sharded_stats_of);
}

}  // namespace convoy::python
