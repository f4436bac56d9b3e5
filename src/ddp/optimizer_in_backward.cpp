#include "convoy/optimizer_in_backward.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/hook_state.h"
#include "ddp/optimizer_kernels.h"

namespace convoy {
namespace {

// Elements that one thread takes at a time; sums are made of sums of as many, in order, so that
// their bits do not depend on the number of threads.
constexpr std::int64_t kGrain = 1 << 15;

template <class... Text>
[[noreturn]] void refuse(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, "OptimizerInBackward: ", text...);
}

void require(bool fine, const char* what, double value) {
  if (!fine) refuse(what, " of ", value);
}

void check_adam(double lr, double beta1, double beta2, double eps, double weight_decay) {
  require(lr >= 0, "a learning rate", lr);
  require(beta1 >= 0 && beta1 < 1, "a beta1", beta1);
  require(beta2 >= 0 && beta2 < 1, "a beta2", beta2);
  require(eps >= 0, "an eps", eps);
  require(weight_decay >= 0, "a weight decay", weight_decay);
}

void check_rule(const OptimizerRule& rule) {
  if (const auto* sgd = std::get_if<Sgd>(&rule)) {
    require(sgd->lr >= 0, "a learning rate", sgd->lr);
    require(sgd->momentum >= 0, "a momentum", sgd->momentum);
    require(sgd->weight_decay >= 0, "a weight decay", sgd->weight_decay);
    if (sgd->nesterov && (sgd->momentum <= 0 || sgd->dampening != 0)) {
      refuse("nesterov needs a momentum and no dampening");
    }
  } else if (const auto* adam = std::get_if<Adam>(&rule)) {
    check_adam(adam->lr, adam->beta1, adam->beta2, adam->eps, adam->weight_decay);
  } else if (const auto* adamw = std::get_if<AdamW>(&rule)) {
    check_adam(adamw->lr, adamw->beta1, adamw->beta2, adamw->eps, adamw->weight_decay);
  }
}

std::string describe(const OptimizerRule& rule) {
  const auto adam = [](const char* name, const auto& r) {
    return concat(name, ", lr ", r.lr, ", betas ", r.beta1, " and ", r.beta2, ", eps ", r.eps,
                  ", weight decay ", r.weight_decay, r.amsgrad ? ", amsgrad" : "");
  };
  if (const auto* sgd = std::get_if<Sgd>(&rule)) {
    return concat("SGD, lr ", sgd->lr, ", momentum ", sgd->momentum, ", dampening ", sgd->dampening,
                  ", weight decay ", sgd->weight_decay, sgd->nesterov ? ", nesterov" : "");
  }
  if (const auto* plain = std::get_if<Adam>(&rule)) return adam("Adam", *plain);
  return adam("AdamW", std::get<AdamW>(rule));
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
  std::vector<double> parts(static_cast<std::size_t>((count + kGrain - 1) / kGrain));
  at::parallel_for(0, static_cast<std::int64_t>(parts.size()), 1, [&](auto begin, auto end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const auto size = static_cast<std::size_t>(std::min(kGrain, count - k * kGrain));
      const T* const from = values + k * kGrain;
      parts[static_cast<std::size_t>(k)] =
          norm_type == 2 ? sum_of_squares(from, size) : largest_magnitude(from, size);
    }
  });
  double total = 0;
  for (const double part : parts) {
    if (norm_type == 2) {
      total += part;
    } else if (!(part <= total)) {  // or NaN
      total = part;
    }
  }
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
  struct Member {
    std::size_t group;
    at::Tensor parameter;
    std::int64_t steps = 0;
    at::Tensor first = {}, second = {}, third = {};  // momentum or means, squares, largest squares
  };
  // A gradient of this backward and its parameter.
  struct Update {
    Member* member;
    at::Tensor slot;      // in the bucket
    at::Tensor gradient;  // the same in the parameter's type
  };

  std::vector<Update> updates(const std::vector<GradBucket>& buckets,
                              const std::vector<bool>& used);
  double norm(const std::vector<Update>& all) const;
  void apply(const Update& update, double scale);
  template <class T>
  void apply_as(Member& member, const at::Tensor& parameter, const at::Tensor& gradient,
                double scale);

  OptimizerInBackwardOptions options_;
  std::map<std::size_t, Member> members_;  // by number in the reducer
};

