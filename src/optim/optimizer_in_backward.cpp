#include "convoy/optimizer_in_backward.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/hook_state.h"
#include "ddp/reducer_impl.h"
#include "optim/optimizer_rule.h"
#include "optim/stepped_parameter.h"

namespace convoy {
namespace {

constexpr const char* kName = "OptimizerInBackward";

template <class... Text>
[[noreturn]] void refuse_in_backward(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, "OptimizerInBackward: ", text...);
}

void require(bool fine, const char* rule, double value) {
  if (!fine) refuse_in_backward(rule, ", got ", value);
}

// A tensor's memory as real numbers.
std::int64_t numbers_in(const at::Tensor& tensor) {
  return tensor.numel() * (tensor.is_complex() ? 2 : 1);
}
template <class T>
T* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}
bool is_double(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kComplexDouble;
}

template <class T>
double norm_part(const at::Tensor& gradient, double norm_type) {
  const T* const values = data_of<T>(gradient);
  const std::int64_t count = numbers_in(gradient);
  std::vector<double> parts(static_cast<std::size_t>((count + kNormBlock - 1) / kNormBlock));
  at::parallel_for(0, static_cast<std::int64_t>(parts.size()), 1, [&](auto begin, auto end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const auto size = static_cast<std::size_t>(std::min(kNormBlock, count - k * kNormBlock));
      parts[static_cast<std::size_t>(k)] = norm_of(values + k * kNormBlock, size, norm_type);
    }
  });
  double total = 0;
  for (const double part : parts) total = join_norms(total, part, norm_type);
  return total;
}

}  // namespace

class OptimizerInBackward::Impl {
 public:
  Impl(Reducer& reducer, std::vector<OptimizerGroup> groups,
       const OptimizerInBackwardOptions& options);

  // The parameters whose gradients it takes.
  std::vector<bool> members() const;
  void step(const std::vector<GradBucket>& buckets, const std::vector<bool>& used);
  bool keeps() const { return options_.keep_gradients; }

  std::vector<OptimizerRule> rules;
  Stats stats;

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  // A gradient of this backward and its parameter.
  struct Update {
    SteppedParameter* member;
    at::Tensor slot;      // in the bucket
    at::Tensor gradient;  // the same in the parameter's type
  };

  std::vector<Update> updates(const std::vector<GradBucket>& buckets,
                              const std::vector<bool>& used);
  double norm(const std::vector<Update>& all) const;

  OptimizerInBackwardOptions options_;
  std::map<std::size_t, SteppedParameter> members_;  // by number in the reducer
};

OptimizerInBackward::Impl::Impl(Reducer& reducer, std::vector<OptimizerGroup> groups,
                                const OptimizerInBackwardOptions& options)
    : options_(options) {
  std::optional<Error> error;
  std::vector<std::string> lines;
  try {
    std::map<const void*, std::size_t> known;
    const auto& all = reducer.parameters();
    for (std::size_t i = 0; i < all.size(); ++i) known[all[i].unsafeGetTensorImpl()] = i;
    require(options.max_norm >= 0, "max_norm must be >= 0", options.max_norm);
    require(options.norm_type == 2 || options.norm_type == std::numeric_limits<double>::infinity(),
            "norm_type must be 2 or infinity", options.norm_type);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      check_rule(kName, groups[g].rule);
      rules.push_back(groups[g].rule);
      lines.push_back(concat("group ", g, ": ", describe(groups[g].rule)));
      for (const at::Tensor& parameter : groups[g].parameters) {
        const auto found = known.find(parameter.unsafeGetTensorImpl());
        if (found == known.end())
          refuse_in_backward("a tensor of group ", g, " is not a parameter of the reducer");
        const std::size_t index = found->second;
        if (!SteppedParameter::can_step(parameter)) {
          fail(ErrorKind::kUnsupported, "OptimizerInBackward: parameter ", index, " is of ",
               parameter.scalar_type(), ", which is too coarse to add small steps to; keep it in ",
               "f32 and let DdpOptions::mixed_precision compute with less");
        }
        if (!members_.try_emplace(index, SteppedParameter{.group = g, .parameter = parameter})
                 .second) {
          refuse_in_backward("parameter ", index, " is in two groups, or twice in one");
        }
        lines.push_back(concat("parameter ", index, " is in group ", g));
      }
    }
    if (members_.empty()) refuse_in_backward("there is no parameter");
    lines.push_back(concat("norm ", options.max_norm, " of type ", options.norm_type,
                           ", skip_nonfinite ", options.skip_nonfinite, ", keep_gradients ",
                           options.keep_gradients));
  } catch (const Error& e) {
    error = e;
  }
  agree(reducer.group(), "optimizer in backward", lines, error);
}

std::vector<bool> OptimizerInBackward::Impl::members() const {
  std::vector<bool> list(members_.empty() ? 0 : members_.rbegin()->first + 1);
  for (const auto& [index, member] : members_) list[index] = true;
  return list;
}

std::vector<OptimizerInBackward::Impl::Update> OptimizerInBackward::Impl::updates(
    const std::vector<GradBucket>& buckets, const std::vector<bool>& used) {
  std::vector<Update> all;
  for (const GradBucket& bucket : buckets) {
    const auto gradients = bucket.gradients();
    for (std::size_t k = 0; k < gradients.size(); ++k) {
      const auto found = members_.find(bucket.indices()[k]);
      if (found == members_.end() || !used[found->first]) continue;
      SteppedParameter& member = found->second;
      if (!member.parameter.requires_grad()) continue;
      all.push_back({&member, gradients[k], gradients[k].to(member.parameter.scalar_type())});
    }
  }
  return all;
}

