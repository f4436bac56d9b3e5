#include "convoy/pipeline.h"

#include <ATen/Functions.h>

#include <atomic>
#include <optional>

#include "base/error.h"
#include "pipeline/messages.h"
#include "pipeline/schedule.h"

namespace convoy {

using detail::StageInput;
using detail::StagePlan;
using detail::StageReport;

struct Pipeline::Impl {
  Impl(const rpc::Session& in, std::vector<RRef<PipelineStage>> all, const PipelineOptions& how)
      : session(in), stages(std::move(all)), options(how) {}

  const rpc::Session session;
  const std::vector<RRef<PipelineStage>> stages;
  const PipelineOptions options;
};

namespace {

constexpr std::chrono::milliseconds kDefaultStep = std::chrono::minutes(30);
// How long others may take to say what they know of a failure.
constexpr std::chrono::seconds kHearAll(2);

// Unique in a session: the rank of this worker, and a number.
std::uint64_t new_step(const rpc::Session& session) {
  static std::atomic<std::uint64_t> last{0};
  return (static_cast<std::uint64_t>(session.worker_info().rank) << 40) | ++last;
}

std::vector<at::Tensor> cut(const at::Tensor& batch, int parts, const char* what) {
  if (!batch.defined() || batch.dim() == 0 || batch.size(0) < parts) {
    fail(ErrorKind::kInvalidArgument, "pipeline: the ", what, " cannot be cut into ", parts,
         " micro-batches along its first dimension");
  }
  return batch.detach().tensor_split(parts);
}

// What a stage's part of a step ended with.
struct Failure {
  std::size_t stage;
  ErrorKind kind;
  std::string text;
  std::string remote_type;
};

// One step, as the worker sees it that runs it.
class Attempt {
 public:
  Attempt(const rpc::Session& session, const std::vector<RRef<PipelineStage>>& stages,
          const PipelineOptions& options)
      : stages_(stages),
        options_(options),
        deadline_(options.timeout.deadline(kDefaultStep)),
        step_(new_step(session)) {}

  std::vector<StageReport> run(const std::vector<at::Tensor>& inputs,
                               const std::vector<at::Tensor>& targets) {
    try {
      std::vector<rpc::Future<void>> begun;
      for (std::size_t s = 0; s < stages_.size(); ++s) {
        begun.push_back(at(s).rpc_async<detail::begin_step>(plan(s, inputs, !targets.empty())));
      }
      doing_ = "begin";
      wait(begun);
      doing_ = nullptr;
      for (std::size_t s = 0; s < stages_.size(); ++s) {
        ended_.push_back(at(s).rpc_async<detail::end_of_step>(step_));
      }
      feed(0, StageInput::kActivation, inputs);
      feed(stages_.size() - 1, StageInput::kTarget, targets);
      rpc::wait_all(ended_, deadline_);
    } catch (...) {
      give_up(std::current_exception());
    }
    std::vector<StageReport> reports;
    for (const auto& one : ended_) reports.push_back(one.result());
    return reports;
  }

  void commit() {
    try {
      std::vector<rpc::Future<void>> done;
      for (std::size_t s = 0; s < stages_.size(); ++s) {
        done.push_back(at(s).rpc_async<detail::commit_step>(step_));
      }
      doing_ = "commit";
      wait(done);
    } catch (...) {
      give_up(std::current_exception());
    }
  }

 private:
  rpc::RRefTarget<PipelineStage> at(std::size_t stage) const {
    return stages_[stage].with({.timeout = deadline_, .stays = true});
  }

