#include "pipeline/stage_run.h"

#include "base/error.h"

namespace convoy {

using detail::StageInput;

StageRun::StageRun(const detail::StagePlan& plan)
    : plan_(plan), deadline_(std::chrono::nanoseconds(plan.timeout_ns)) {
  const bool fits = plan.micro_batches > 0 && plan.index < plan.stages &&
                    plan.weights.size() == static_cast<std::size_t>(plan.micro_batches) &&
                    plan.previous.has_value() == (plan.index != 0) &&
                    plan.next.has_value() == (plan.index + 1 != plan.stages);
  if (!fits) convoy::fail(ErrorKind::kInvalidArgument, "pipeline: malformed plan of a step");
  const auto count = static_cast<std::size_t>(plan.micro_batches);
  kept.resize(count);
  activations_.resize(count);
  gradients_.resize(count);
  targets_.resize(count);
}

std::vector<PipelineOp> StageRun::ops() const {
  if (!plan_.trains) return forward_ops(plan_.micro_batches);
  return pipeline_ops(static_cast<PipelineSchedule>(plan_.schedule), plan_.index, plan_.stages,
                      plan_.micro_batches);
}

std::vector<at::Tensor>& StageRun::came(StageInput kind) {
  switch (kind) {
    case StageInput::kActivation: return activations_;
    case StageInput::kGradient: return gradients_;
    case StageInput::kTarget: return targets_;
  }
  convoy::fail(ErrorKind::kInvalidArgument,
               "pipeline: unknown kind of input: ", static_cast<int>(kind));
}

void StageRun::take(StageInput kind, int micro_batch, const at::Tensor& tensor) {
  const std::scoped_lock lock(mutex_);
  auto& places = came(kind);
  const auto place = static_cast<std::size_t>(micro_batch);
  if (micro_batch < 0 || place >= places.size() || !tensor.defined()) {
    convoy::fail(ErrorKind::kInvalidArgument, "pipeline: micro-batch ", micro_batch, " of ",
                 places.size());
  }
  places[place] = tensor;
  changed_.notify_all();
}

void StageRun::fail(const std::exception_ptr& error) {
  const std::scoped_lock lock(mutex_);
  if (!error_) error_ = error;
  changed_.notify_all();
}

std::exception_ptr StageRun::error() const {
  const std::scoped_lock lock(mutex_);
  return error_;
}

at::Tensor StageRun::wait_for(StageInput kind, int micro_batch) {
  std::unique_lock lock(mutex_);
  at::Tensor& place = came(kind)[static_cast<std::size_t>(micro_batch)];
  const auto ready = [&] { return place.defined() || error_ != nullptr; };
  if (!ready()) {
    if (deadline_.is_never()) {
      changed_.wait(lock, ready);
    } else if (!changed_.wait_until(lock, deadline_.when(), ready)) {
      const char* const what = kind == StageInput::kActivation ? "its input"
                               : kind == StageInput::kGradient ? "its gradient"
                                                               : "its target";
      convoy::fail(ErrorKind::kTimeout, what, " has not come in time");
    }
  }
  if (error_) std::rethrow_exception(error_);
  return std::exchange(place, at::Tensor());
}

void StageRun::send(const std::shared_ptr<StageRun>& run, StageInput kind, int micro_batch,
                    const at::Tensor& tensor) {
  const auto& plan = run->plan_;
  const auto& to = kind == StageInput::kGradient ? *plan.previous : *plan.next;
  const auto sent =
      to.with({.timeout = run->deadline_, .stays = true})
          .rpc_async<detail::take_input>(plan.step, static_cast<std::int32_t>(kind),
                                         static_cast<std::int32_t>(micro_batch), tensor);
  static_cast<void>(sent.then([run](const rpc::Future<void>& done) {
    if (const auto error = done.error()) run->fail(error);
  }));
}

void StageRun::let_neighbours_go() {
  plan_.previous.reset();
  plan_.next.reset();
  kept.clear();
}

void StageRun::end(std::exception_ptr error) {
  if (error) {
    promise_.set_error(std::move(error));
  } else {
    promise_.set_value(std::move(report));
  }
}

}  // namespace convoy