OptimizerInBackward::Impl::Impl(Reducer& reducer, std::vector<OptimizerGroup> groups,
                                const OptimizerInBackwardOptions& options)
    : options_(options) {
  std::string error;
  std::vector<std::string> lines;
  try {
    std::map<const void*, std::size_t> known;
    const auto& all = reducer.parameters();
    for (std::size_t i = 0; i < all.size(); ++i) known[all[i].unsafeGetTensorImpl()] = i;
    require(options.max_norm >= 0, "a largest norm", options.max_norm);
    require(options.norm_type == 2 || options.norm_type == std::numeric_limits<double>::infinity(),
            "a norm", options.norm_type);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      check_rule(groups[g].rule);
      rules.push_back(groups[g].rule);
      lines.push_back(concat("group ", g, ": ", describe(groups[g].rule)));
      for (const at::Tensor& parameter : groups[g].parameters) {
        const auto found = known.find(parameter.unsafeGetTensorImpl());
        if (found == known.end())
          refuse("a tensor of group ", g, " is no parameter of the reducer");
        const std::size_t index = found->second;
        const auto type = at::toRealValueType(parameter.scalar_type());
        if (type != at::kFloat && type != at::kDouble) {
          fail(ErrorKind::kUnsupported, "OptimizerInBackward: parameter ", index, " is of ",
               parameter.scalar_type(), ", which is too coarse to add small steps to; keep it in ",
               "f32 and let DdpOptions::mixed_precision compute with less");
        }
        if (!members_.try_emplace(index, Member{.group = g, .parameter = parameter}).second) {
          refuse("parameter ", index, " is in two groups, or twice in one");
        }
        lines.push_back(concat("parameter ", index, " is in group ", g));
      }
    }
    if (members_.empty()) refuse("there is no parameter");
    lines.push_back(concat("norm ", options.max_norm, " of type ", options.norm_type,
                           ", skip_nonfinite ", options.skip_nonfinite, ", keep_gradients ",
                           options.keep_gradients));
  } catch (const Error& e) {
    error = e.what();
  }
  agree(reducer.group(), "optimizer in backward", lines, error, 0);
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
      Member& member = found->second;
      if (!member.parameter.requires_grad()) continue;
      all.push_back({&member, gradients[k], gradients[k].to(member.parameter.scalar_type())});
    }
  }
  return all;
}

double OptimizerInBackward::Impl::norm(const std::vector<Update>& all) const {
  // Tensor by tensor in the order of parameters: not of buckets, whose layout may change.
  std::map<const Member*, double> parts;
  for (const Update& update : all) {
    parts[update.member] = is_double(update.gradient)
                               ? norm_part<double>(update.gradient, options_.norm_type)
                               : norm_part<float>(update.gradient, options_.norm_type);
  }
  double total = 0;
  for (const auto& [index, member] : members_) {
    const auto found = parts.find(&member);
    if (found == parts.end()) continue;
    if (options_.norm_type == 2) {
      total += found->second;
    } else if (!(found->second <= total)) {
      total = found->second;
    }
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
    // As torch::nn::utils::clip_grad_norm_; not std::min, which would lose a NaN.
    if (options_.max_norm > 0) {
      scale = options_.max_norm / (stats.norm + 1e-6);
      if (scale > 1) scale = 1;
    }
  }
  ++stats.steps;
  for (const Update& update : all) {
    apply(update, scale);
    if (keeps() && scale != 1) update.slot.mul_(scale);  // as after clip_grad_norm_
  }
}

void OptimizerInBackward::Impl::apply(const Update& update, double scale) {
  Member& member = *update.member;
  const at::Tensor& parameter = member.parameter;
  // A gradient lies as its parameter does, unless that has holes.
  const bool dense = parameter.strides().equals(update.gradient.strides());
  const at::Tensor work =
      dense ? parameter.detach() : at::empty_like(update.gradient).copy_(parameter.detach());
  ++member.steps;
  if (is_double(parameter)) {
    apply_as<double>(member, work, update.gradient, scale);
  } else {
    apply_as<float>(member, work, update.gradient, scale);
  }
  if (!dense) at::Tensor(parameter).copy_(work);
  parameter.unsafeGetTensorImpl()->bump_version();
}

