#include "convoy/sync_batch_norm.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/custom_class.h>
#include <torch/nn/module.h>

#include <torch/csrc/autograd/custom_function.h>
#include <cmath>
#include <ostream>
#include <tuple>

#include "base/error.h"
#include "ddp/norm_group.h"
#include "ddp/norm_weight.h"

namespace convoy::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The type of statistics: half precision is for inputs and outputs only.
at::ScalarType statistics_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// One number for each channel, beside tensors like `input`.
Tensor by_channel(const Tensor& values, const Tensor& input) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
  sizes[1] = -1;
  return values.view(sizes);
}

struct Statistics {
  Tensor mean, variance;  // biased
  double count = 0;       // values of a channel, on all ranks
};

// Each rank tells mean, variance and number of its own values; from these everybody computes the
// same, in double precision and in the order of ranks.
Statistics statistics_of_all(NormGroup& group, const Tensor& input) {
  const std::int64_t channels = input.size(1);
  const auto type = statistics_type(input);
  Tensor mine = at::zeros({2 * channels + 1}, at::TensorOptions(type));
  const auto count = static_cast<double>(input.numel()) / static_cast<double>(channels);
  if (input.numel() > 0) {
    const auto [mean, variance] = at::batch_norm_update_stats(input.to(type), {}, {}, 0);
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels).copy_(variance);
    mine[2 * channels] = count;
  }
  const Tensor all = group.gather(mine).to(at::kDouble);
  const Tensor means = all.narrow(1, 0, channels);
  const Tensor variances = all.narrow(1, channels, channels);
  const Tensor counts = all.narrow(1, 2 * channels, 1);
  const double total = counts.sum().item<double>();
  if (total == 0) return {at::zeros({channels}, type), at::ones({channels}, type), 0};
  const Tensor shares = counts / total;
  const Tensor mean = (means * shares).sum(0);
  const Tensor variance = ((variances + (means - mean).square()) * shares).sum(0);
  return {mean.to(type), variance.to(type), total};
}

struct Held final : torch::CustomClassHolder {
  Held(std::shared_ptr<NormGroup> g, const Tensor& weight)
      : group(std::move(g)), weights(group->parent(), weight) {}
  const std::shared_ptr<NormGroup> group;
  const NormWeights weights;
};

struct Normalise : torch::autograd::Function<Normalise> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const Tensor& bias, const Statistics& all, double eps,
                        const std::shared_ptr<NormGroup>& group) {
    ctx->save_for_backward({input, weight, all.mean, all.variance});
    ctx->saved_data["count"] = all.count;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["held"] =
        c10::IValue::make_capsule(c10::static_intrusive_pointer_cast<torch::CustomClassHolder>(
            c10::make_intrusive<Held>(group, weight)));
    if (input.numel() == 0) return at::empty_like(input);
    const Tensor wide = input.to(all.mean.scalar_type());
    const auto type = wide.scalar_type();
    return std::get<0>(at::native_batch_norm(wide, weight.to(type), bias.to(type), all.mean,
                                             all.variance, /*training=*/false, 0, eps))
        .to(input.scalar_type());
  }

  // With g the output's gradient, h = (input - mean) / s, s^2 = variance + eps, and sums over all
  // ranks: weight / s * (g - sum(g) / count - h * sum(g * h) / count).
  // Where gradients are weighted by samples, those of rank r are multiplied by n(r) when they are
  // reduced. What is to come out then has n(q) * g of each rank q in its sums: here, they are sums
  // of n(q) / n(r) * g.
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      fail(ErrorKind::kUnsupported, "SyncBatchNorm: its backward cannot be differentiated again ",
           "(create_graph); use torch::nn::BatchNorm there");
    }
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
    const auto type = mean.scalar_type();
    const double count = ctx->saved_data["count"].toDouble();
    const double eps = ctx->saved_data["eps"].toDouble();
    const std::int64_t channels = input.size(1);
    const Tensor inverse = (variance + eps).rsqrt();
    const Tensor scale = weight.to(type);

    Tensor wide, result;
    const Tensor sums = at::zeros({2 * channels}, mean.options());
    const Tensor of_gradient = sums.narrow(0, 0, channels);
    const Tensor of_product = sums.narrow(0, channels, channels);
    if (input.numel() > 0) {
      wide = input.to(type);
      const Tensor gradient = gradients[0].to(type).contiguous(wide.suggest_memory_format());
      Tensor product, sum;
      std::tie(result, product, sum) =
          at::native_batch_norm_backward(gradient, wide, scale, mean, variance, {}, {},
                                         /*train=*/false, eps, {true, true, true});
      of_gradient.copy_(sum);
      of_product.copy_(product);
    }
    // A rank's own part of the sums is the gradient of its parameters.
    const auto part = [&](const Tensor& of) {
      return of.to(weight.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    };
    const Tensor of_weight = part(of_product), of_bias = part(of_gradient);
    const auto held = ctx->saved_data["held"].toCapsule();
    NormGroup& group = *static_cast<const Held&>(*held).group;
    const double samples = static_cast<const Held&>(*held).weights.use();
    if (samples == 0) {
      sums.zero_();  // also of what is NaN
    } else if (samples != 1) {
      sums.mul_(samples);
    }
    group.sum(sums);
    if (samples == 0 && input.numel() > 0) {
      fail(ErrorKind::kInvalidArgument, "SyncBatchNorm, backward, group \"", group.parent().name(),
           "\", rank ", group.parent().rank(), " of ", group.parent().size(),
           ": this rank has inputs but no samples, GradReduce::weighted(0): they are in the ",
           "statistics of all ranks, and their gradients would be left out; give it an empty ",
           "batch, or samples");
    }
    if (samples != 0 && samples != 1) sums.div_(samples);

    if (input.numel() == 0) {
      result = at::zeros_like(input);
    } else {
      const Tensor slope = scale * inverse * inverse * of_product / count;
      const Tensor offset = scale * inverse * of_gradient / count - slope * mean;
      result.sub_(at::addcmul(by_channel(offset, input), wide, by_channel(slope, input)));
      result = result.to(input.scalar_type());
    }
    return {result, of_weight, of_bias, {}, {}, {}};
  }
};

}  // namespace

