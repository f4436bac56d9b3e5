// Reducer: the end of a reduction.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "ddp/norm_group.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"
#include "tensor/memory.h"

namespace convoy {

void Reducer::Impl::complete(Ending outcome, std::string text) {
  RECORD_FUNCTION("convoy::finish_backward", std::vector<c10::IValue>());
  const at::NoGradGuard no_grad;
  const PurposeScope scope(purpose());
  // A mistake is its own rank's to mend.
  const auto kind_of = [](Ending worst, Ending own) {
    const bool mends = worst < Ending::kDisturbed || own == Ending::kMistaken;
    return mends ? ErrorKind::kInvalidArgument : ErrorKind::kRemote;
  };
  const std::string title = head();
  if (alone_) {
    std::vector<bool> used;
    for (const Parameter& parameter : parameters_) used.push_back(parameter.used);
    verdict_.set_used(std::move(used));
    if (outcome == Ending::kGood) {
      check_finite_alone();
      outcome = outcome_;
      text = text_;
    }
    close(outcome);
    if (outcome == Ending::kGood) return;
    error_ = title + text;
    if (outcome == Ending::kNotFinite && options_.nonfinite == NonFinite::kSkip) {
      return skip_round(error_);
    }
    fail(kind_of(outcome, outcome), error_);
  }
  if (!begun_) announce();
  std::string reason;
  bool fine = false;
  try {
    if (!begun_) begin();
    if (outcome > outcome_) trouble(outcome, std::move(text));
    if (order_.empty()) issue([&] { agree_on_order(); });
    fine = finish_buckets();
    if (fine && changed_) {
      add_buckets();
      fine = finish_buckets();
    }
    if (fine) {
      reduce_sparse();
      consume();
      write_back();
      if (changed_) lay_out();
      close(Ending::kGood);
    } else {
      reason = verdict_.explain(group_, text_);
    }
  } catch (...) {
    end_group_unless_agreed();
    close(Ending::kFailed);
    try {
      rethrow_with(text_.empty() ? title : concat(title, text_, "; then "));
    } catch (const Error& e) {
      error_ = e.what();
      throw;
    }
  }
  if (fine) {
    if (join_) join_->finish(join_step_);
    return;
  }
  const Ending worst = verdict_.worst();
  if (worst >= Ending::kDisturbed) {
    end_hook_group();
    abandon_norms(group_);
    remake_hook_group();
  }
  const Ending own = outcome_;
  close(worst == Ending::kGood ? Ending::kFailed : worst);
  stats_.backwards = verdict_.last_backward();
  error_ = title + reason;
  if (worst == Ending::kNotFinite && options_.nonfinite == NonFinite::kSkip) {
    return skip_round(error_);
  }
  fail(kind_of(worst, own), error_);
}

// All ranks are here. (Where that fails, the next round tries again, and tells.)
void Reducer::Impl::remake_hook_group() noexcept {
  if (!hook_ || hook_group_) return;
  try {
    hook_group_ = own_group(group_);
  } catch (const std::exception& e) {
    log_warn("making the group of a comm hook again: ", e.what());
  }
}

// In a handler.
void Reducer::Impl::end_group_unless_agreed() noexcept {
  const std::string what = concat("backward ", stats_.backwards + 1);
  const bool under_way = std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) {
    return bucket.result.has_value();
  });
  try {
    throw;
  } catch (const coll::Disagreement& e) {
    // All ranks know; but not what to do with the other buckets.
    if (under_way) abort_because(group_, concat(what, " failed there: ", e.what()));
  } catch (...) {
    give_up(group_, what);
  }
}