  StagePlan plan(std::size_t s, const std::vector<at::Tensor>& inputs, bool trains) const {
    StagePlan made;
    made.step = step_;
    made.index = s;
    made.stages = stages_.size();
    made.micro_batches = static_cast<std::int32_t>(inputs.size());
    made.schedule = static_cast<std::int32_t>(options_.schedule);
    made.trains = trains;
    made.timeout_ns = deadline_.remaining().count();
    std::int64_t samples = 0;
    for (const at::Tensor& input : inputs) samples += input.size(0);
    for (const at::Tensor& input : inputs) {
      made.weights.push_back(static_cast<double>(input.size(0)) / static_cast<double>(samples));
    }
    if (s > 0) made.previous = stages_[s - 1];
    if (s + 1 < stages_.size()) made.next = stages_[s + 1];
    return made;
  }

  void feed(std::size_t stage, StageInput kind, const std::vector<at::Tensor>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      auto sent = at(stage).rpc_async<detail::take_input>(step_, static_cast<std::int32_t>(kind),
                                                          static_cast<std::int32_t>(i), tensors[i]);
      fed_.emplace_back(stage, std::move(sent));
    }
    for (const auto& [where, sent] : fed_) sent.wait(deadline_);
  }

  // Of one future for each stage.
  void wait(std::vector<rpc::Future<void>>& futures) {
    small_ = futures;
    rpc::wait_all(futures, deadline_);
  }

  // What is known of it, a lost worker first: others may only have heard of that.
  std::optional<Failure> cause() const {
    std::optional<Failure> found;
    const auto look = [&](std::size_t stage, const std::exception_ptr& error) {
      if (!error) return;
      Failure failure{stage, ErrorKind::kInternal, {}, {}};
      try {
        std::rethrow_exception(error);
      } catch (const rpc::RemoteError& e) {
        failure = {stage, e.kind(), e.what(), e.remote_type()};
      } catch (const Error& e) {
        failure = {stage, e.kind(), e.what(), {}};
      } catch (const std::exception& e) {
        failure.text = e.what();
      }
      const bool is_cause = failure.kind == ErrorKind::kPeerLost;
      if (!found || (is_cause && found->kind != ErrorKind::kPeerLost)) found = failure;
    };
    for (std::size_t s = 0; s < ended_.size(); ++s) look(s, ended_[s].error());
    for (std::size_t s = 0; s < small_.size(); ++s) look(s, small_[s].error());
    for (const auto& [stage, sent] : fed_) look(stage, sent.error());
    return found;
  }

  // Who was waited for when the time was over.
  std::optional<Failure> late() const {
    if (!deadline_.expired()) return std::nullopt;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (s < ended_.size() && ended_[s].done()) continue;
      return Failure{s, ErrorKind::kTimeout, "it did not finish by the deadline", {}};
    }
    return std::nullopt;
  }

  // Tells all stages, and throws.
  [[noreturn]] void give_up(const std::exception_ptr& thrown) {
    auto failure = cause();
    abort_all(failure);
    // Who is lost is known a little later, perhaps.
    const Deadline patience = std::min(deadline_, Deadline::after(kHearAll));
    for (const auto& one : ended_) {
      try {
        static_cast<void>(one.wait(patience));
      } catch (...) {  // cause() looks at it
      }
    }
    // Errors that come now are ours, told by abort_all(), but for a lost worker.
    const auto later = cause();
    const bool is_lost = later && later->kind == ErrorKind::kPeerLost;
    if (is_lost || !failure) failure = later;
    if (!failure) failure = late();
    if (!failure) std::rethrow_exception(thrown);
    if (!is_lost && deadline_.expired()) failure->kind = ErrorKind::kTimeout;
    abort_all(failure);
    throw rpc::RemoteError(failure->kind, text_of(*failure), worker(failure->stage),
                           failure->remote_type);
  }

  void abort_all(const std::optional<Failure>& failure) const noexcept {
    const auto kind = failure ? failure->kind : ErrorKind::kTimeout;
    for (const auto& stage : stages_) {
      try {
        static_cast<void>(
            stage.with({.timeout = kHearAll})
                .rpc_async<detail::abort_step>(
                    step_, static_cast<std::int32_t>(kind),
                    failure ? text_of(*failure) : std::string("pipeline: the step was given up")));
      } catch (const std::exception&) {  // it is gone
      }
    }
  }