template <class T>
void OptimizerInBackward::Impl::apply_as(Member& member, const at::Tensor& parameter,
                                         const at::Tensor& gradient, double scale) {
  const std::int64_t count = numbers_in(parameter);
  const auto make = [&](at::Tensor& state) {
    if (!state.defined()) state = at::zeros_like(gradient);
  };
  const OptimizerRule& rule = rules[member.group];
  T* const p = data_of<T>(parameter);
  const T* const g = data_of<T>(gradient);
  if (const auto* sgd = std::get_if<Sgd>(&rule)) {
    SgdStep step{.lr = sgd->lr,
                 .momentum = sgd->momentum,
                 .dampening = sgd->dampening,
                 .weight_decay = sgd->weight_decay,
                 .nesterov = sgd->nesterov,
                 .first = !member.first.defined(),
                 .gradient_scale = scale};
    if (sgd->momentum != 0) make(member.first);
    T* const buffer = data_of<T>(member.first);
    at::parallel_for(0, count, kGrain, [&](std::int64_t begin, std::int64_t end) {
      sgd_step(step, p + begin, g + begin, buffer == nullptr ? nullptr : buffer + begin,
               static_cast<std::size_t>(end - begin));
    });
    return;
  }
  const auto run = [&](const auto& adam, bool decoupled) {
    const AdamStep step{.lr = adam.lr,
                        .beta1 = adam.beta1,
                        .beta2 = adam.beta2,
                        .eps = adam.eps,
                        .weight_decay = adam.weight_decay,
                        .decoupled = decoupled,
                        .number = member.steps,
                        .gradient_scale = scale};
    make(member.first);
    make(member.second);
    if (adam.amsgrad) make(member.third);
    T* const m = data_of<T>(member.first);
    T* const v = data_of<T>(member.second);
    T* const largest = adam.amsgrad ? data_of<T>(member.third) : nullptr;
    at::parallel_for(0, count, kGrain, [&](std::int64_t begin, std::int64_t end) {
      const AdamMemory<T> memory{p + begin, g + begin, m + begin, v + begin,
                                 largest == nullptr ? nullptr : largest + begin};
      adam_step(step, memory, static_cast<std::size_t>(end - begin));
    });
  };
  if (const auto* adam = std::get_if<Adam>(&rule)) return run(*adam, false);
  run(std::get<AdamW>(rule), true);
}

void OptimizerInBackward::Impl::save(torch::serialize::OutputArchive& archive) const {
  ByParameter first, second, third, steps;
  const auto put = [](ByParameter& to, std::size_t index, const at::Tensor& tensor) {
    if (tensor.defined()) to[index] = tensor;
  };
  for (const auto& [index, member] : members_) {
    put(first, index, member.first);
    put(second, index, member.second);
    put(third, index, member.third);
    steps[index] = at::full({1}, member.steps, at::kLong);
  }
  write_number(archive, "steps", stats.steps);
  write_state(archive, "counts", steps);
  write_state(archive, "first", first);
  write_state(archive, "second", second);
  write_state(archive, "third", third);
}

void OptimizerInBackward::Impl::load(torch::serialize::InputArchive& archive) {
  const auto steps = read_state(archive, "counts");
  std::map<std::size_t, Member> loaded = members_;
  if (steps.size() != loaded.size()) {
    refuse("the archive has ", steps.size(), " parameters, not ", loaded.size());
  }
  const auto take = [&](const char* name, at::Tensor Member::*place) {
    for (auto& [index, member] : loaded) (member.*place).reset();
    for (const auto& [index, tensor] : read_state(archive, name)) {
      const auto found = loaded.find(index);
      if (found == loaded.end()) refuse("the archive has a parameter ", index);
      Member& member = found->second;
      check_state(tensor, member.parameter.numel(), index, "OptimizerInBackward");
      // As gradients lie in memory.
      const bool dense = member.parameter.is_non_overlapping_and_dense();
      at::Tensor& to = member.*place;
      to = dense ? at::empty_like(member.parameter.detach())
                 : at::empty(member.parameter.sizes(), member.parameter.options());
      const at::NoGradGuard no_grad;
      to.set_requires_grad(false);
      to.copy_(tensor.reshape(to.sizes()));
    }
  };
  take("first", &Member::first);
  take("second", &Member::second);
  take("third", &Member::third);
  for (auto& [index, member] : loaded) {
    const auto found = steps.find(index);
    if (found == steps.end()) refuse("the archive has no parameter ", index);
    member.steps = found->second.item<std::int64_t>();
  }
  stats.steps = read_number(archive, "steps");
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
  reducer.register_consumer(
      {.takes = impl_->members(),
       .keeps = options.keep_gradients,
       .function = [impl = impl_](const std::vector<GradBucket>& buckets,
                                  const std::vector<bool>& used) { impl->step(buckets, used); }});
}

void OptimizerInBackward::set_lr(double lr) {
  require(lr >= 0, "a learning rate", lr);
  for (OptimizerRule& rule : impl_->rules) {
    std::visit([lr](auto& one) { one.lr = lr; }, rule);
  }
}

void OptimizerInBackward::set_rule(std::size_t group, const OptimizerRule& rule) {
  if (group >= impl_->rules.size()) refuse("there is no group ", group);
  check_rule(rule);
  if (rule.index() != impl_->rules[group].index()) {
    refuse("group ", group, " cannot change from ", describe(impl_->rules[group]), " to ",
           describe(rule), ": what it keeps would mean something else");
  }
  impl_->rules[group] = rule;
}

const OptimizerRule& OptimizerInBackward::rule(std::size_t group) const {
  if (group >= impl_->rules.size()) refuse("there is no group ", group);
  return impl_->rules[group];
}

OptimizerInBackward::Stats OptimizerInBackward::stats() const { return impl_->stats; }
void OptimizerInBackward::save(torch::serialize::OutputArchive& archive) const {
  impl_->save(archive);
}
void OptimizerInBackward::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

}  // namespace convoy