double OptimizerInBackward::Impl::norm(const std::vector<Update>& all) const {
  // Tensor by tensor in the order of parameters: not of buckets, whose layout may change.
  std::map<const SteppedParameter*, double> parts;
  for (const Update& update : all) {
    parts[update.member] = is_double(update.gradient)
                               ? norm_part<double>(update.gradient, options_.norm_type)
                               : norm_part<float>(update.gradient, options_.norm_type);
  }
  double total = 0;
  for (const auto& [index, member] : members_) {
    const auto found = parts.find(&member);
    if (found == parts.end()) continue;
    total = join_norms(total, found->second, options_.norm_type);
  }
  return options_.norm_type == 2 ? std::sqrt(total) : total;
}

void OptimizerInBackward::Impl::step(const std::vector<GradBucket>& buckets,
                                     const std::vector<bool>& used) {
  const at::NoGradGuard no_grad;
  const auto all = updates(buckets, used);
  double scale = 1;
  if (options_.max_norm > 0 || options_.skip_nonfinite) {
    stats.norm = norm(all);
    if (options_.skip_nonfinite && !std::isfinite(stats.norm)) {
      ++stats.skipped;
      return;
    }
    scale = clip_scale(stats.norm, options_.max_norm);
  }
  ++stats.steps;
  for (const Update& update : all) {
    update.member->step(rules[update.member->group], update.gradient, scale);
    if (keeps() && scale != 1) update.slot.mul_(scale);  // as after clip_grad_norm_
  }
}

void OptimizerInBackward::Impl::save(torch::serialize::OutputArchive& archive) const {
  ByParameter steps;
  std::array<ByParameter, kMostStates> states;
  for (const auto& [index, member] : members_) {
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (member.states[k].defined()) states[k][index] = member.states[k];
    }
    steps[index] = at::full({1}, member.steps, at::kLong);
  }
  write_number(archive, kStepsName, stats.steps);
  write_state(archive, kCountsName, steps);
  for (std::size_t k = 0; k < kMostStates; ++k) write_state(archive, kStateNames[k], states[k]);
}

void OptimizerInBackward::Impl::load(torch::serialize::InputArchive& archive) {
  const auto steps = read_state(archive, kCountsName);
  std::map<std::size_t, SteppedParameter> loaded = members_;
  if (steps.size() != loaded.size()) {
    refuse_in_backward("the archive has ", steps.size(), " parameters, not ", loaded.size());
  }
  for (std::size_t k = 0; k < kMostStates; ++k) {
    for (auto& [index, member] : loaded) member.states[k].reset();
    for (const auto& [index, tensor] : read_state(archive, kStateNames[k])) {
      const auto found = loaded.find(index);
      if (found == loaded.end()) refuse_in_backward("the archive has a parameter ", index);
      SteppedParameter& member = found->second;
      check_state(tensor, member.parameter.numel(), index, "OptimizerInBackward");
      member.states[k] = member.state_from(tensor);
    }
  }
  for (auto& [index, member] : loaded) {
    const auto found = steps.find(index);
    if (found == steps.end()) refuse_in_backward("the archive has no parameter ", index);
    member.steps = found->second.item<std::int64_t>();
  }
  stats.steps = read_number(archive, kStepsName);
  members_ = std::move(loaded);
}

// --- the public class ---

OptimizerInBackward::OptimizerInBackward(Reducer& reducer, const OptimizerRule& rule,
                                         const OptimizerInBackwardOptions& options)
    : OptimizerInBackward(reducer, std::vector<OptimizerGroup>{{reducer.parameters(), rule}},
                          options) {}

OptimizerInBackward::OptimizerInBackward(Reducer& reducer, std::vector<OptimizerGroup> groups,
                                         const OptimizerInBackwardOptions& options)
    : impl_(std::make_shared<Impl>(reducer, std::move(groups), options)) {
  GradConsumer consumer{
      .takes = impl_->members(),
      .keeps = options.keep_gradients,
      .function = [impl = impl_](const std::vector<GradBucket>& buckets,
                                 const std::vector<bool>& used) { impl->step(buckets, used); }};
  told_from(reducer.group(), "OptimizerInBackward",
            [&] { ReducerAccess::impl(reducer)->register_consumer(std::move(consumer)); });
}

void OptimizerInBackward::set_lr(double lr) {
  require(lr >= 0, "lr must be >= 0", lr);
  for (OptimizerRule& rule : impl_->rules) {
    std::visit([lr](auto& one) { one.lr = lr; }, rule);
  }
}

void OptimizerInBackward::set_rule(std::size_t group, const OptimizerRule& rule) {
  if (group >= impl_->rules.size()) refuse_in_backward("there is no group ", group);
  check_rule(kName, rule);
  if (rule.index() != impl_->rules[group].index()) {
    refuse_in_backward("group ", group, " cannot change from ", describe(impl_->rules[group]),
                       " to ", describe(rule), ": its state belongs to the old rule");
  }
  impl_->rules[group] = rule;
}

const OptimizerRule& OptimizerInBackward::rule(std::size_t group) const {
  if (group >= impl_->rules.size()) refuse_in_backward("there is no group ", group);
  return impl_->rules[group];
}

OptimizerInBackward::Stats OptimizerInBackward::stats() const { return impl_->stats; }
void OptimizerInBackward::save(torch::serialize::OutputArchive& archive) const {
  impl_->save(archive);
}
void OptimizerInBackward::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

}  // namespace convoy