  std::string worker(std::size_t stage) const {
    try {
      return stages_[stage].owner_name();
    } catch (const std::exception&) {
      return {};
    }
  }
  std::string text_of(const Failure& failure) const {
    return concat("pipeline, stage ", failure.stage, " of ", stages_.size(), " (",
                  worker(failure.stage), doing_ ? concat(", ", doing_) : std::string(),
                  "): ", failure.text);
  }

  const std::vector<RRef<PipelineStage>>& stages_;
  const PipelineOptions& options_;
  const Deadline deadline_;
  const std::uint64_t step_;
  const char* doing_ = nullptr;
  std::vector<rpc::Future<void>> small_;  // of one call to each stage, the last ones
  std::vector<std::pair<std::size_t, rpc::Future<void>>> fed_;  // inputs and targets, by stage
  std::vector<rpc::Future<StageReport>> ended_;
};

PipelineTimeline timeline_of(const std::vector<RRef<PipelineStage>>& stages,
                             const std::vector<StageReport>& reports,
                             const PipelineOptions& options) {
  using Time = PipelineSpan::Time;
  const auto at = [](std::int64_t ns) { return Time(std::chrono::nanoseconds(ns)); };
  PipelineTimeline made;
  for (std::size_t s = 0; s < reports.size(); ++s) {
    made.workers.push_back(stages[s].owner_name());
    const auto ops = pipeline_ops(options.schedule, s, reports.size(), options.micro_batches);
    const auto& times = reports[s].times;
    for (std::size_t k = 0; k < ops.size() && 2 * k + 1 < times.size(); ++k) {
      made.spans.push_back(
          {s, ops[k].kind, ops[k].micro_batch, at(times[2 * k]), at(times[2 * k + 1])});
    }
  }
  return made;
}

}  // namespace

Pipeline::Pipeline(const rpc::Session& session, std::vector<RRef<PipelineStage>> stages,
                   const PipelineOptions& options) {
  if (stages.empty()) fail(ErrorKind::kInvalidArgument, "pipeline: there are no stages");
  for (const auto& stage : stages) {
    if (!stage) fail(ErrorKind::kInvalidArgument, "pipeline: a stage is an empty reference");
  }
  if (options.micro_batches < 1) {
    fail(ErrorKind::kInvalidArgument, "pipeline: micro_batches must be >= 1, got ",
         options.micro_batches);
  }
  impl_ = std::make_shared<const Impl>(session, std::move(stages), options);
}

PipelineStep Pipeline::step(const at::Tensor& input, const at::Tensor& target) const {
  const int parts = impl_->options.micro_batches;
  const auto inputs = cut(input, parts, "input"), targets = cut(target, parts, "target");
  if (input.size(0) != target.size(0)) {
    fail(ErrorKind::kInvalidArgument, "pipeline: ", input.size(0), " samples and ", target.size(0),
         " targets");
  }
  Attempt attempt(impl_->session, impl_->stages, impl_->options);
  const auto reports = attempt.run(inputs, targets);
  attempt.commit();
  return {reports.back().loss, timeline_of(impl_->stages, reports, impl_->options)};
}

at::Tensor Pipeline::forward(const at::Tensor& input) const {
  Attempt attempt(impl_->session, impl_->stages, impl_->options);
  const auto reports = attempt.run(cut(input, impl_->options.micro_batches, "input"), {});
  attempt.commit();
  return at::cat(reports.back().outputs);
}

std::vector<RRef<at::Tensor>> Pipeline::parameters() const {
  std::vector<RRef<at::Tensor>> all;
  for (const auto& stage : impl_->stages) {
    for (auto& one : stage.rpc_sync<detail::stage_parameters>()) all.push_back(std::move(one));
  }
  return all;
}

const std::vector<RRef<PipelineStage>>& Pipeline::stages() const { return impl_->stages; }
const PipelineOptions& Pipeline::options() const { return impl_->options; }

}  // namespace convoy