// What is left of the buckets, and the verdict about them.
bool Reducer::Impl::finish_buckets() {
  if (!buckets_.empty()) meet_before_hooks();
  while (next_ < buckets_.size()) launch(next_++);
  take_results();
  check_sparse();
  if (join_) {  // a batch more or less is no matter
    std::erase_if(forwards_, [this](const auto& one) {
      return one.second && one.second.use_count() == 1 && !visited_.contains(one.first);
    });
  }
  const bool counts = !shadowing_ && !in_late_round_;
  const auto forwards = counts ? forwards_.size() : Verdict::kAnyForwards;
  Verdict::Ballot ballot{outcome_, stats_.backwards + 1, forwards, layout_hash(), {}};
  for (const Parameter& parameter : parameters_) ballot.used.push_back(parameter.used);
  if (!shadowing_) ballot.stamps = timeline_.stamps(last_gradient_);
  late_ = false;
  bool fine = false;
  if (issue([&] { fine = verdict_.reach(group_, ballot); })) return fine;
  ballot.outcome = outcome_;  // it was the first operation: once more, for all that disagreed
  return verdict_.reach(group_, ballot);
}

void Reducer::Impl::take_results() {
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    Bucket& bucket = buckets_[index];
    if (!bucket.result) continue;
    at::Tensor result;
    try {
      result = bucket.result->wait();
    } catch (const Error& e) {
      // A lost or late rank ends the group: there is nobody to reach a verdict with. Neither with a
      // rank that calls something of its own.
      const auto* const disagreement = dynamic_cast<const coll::Disagreement*>(&e);
      const bool lost =
          disagreement ? !can_go_on(*disagreement) : e.kind() != ErrorKind::kInvalidArgument;
      if (!hook_ && lost) {
        const std::string text = concat("bucket ", index, " of ", buckets_.size(), ": ", e.what());
        bucket.result.reset();
        if (disagreement) throw coll::Disagreement(text, disagreement->calls());
        throw Error(e.kind(), text);
      }
      trouble(Ending::kDisturbed, concat(where(index), ": ", e.what()));
      continue;
    } catch (const std::exception& e) {
      if (!hook_) throw;
      trouble(Ending::kFailed, concat(where(index), ": the comm hook threw: ", e.what()));
      continue;
    } catch (...) {
      trouble(Ending::kFailed, concat(where(index), ": the comm hook threw something"));
      continue;
    }
    bucket.result.reset();
    timeline_.done(index);
    if (result.defined() && result.is_same(bucket.buffer)) continue;
    if (!result.defined()) {
      trouble(Ending::kMistaken, concat(where(index), ": the comm hook returned no tensor"));
      continue;
    }
    if (result.layout() != c10::kStrided || result.numel() != bucket.buffer.numel() ||
        result.scalar_type() != bucket.buffer.scalar_type()) {
      trouble(Ending::kMistaken,
              concat(where(index), ": the comm hook returned ", result.numel(), " elements of ",
                     result.scalar_type(), ", not ", bucket.buffer.numel(), " of ",
                     bucket.buffer.scalar_type()));
      continue;
    }
    bucket.buffer.copy_(result.reshape({-1}));
  }
  // Last: what it throws may be no end of the group, and nothing of this round is under way then.
  for (const auto& port : ports_) go_on_if(first_in_port_, [&] { port->drain(); });
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    if (buckets_[index].deferred) timeline_.done(index);
  }
}

void Reducer::Impl::write_back() {
  const auto start = Clock::now();
  for (const Bucket& bucket : buckets_) {
    if (bucket.skipped) continue;
    for (const std::size_t i : bucket.parameters) {
      if (parameters_[i].active) write_back(i);
    }
  }
  stats_.copy_time += Clock::now() - start;
}

void Reducer::Impl::write_back(std::size_t index) {
  Parameter& parameter = parameters_[index];
  const at::Tensor& slot = buckets_[parameter.bucket].slots[parameter.slot];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  if (!verdict_.used()[index]) {
    // Nobody's: as it was, to the bit.
    if (parameter.kept.defined()) gradient.copy_(parameter.kept);
    return;
  }
  if (parameter.stays) return;
  if (parameter.dropped) {
    gradient.reset();
  } else if (parameter.graph.defined()) {
    // The value is the mean, the history this rank's: a loss made of it has this rank's part of the
    // gradient, which is reduced in turn.
    constexpr std::uint64_t kNoForward = 0;
    gradient = put_sink(slot.clone(), parameter.graph, make_sink(kNoForward, nullptr));
  } else if (options_.gradient_as_bucket_view && slot.scalar_type() == parameter.type) {
    if (!is_alias(gradient, slot)) gradient = bucket_of(parameter).handle(parameter.slot);
  } else if (gradient.defined() && gradient.scalar_type() == parameter.type) {
    gradient.copy_(slot);
  } else {
    gradient =
        at::empty_strided(slot.sizes(), slot.strides(), slot.options().dtype(parameter.type));
    gradient.copy_(slot);
  }
}

