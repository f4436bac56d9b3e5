// Model averaging, and post-local SGD.
#include "convoy/averager.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "base/error.h"
#include "convoy/hooks.h"
#include "ddp/hook_state.h"
#include "ddp/reduce_bucket.h"

namespace convoy {
namespace {

// Tensors of one type that travel together.
constexpr std::int64_t kChunkBytes = 32 << 20;

void average(const ProcessGroup& group, at::TensorList tensors) {
  std::vector<at::Tensor> used;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.numel() > 0) used.push_back(tensor);
  }
  for (const auto& list : compute_bucket_assignment_by_size(used, {kChunkBytes})) {
    std::vector<at::Tensor> flat;
    for (const std::size_t i : list) flat.push_back(used[i].detach().reshape({-1}));
    const at::Tensor all = at::cat(flat);
    const at::Tensor mean = reduce_bucket(group, all, GradReduce::kMean, 1).wait();
    std::int64_t offset = 0;
    for (const std::size_t i : list) {
      used[i].copy_(mean.narrow(0, offset, used[i].numel()).view(used[i].sizes()));
      offset += used[i].numel();
    }
  }
}

}  // namespace

ModelAverager::ModelAverager(std::vector<AveragingLevel> levels, const AveragerOptions& options)
    : levels_(std::move(levels)), options_(options) {
  const auto require = [](bool fine, const auto&... text) {
    if (!fine) fail(ErrorKind::kInvalidArgument, "ModelAverager: ", text...);
  };
  require(!levels_.empty(), "there is no level");
  std::stable_sort(levels_.begin(), levels_.end(),
                   [](const auto& a, const auto& b) { return a.period > b.period; });
  for (std::size_t i = 0; i < levels_.size(); ++i) {
    require(levels_[i].period > 0, "a period must be > 0 steps, got 0");
    require(static_cast<bool>(levels_[i].group), "the level of period ", levels_[i].period,
            " has no group");
    const std::uint64_t longer = levels_[i == 0 ? 0 : i - 1].period;
    require(longer % levels_[i].period == 0, "a period of ", longer, " is not a multiple of ",
            levels_[i].period);
  }
}

bool ModelAverager::average_parameters(at::TensorList parameters) {
  const std::uint64_t step = steps_++;
  if (step < options_.warmup_steps) return false;
  const at::NoGradGuard no_grad;
  for (const AveragingLevel& level : levels_) {
    if ((step - options_.warmup_steps) % level.period != 0) continue;
    average(level.group, parameters);
    return true;
  }
  return false;
}

void ModelAverager::save(torch::serialize::OutputArchive& archive) const {
  write_number(archive, "steps", steps_);
}
void ModelAverager::load(torch::serialize::InputArchive& archive) {
  steps_ = read_number(archive, "steps");
}

at::Tensor PostLocalSgdOptimizer::step(std::function<at::Tensor()> closure) {
  at::Tensor loss = inner_->step(std::move(closure));
  std::vector<at::Tensor> parameters;
  for (const auto& group : inner_->param_groups()) {
    for (const at::Tensor& parameter : group.params()) parameters.push_back(parameter);
  }
  averager_.average_parameters(parameters);
  return loss;
}

void PostLocalSgdOptimizer::zero_grad(bool set_to_none) { inner_->zero_grad(set_to_none); }

void PostLocalSgdOptimizer::save(torch::serialize::OutputArchive& archive) const {
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  inner_->save(inner);
  archive.write("optimizer", inner);
  averager_.save(archive);
}

void PostLocalSgdOptimizer::load(torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive inner;
  if (!archive.try_read("optimizer", inner)) {
    fail(ErrorKind::kInvalidArgument, "PostLocalSgdOptimizer: there is no optimizer in the ",
         "archive: it was saved by something else");
  }
  inner_->load(inner);
  averager_.load(archive);
}

namespace hooks {

struct PostLocalSgd::State {
  PostLocalSgdOptions options;
  BackwardCount count;
};

PostLocalSgd::PostLocalSgd(const PostLocalSgdOptions& options)
    : state_(std::make_shared<State>(State{options, {}})) {}

HookResult PostLocalSgd::operator()(const GradBucket& bucket) const {
  const PostLocalSgdOptions& options = state_->options;
  if (state_->count.of(bucket) <= options.start_local_sgd_iter) return all_reduce(bucket);
  if (!options.subgroup) return noop(bucket);
  return reduce_bucket(options.subgroup, bucket.buffer(), GradReduce::kMean, 1);
}

void PostLocalSgd::save(torch::serialize::OutputArchive& archive) const {
  write_number(archive, "backwards", state_->count.last());
}
void PostLocalSgd::load(torch::serialize::InputArchive& archive) const {
  state_->count.go_on_after(read_number(archive, "backwards"));
}

}  // namespace hooks
}  // namespace convoy