template <std::size_t D, class Derived>
SyncBatchNormImplBase<D, Derived>::SyncBatchNormImplBase(
    const torch::nn::BatchNormOptions& norm_options, const ProcessGroup& group)
    : options(norm_options) {
  SyncBatchNormImplBase::reset();
  if (group) set_group(group);
}

template <std::size_t D, class Derived>
SyncBatchNormImplBase<D, Derived>::SyncBatchNormImplBase(
    const torch::nn::BatchNormOptions& norm_options, const Tensor& its_weight,
    const Tensor& its_bias, const Tensor& its_mean, const Tensor& its_var, const Tensor& its_count)
    : options(norm_options) {
  const auto trains = [](const Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  weight = this->register_parameter("weight", its_weight, trains(its_weight));
  bias = this->register_parameter("bias", its_bias, trains(its_bias));
  running_mean = this->register_buffer("running_mean", its_mean);
  running_var = this->register_buffer("running_var", its_var);
  num_batches_tracked = this->register_buffer("num_batches_tracked", its_count);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::reset() {
  const bool affine = options.affine(), tracks = options.track_running_stats();
  const std::int64_t features = options.num_features();
  const auto some = [&](bool wanted) { return wanted ? at::empty({features}) : Tensor(); };
  weight = this->register_parameter("weight", some(affine), affine);
  bias = this->register_parameter("bias", some(affine), affine);
  running_mean = this->register_buffer("running_mean", some(tracks));
  running_var = this->register_buffer("running_var", some(tracks));
  num_batches_tracked =
      this->register_buffer("num_batches_tracked", tracks ? at::zeros({}, at::kLong) : Tensor());
  reset_parameters();
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::reset_running_stats() {
  if (!options.track_running_stats()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::reset_parameters() {
  reset_running_stats();
  if (!options.affine()) return;
  const at::NoGradGuard no_grad;
  weight.fill_(1);
  bias.zero_();
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::set_group(const ProcessGroup& group) {
  if (!group) fail(ErrorKind::kInvalidArgument, "SyncBatchNorm: the group is empty; pass one");
  group_ = NormGroup::of(group);
}

// The share of this batch in the running statistics.
template <std::size_t D, class Derived>
double SyncBatchNormImplBase<D, Derived>::count_batch() {
  const double momentum = options.momentum().value_or(0);
  if (!this->is_training() || !options.track_running_stats()) return momentum;
  num_batches_tracked += 1;
  return options.momentum() ? momentum : 1.0 / num_batches_tracked.template item<double>();
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::update_statistics(double factor, const Tensor& mean,
                                                          const Tensor& variance) {
  if (!options.track_running_stats()) return;
  // Below autograd, as torch's own: a graph that still has the statistics does not read them.
  const auto update = [factor](const Tensor& running, const Tensor& value) {
    running.variable_data().mul_(1 - factor).add_(value.to(running.scalar_type()), factor);
  };
  update(running_mean, mean);
  update(running_var, variance);
}

template <std::size_t D, class Derived>
Tensor SyncBatchNormImplBase<D, Derived>::forward(const Tensor& input) {
  const std::int64_t dimensions = input.dim();
  const bool fits = D == 1 ? dimensions == 2 || dimensions == 3 : dimensions == D + 2;
  if (!fits || input.size(1) != options.num_features()) {
    fail(ErrorKind::kInvalidArgument, "SyncBatchNorm", D, "d of ", options.num_features(),
         " features: the input has sizes ", c10::str(input.sizes()));
  }
  const bool trains = this->is_training();
  if (!trains || !group_ || group_->parent().size() == 1) {
    const bool by_batch = trains || !options.track_running_stats();
    if (by_batch && input.numel() == input.size(1)) {
      fail(ErrorKind::kInvalidArgument, "SyncBatchNorm", D,
           "d: training needs more than one value per channel; the input has sizes ",
           c10::str(input.sizes()));
    }
    return at::batch_norm(input, weight, bias, running_mean, running_var, by_batch, count_batch(),
                          options.eps(), /*cudnn_enabled=*/false);
  }
  Statistics all;
  {
    const at::NoGradGuard no_grad;
    all = statistics_of_all(*group_, input.detach());
    if (all.count == 1) {
      fail(ErrorKind::kInvalidArgument, "SyncBatchNorm", D,
           "d: training needs more than one value per channel over all ranks; the input has sizes ",
           c10::str(input.sizes()));
    }
    if (all.count > 0) {
      update_statistics(count_batch(), all.mean, all.variance * (all.count / (all.count - 1)));
    }
  }
  const bool affine = weight.defined();
  return Normalise::apply(input, affine ? weight : at::ones_like(all.mean),
                          affine ? bias : at::zeros_like(all.mean), all, options.eps(), group_);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "convoy::nn::SyncBatchNorm" << D << "d(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "none";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats();
  if (group_) stream << ", group=" << group_->parent().name();
  stream << ")";
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace convoy::nn