void Reducer::Impl::close(Ending outcome) {
  open_ = false;
  const auto now = Clock::now();
  const bool good = outcome == Ending::kGood;
  const at::NoGradGuard no_grad;
  skipped_ = false;
  if (good) error_.clear();
  observe(outcome, now);
  // A rank that has run no backward has not seen its graph.
  const bool learns =
      good && !learnt_ && !shadowing_ &&
      std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
        return parameter.computed || parameter.fired > 0;
      });
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.expected = std::max(parameter.expected, parameter.fired);
    if (learns && options_.static_graph) {
      parameter.learnt_unused = parameter.active && !parameter.computed && parameter.fired == 0;
    }
    const at::Tensor& gradient = tensors_[i].grad();
    const bool was_summed = parameter.summed.defined();
    if (was_summed) {
      tensors_[i].mutable_grad() =
          gradient.defined() ? gradient.add_(parameter.summed) : std::move(parameter.summed);
      parameter.summed.reset();
    }
    const bool left_local = std::exchange(parameter.left_local, false);
    const bool deferred =
        left_local || (parameter.bucket != kNone && bucket_of(parameter).deferred);
    // What nobody has used is what it was: reduced, or not.
    const bool holds_all = verdict_.used()[i] || was_summed;
    if (good && holds_all && gradient.defined() && !deferred) {
      parameter.reduced = true;
      parameter.note(gradient);
    } else if (!good) {
      parameter.reduced = false;
    } else if (parameter.reduced && gradient.defined()) {
      const bool touched = parameter.touched;
      parameter.note(gradient);  // may be another tensor since it lies in a bucket
      if (touched) parameter.seen_version = -1;
    }
    parameter.used = left_local;
    parameter.computed = false;
    parameter.fired = 0;
    parameter.kept.reset();
    parameter.graph.reset();
    parameter.rows.reset();
    // Once more: a peer that has mapped the bucket since then has touched all of it.
    if (parameter.stays && parameter.bucket != kNone && bucket_of(parameter).fresh) {
      const at::Tensor& slot = bucket_of(parameter).slots[parameter.slot];
      if (!is_alias(tensors_[i].grad(), slot)) give_pages_back(slot);
    }
    parameter.stays = false;
  }
  for (Bucket& bucket : buckets_) {
    bucket.result.reset();
    bucket.fresh = false;
  }
  meeting_.reset();
  for (const auto& port : ports_) port->closed();
  norm_weight_->forget();
  learnt_ |= learns;
  armed_ = false;
  forwards_.clear();
  visited_.clear();
  // The next round knows better; but a sharded optimizer has not had these yet.
  if (std::exchange(guessed_, false) && ports_.empty()) {
    order_.clear();
    buckets_.clear();
    for (Parameter& parameter : parameters_) parameter.bucket = kNone;
  }
  ++stats_.backwards;
  stats_.backward_time = now - entered_;
  stats_.exposed_time = now - last_gradient_;
}

void Reducer::Impl::sync_gradients() {
  if (in_backward_) {
    fail(ErrorKind::kInvalidArgument, "it cannot be called inside of a backward; call it after");
  }
  entered_ = last_gradient_ = Clock::now();
  round_ = "sync_gradients";
  if (!open_) {
    try {
      open(nullptr);
    } catch (...) {
      if (open_) close(Ending::kFailed);
      throw;
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {  // also what the user has set
    Parameter& parameter = parameters_[i];
    const at::Tensor& gradient = tensors_[i].grad();
    const bool as_we_left_it = parameter.reduced && parameter.is_untouched(gradient);
    parameter.used |= parameter.active && gradient.defined() && !as_we_left_it;
  }
  const std::string owed = std::exchange(owed_, {});
  complete(owed.empty() ? Ending::kGood : Ending::kFailed, owed);
}

}  // namespace convoy
