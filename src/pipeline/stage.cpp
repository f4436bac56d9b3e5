#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "autograd/context.h"
#include "base/error.h"
#include "base/loop.h"
#include "pipeline/stage_impl.h"
#include "rpc/recording.h"

namespace convoy {
namespace {

using detail::StageInput;
using Kind = PipelineSpan::Kind;

constexpr std::size_t kMostAborted = 1000;

std::string text_in(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return text.substr(0, text.find('\n'));
  } catch (...) {
    return "an exception not derived from std::exception";
  }
}

std::int64_t now_in_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Nobody else has its memory.
bool is_ours(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.has_storage() && tensor.storage().use_count() == 1;
}

}  // namespace

PipelineStage::PipelineStage(Forward forward, std::vector<at::Tensor> parameters, Loss loss) {
  // Closes it when the last copy goes; the thread has a share of its own.
  struct Owner {
    explicit Owner(std::shared_ptr<Impl> made) : impl(std::move(made)) { impl->start(); }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    ~Owner() { impl->close(); }
    const std::shared_ptr<Impl> impl;
  };
  const auto owner = std::make_shared<Owner>(
      std::make_shared<Impl>(std::move(forward), std::move(parameters), std::move(loss)));
  impl_ = std::shared_ptr<Impl>(owner, owner->impl.get());
}
const std::vector<at::Tensor>& PipelineStage::parameters() const { return impl_->parameters(); }
std::string PipelineStage::last_error() const { return impl_->last_error(); }

PipelineStage::Impl::Impl(Forward forward, std::vector<at::Tensor> parameters, Loss loss)
    : forward_(std::move(forward)), parameters_(std::move(parameters)), loss_(std::move(loss)) {
  if (!forward_) fail(ErrorKind::kInvalidArgument, "PipelineStage: forward is an empty function");
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.defined() && parameter.is_leaf()) continue;
    fail(ErrorKind::kInvalidArgument, "PipelineStage: a parameter is ",
         parameter.defined() ? "not a leaf of the graph" : "undefined");
  }
}

void PipelineStage::Impl::start() {
  thread_ =
      std::jthread([self = shared_from_this()](const std::stop_token& stop) { self->work(stop); });
}

void PipelineStage::Impl::close() noexcept {
  fail_all();
  thread_.request_stop();
  // The last copy may go with the end of a step, on the thread itself: it ends soon then.
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void PipelineStage::Impl::fail_all() {
  const auto error = std::make_exception_ptr(
      Error(ErrorKind::kCancelled, "pipeline: the last reference to the stage is gone"));
  const std::scoped_lock lock(mutex_);
  for (const auto& [step, run] : runs_) run->fail(error);
}

std::string PipelineStage::Impl::last_error() const {
  const std::scoped_lock lock(mutex_);
  return last_error_;
}

void PipelineStage::Impl::begin(const detail::StagePlan& plan, const rpc::Session& session,
                                int driver) {
  auto run = std::make_shared<StageRun>(plan);
  run->driver = driver;
  if (plan.trains && run->is_last() && !loss_) {
    fail(ErrorKind::kInvalidArgument, "PipelineStage: the last stage needs a loss");
  }
  bool watches = false;
  {
    const std::scoped_lock lock(mutex_);
    if (aborted_.contains(plan.step)) {
      fail(ErrorKind::kCancelled, "PipelineStage: step ", plan.step, " was given up already");
    }
    if (!runs_.emplace(plan.step, run).second) {
      fail(ErrorKind::kInvalidArgument, "PipelineStage: step ", plan.step, " was begun already");
    }
    queue_.push_back(std::move(run));
    watches = watched_.insert(driver).second;
    changed_.notify_all();
  }
  if (!watches) return;
  session.on_lost(driver, [weak = weak_from_this(), driver](const auto&, const Error& error) {
    if (const auto self = weak.lock()) self->driver_lost(driver, error);
  });
}

void PipelineStage::Impl::driver_lost(int driver, const Error& error) {
  const auto why = std::make_exception_ptr(Error(
      ErrorKind::kPeerLost, concat("pipeline: the worker that runs it is gone: ", error.what())));
  std::vector<std::uint64_t> steps;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [step, run] : runs_) {
      if (run->driver == driver) steps.push_back(step);
    }
  }
  for (const std::uint64_t step : steps) abort(step, why);
}

std::shared_ptr<StageRun> PipelineStage::Impl::find(std::uint64_t step) const {
  const std::scoped_lock lock(mutex_);
  const auto found = runs_.find(step);
  return found == runs_.end() ? nullptr : found->second;
}

// If its thread is not through with it, that one forgets it.
void PipelineStage::Impl::abort(std::uint64_t step, const std::exception_ptr& error) {
  const std::scoped_lock lock(mutex_);
  const auto found = runs_.find(step);
  if (found == runs_.end()) {
    // It may have overtaken begin(). There are not many of these at once.
    aborted_.insert(step);
    if (aborted_.size() > kMostAborted) aborted_.erase(aborted_.begin());
    return;
  }
  const RunPtr run = found->second;
  run->fail(error);
  run->abandoned = true;
  if (!run->ended().done()) return;
  last_error_ = text_in(run->error());
  runs_.erase(found);
}

void PipelineStage::Impl::commit(std::uint64_t step) {
  const auto run = find(step);
  if (!run || !run->ended().done() || run->error()) {
    fail(ErrorKind::kInvalidArgument, "PipelineStage: step ", step, " has not ended well");
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  for (std::size_t i = 0; i < run->sums.size(); ++i) {
    if (run->sums[i].defined()) gradients.emplace_back(parameters_[i], std::move(run->sums[i]));
  }
  {
    const std::scoped_lock lock(mutex_);
    runs_.erase(step);
  }
  if (const auto recorder = rpc::detail::current_recorder()) {
    autograd::detail::FrameRecorder::context_of(*recorder)->add(std::move(gradients));
    return;
  }
  const at::NoGradGuard no_grad;
  for (auto& [parameter, gradient] : gradients) {
    at::Tensor& mine = parameter.mutable_grad();
    if (mine.defined()) {
      mine.add_(gradient);
    } else {
      mine = std::move(gradient);
    }
  }
}

// --- the thread ---

void PipelineStage::Impl::work(const std::stop_token& stop) {
  set_thread_name("pipeline");
  for (;;) {
    RunPtr run;
    {
      std::unique_lock lock(mutex_);
      if (!changed_.wait(lock, stop, [this] { return !queue_.empty(); })) return;
      run = std::move(queue_.front());
      queue_.pop_front();
    }
    execute(run);
  }
}

void PipelineStage::Impl::execute(const RunPtr& run) {
  std::string doing;
  std::exception_ptr error;
  try {
    run->sums.resize(parameters_.size());
    for (const PipelineOp& op : run->ops()) {
      const bool forwards = op.kind == Kind::kForward;
      doing = concat(forwards ? "forward" : "backward", " of micro-batch ", op.micro_batch);
      if (const auto failed = run->error()) std::rethrow_exception(failed);
      forwards ? forward(run, op.micro_batch) : backward(run, op.micro_batch);
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (error && !run->error()) {  // its own
    error = std::make_exception_ptr(
        Error(ErrorKind::kRemote, concat("pipeline: ", doing, ": ", text_in(error))));
    run->fail(error);
  }
  run->let_neighbours_go();
  if (error) run->sums.clear();
  {
    const std::scoped_lock lock(mutex_);
    if (error) last_error_ = text_in(run->error());
  }
  run->end(error);
  // Until it is aborted others may ask for it.
  const std::scoped_lock lock(mutex_);
  if (!run->abandoned) return;
  last_error_ = text_in(run->error());
  runs_.erase(run->step());
}

void PipelineStage::Impl::forward(const RunPtr& run, int micro_batch) {
  at::Tensor input = run->wait_for(StageInput::kActivation, micro_batch);
  at::Tensor target;
  const bool has_loss = run->is_last() && run->trains();
  if (has_loss) target = run->wait_for(StageInput::kTarget, micro_batch);
  const std::int64_t begin = now_in_ns();
  const at::AutoGradMode grad_mode(run->trains());
  input = input.detach();
  if (run->trains() && !run->is_first()) input.requires_grad_();
  at::Tensor output = forward_(input);
  if (!output.defined()) fail(ErrorKind::kInvalidArgument, "it made no tensor");
  if (has_loss) {
    output = loss_(output, target);
    if (!output.defined() || output.numel() != 1) {
      fail(ErrorKind::kInvalidArgument, "the loss must be a scalar");
    }
  }
  run->report.times.insert(run->report.times.end(), {begin, now_in_ns()});
  if (has_loss) {
    const at::NoGradGuard no_grad;
    const at::Tensor part = output.detach() * run->weight(micro_batch);
    run->report.loss = run->report.loss.defined() ? run->report.loss + part : part;
  } else if (run->is_last()) {
    run->report.outputs.push_back(output.detach());
  } else {
    StageRun::send(run, StageInput::kActivation, micro_batch, output.detach());
  }
  if (run->trains()) {
    run->kept[static_cast<std::size_t>(micro_batch)] = {std::move(input), std::move(output)};
  }
}

void PipelineStage::Impl::backward(const RunPtr& run, int micro_batch) {
  const auto kept = std::exchange(run->kept[static_cast<std::size_t>(micro_batch)], {});
  const at::Tensor gradient = run->is_last()
                                  ? at::full_like(kept.output, run->weight(micro_batch)).detach()
                                  : run->wait_for(StageInput::kGradient, micro_batch);
  const std::int64_t begin = now_in_ns();
  std::vector<at::Tensor> leaves;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad()) continue;
    leaves.push_back(parameters_[i]);
    places.push_back(i);
  }
  if (!run->is_first()) leaves.push_back(kept.input);
  torch::autograd::variable_list made;
  if (!leaves.empty()) {
    made = torch::autograd::grad({kept.output}, leaves, {gradient},
                                 /*retain_graph=*/std::nullopt,
                                 /*create_graph=*/false, /*allow_unused=*/true);
  }
  {
    const at::NoGradGuard no_grad;
    for (std::size_t k = 0; k < places.size(); ++k) {
      at::Tensor& sum = run->sums[places[k]];
      if (!made[k].defined()) continue;
      if (sum.defined()) {
        sum.add_(made[k]);
      } else {
        sum = is_ours(made[k]) ? std::move(made[k]) : made[k].clone();
      }
    }
  }
  run->report.times.insert(run->report.times.end(), {begin, now_in_ns()});
  if (run->is_first()) return;
  at::Tensor back = std::move(made.back());
  if (!back.defined()) back = at::zeros_like(kept.input);
  StageRun::send(run, StageInput::kGradient, micro_batch, back.detach());
}

// --- what others call ---

namespace detail {

void begin_step(PipelineStage& stage, const StagePlan& plan) {
  const auto call = rpc::current();
  stage.impl().begin(plan, call.session(), call.caller().rank);
}
rpc::Future<StageReport> end_of_step(PipelineStage& stage, std::uint64_t step) {
  const auto run = stage.impl().find(step);
  if (!run) fail(ErrorKind::kInvalidArgument, "PipelineStage: there is no step ", step);
  return run->ended();
}
void take_input(PipelineStage& stage, std::uint64_t step, std::int32_t kind,
                std::int32_t micro_batch, const at::Tensor& tensor) {
  const auto run = stage.impl().find(step);
  if (run) run->take(static_cast<StageInput>(kind), micro_batch, tensor);
}
void abort_step(PipelineStage& stage, std::uint64_t step, std::int32_t kind,
                const std::string& text) {
  stage.impl().abort(step, std::make_exception_ptr(Error(static_cast<ErrorKind>(kind), text)));
}
void commit_step(PipelineStage& stage, std::uint64_t step) { stage.impl().commit(step); }
std::vector<RRef<at::Tensor>> stage_parameters(PipelineStage& stage) {
  const rpc::Session session = rpc::current().session();
  std::vector<RRef<at::Tensor>> all;
  for (const at::Tensor& parameter : stage.parameters()) {
    all.push_back(session.rref(at::Tensor(parameter)));
  }
  return all;
}

CONVOY_RPC(begin_step);
CONVOY_RPC(end_of_step);
CONVOY_RPC(take_input);
CONVOY_RPC(abort_step);
CONVOY_RPC(commit_step);
CONVOY_RPC(stage_parameters);

}  // namespace detail
}  // namespace convoy
