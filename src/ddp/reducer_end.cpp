// Reducer: the end of a backward, and that of the reduction.
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

// --- the end of a backward ---

void Reducer::Impl::end() {
  // Nodes were left out then: what came of gradients is no whole.
  const std::string given_up = loan_.pass ? loan_.pass->given_up() : std::string();
  if (!given_up.empty()) return failed(given_up);
  leave();
  if (!syncing_) return;
  const bool may_be_unused = options_.static_graph ? !learnt_ : options_.find_unused_parameters;
  const auto left_out = may_be_unused ? std::vector<std::size_t>{} : missing();
  if (left_out.empty()) return complete(Ending::kGood, {});
  if (!options_.static_graph && round_.outcome == Ending::kGood) {
    // Another output of the same forward may still bring them.
    const auto reached = reachable(forwards_.waiting(&round_.visited));
    const bool coming = std::all_of(left_out.begin(), left_out.end(), [&](std::size_t i) {
      return reached.contains(parameters_[i].accumulator.get());
    });
    if (coming) return;
  }
  complete(Ending::kIncomplete, missing_text(left_out));
}

void Reducer::Impl::failed(const std::string& cause) {
  try {
    leave();
    if (!syncing_ || !round_.open) return;
    const std::string line = cause.substr(0, cause.find('\n'));
    if (!alone_) {
      log_error("backward ", observer_.stats().backwards + 1, " failed on rank ", group_.rank(),
                " of ", size_, " (", line, "); telling the others");
    }
    abandon_norms(group_);  // others may wait in one for this rank
    complete(Ending::kFailed, line);
  } catch (...) {  // the caller of backward gets the cause itself
  }
}

void Reducer::Impl::leave() {
  in_backward_ = false;
  loan_.pass = nullptr;
  if (births_) births_->leave();
  if (!users_.ends) return;
  users_.ends(syncing_ && !alone_ ? BackwardEnd::kReduces : BackwardEnd::kAdds);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {  // it may have cast gradients
    const at::Tensor& gradient = tensors_[i].grad();
    if (parameters_[i].summed.defined() && gradient.defined()) parameters_[i].note(gradient);
  }
}

std::vector<std::size_t> Reducer::Impl::missing() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].is_missing()) indices.push_back(i);
  }
  return indices;
}

std::string Reducer::Impl::missing_text(const std::vector<std::size_t>& indices) const {
  if (options_.static_graph) {
    return concat("the graph is said to be static, but got no gradient for ", names_of(indices),
                  ", which the first backward used");
  }
  return concat(
      "no gradient came for ", names_of(indices), ": the loss does not depend on ",
      indices.size() == 1 ? "it" : "them",
      ". If that is meant, set find_unused_parameters (or static_graph, if it is the "
      "same in every step); if the model has new parameters, make a new reducer for them");
}

std::string Reducer::Impl::names_of(const std::vector<std::size_t>& indices) const {
  constexpr std::size_t kMost = 8;
  std::string names;
  for (std::size_t k = 0; k < std::min(kMost, indices.size()); ++k) {
    names += concat(k == 0 ? "" : ", ", parameters_[indices[k]].name, " (", indices[k], ")");
  }
  if (indices.size() > kMost) names += concat(" and ", indices.size() - kMost, " more");
  return names;
}

// --- the end of a reduction ---

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
    for (const ParameterState& parameter : parameters_) used.push_back(parameter.used);
    verdict_.set_used(std::move(used));
    if (outcome == Ending::kGood) {
      check_finite_alone();
      outcome = round_.outcome;
      text = round_.text;
    }
    close(outcome);
    if (outcome == Ending::kGood) return;
    observer_.failed(title + text);
    if (outcome == Ending::kNotFinite && options_.nonfinite == NonFinite::kSkip) {
      return skip_round(observer_.error());
    }
    fail(kind_of(outcome, outcome), observer_.error());
  }
  if (!round_.begun) announce();
  std::string reason;
  bool fine = false;
  try {
    if (!round_.begun) begin();
    if (outcome > round_.outcome) trouble(outcome, std::move(text));
    if (layout_.order.empty()) issue([&] { agree_on_order(); });
    fine = finish_buckets();
    if (fine && layout_.changed) {
      add_buckets();
      fine = finish_buckets();
    }
    if (fine) {
      reduce_sparse();
      consume();
      write_back();
      if (layout_.changed) lay_out();
      close(Ending::kGood);
    } else {
      reason = verdict_.explain(group_, round_.text);
    }
  } catch (...) {
    end_group_unless_agreed();
    close(Ending::kFailed);
    try {
      rethrow_with(round_.text.empty() ? title : concat(title, round_.text, "; then "));
    } catch (const Error& e) {
      observer_.failed(e.what());
      throw;
    }
  }
  if (fine) {
    join_.finish();
    return;
  }
  const Ending worst = verdict_.worst();
  if (worst >= Ending::kDisturbed) {
    end_hook_group();
    abandon_norms(group_);
    remake_hook_group();
  }
  const Ending own = round_.outcome;
  close(worst == Ending::kGood ? Ending::kFailed : worst);
  observer_.set_backwards(verdict_.last_backward());
  observer_.failed(title + reason);
  if (worst == Ending::kNotFinite && options_.nonfinite == NonFinite::kSkip) {
    return skip_round(observer_.error());
  }
  fail(kind_of(worst, own), observer_.error());
}

// All ranks are here. (Where that fails, the next round tries again, and tells.)
void Reducer::Impl::remake_hook_group() noexcept {
  if (!users_.hook || users_.hook_group) return;
  try {
    users_.hook_group = own_group(group_);
  } catch (const std::exception& e) {
    log_warn("making the group of a comm hook again: ", e.what());
  }
}

// In a handler.
void Reducer::Impl::end_group_unless_agreed() noexcept {
  const std::string what = concat("backward ", observer_.stats().backwards + 1);
  const bool under_way =
      std::any_of(layout_.buckets.begin(), layout_.buckets.end(),
                  [](const Bucket& bucket) { return bucket.result.has_value(); });
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
  if (!layout_.buckets.empty()) meet_before_hooks();
  while (round_.next < layout_.buckets.size()) launch(round_.next++);
  take_results();
  check_sparse();
  if (join_.is_active()) forwards_.drop_unvisited(round_.visited);  // a batch is no matter
  const bool counts = !join_.shadows() && !round_.began_elsewhere;
  const auto forwards = counts ? forwards_.count() : Verdict::kAnyForwards;
  Verdict::Ballot ballot{
      round_.outcome, observer_.stats().backwards + 1, forwards, layout_hash(), {}};
  for (const ParameterState& parameter : parameters_) ballot.used.push_back(parameter.used);
  if (!join_.shadows()) ballot.stamps = observer_.timeline().stamps(round_.last_gradient);
  round_.late = false;
  bool fine = false;
  if (issue([&] { fine = verdict_.reach(group_, ballot); })) return fine;
  ballot.outcome = round_.outcome;  // it was the first operation: once more, for all that disagreed
  return verdict_.reach(group_, ballot);
}

void Reducer::Impl::take_results() {
  for (std::size_t index = 0; index < layout_.buckets.size(); ++index) {
    Bucket& bucket = layout_.buckets[index];
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
      if (!users_.hook && lost) {
        const std::string text =
            concat("bucket ", index, " of ", layout_.buckets.size(), ": ", e.what());
        bucket.result.reset();
        if (disagreement) throw coll::Disagreement(text, disagreement->calls());
        throw Error(e.kind(), text);
      }
      trouble(Ending::kDisturbed, concat(where(index), ": ", e.what()));
      continue;
    } catch (const std::exception& e) {
      if (!users_.hook) throw;
      trouble(Ending::kFailed, concat(where(index), ": the comm hook threw: ", e.what()));
      continue;
    } catch (...) {
      trouble(Ending::kFailed, concat(where(index), ": the comm hook threw something"));
      continue;
    }
    bucket.result.reset();
    observer_.timeline().done(index);
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
  for (const auto& port : users_.ports) go_on_if(round_.first_in_port, [&] { port->drain(); });
  for (std::size_t index = 0; index < layout_.buckets.size(); ++index) {
    if (layout_.buckets[index].deferred) observer_.timeline().done(index);
  }
}

void Reducer::Impl::write_back() {
  const auto start = Clock::now();
  for (const Bucket& bucket : layout_.buckets) {
    if (bucket.skipped) continue;
    for (const std::size_t i : bucket.parameters) {
      if (parameters_[i].active) write_back(i);
    }
  }
  observer_.stats().copy_time += Clock::now() - start;
}

void Reducer::Impl::write_back(std::size_t index) {
  ParameterState& parameter = parameters_[index];
  const at::Tensor& slot = layout_.buckets[parameter.bucket].slots[parameter.slot];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  if (!verdict_.used()[index]) {
    // Nobody's: as it was, to the bit.
    if (parameter.round.kept.defined()) gradient.copy_(parameter.round.kept);
    return;
  }
  if (parameter.round.stays) return;
  if (parameter.dropped) {
    gradient.reset();
  } else if (parameter.round.graph.defined()) {
    // The value is the mean, the history this rank's: a loss made of it has this rank's part of the
    // gradient, which is reduced in turn.
    constexpr std::uint64_t kNoForward = 0;
    gradient = put_sink(slot.clone(), parameter.round.graph, make_sink(kNoForward, nullptr));
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
  round_.open = false;
  const auto now = Clock::now();
  const bool good = outcome == Ending::kGood;
  const at::NoGradGuard no_grad;
  observer_.close({.good = good,
                   .shadowed = join_.shadows(),
                   .entered = round_.entered,
                   .last_gradient = round_.last_gradient,
                   .now = now,
                   .stamps = stamps_of_all(outcome),
                   .rank = group_.rank()},
                  parameters_, tensors_, layout_.buckets);
  // A rank that has run no backward has not seen its graph.
  const bool learns =
      good && !learnt_ && !join_.shadows() &&
      std::any_of(parameters_.begin(), parameters_.end(), [](const ParameterState& parameter) {
        return parameter.computed || parameter.round.fired > 0;
      });
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ParameterState& parameter = parameters_[i];
    parameter.expected = std::max(parameter.expected, parameter.round.fired);
    if (learns && options_.static_graph) {
      parameter.learnt_unused =
          parameter.active && !parameter.computed && parameter.round.fired == 0;
    }
    parameter.close(
        tensors_[i].mutable_grad(),
        {.good = good,
         .has_all = verdict_.used()[i],
         .deferred = parameter.bucket != ParameterPlace::kNone && bucket_of(parameter).deferred,
         .touched = parameter.round.touched});
    parameter.round.fired = 0;
    parameter.round.kept.reset();
    parameter.round.graph.reset();
    parameter.round.rows.reset();
    // Once more: a peer that has mapped the bucket since then has touched all of it.
    if (parameter.round.stays && parameter.bucket != ParameterPlace::kNone &&
        bucket_of(parameter).fresh) {
      const at::Tensor& slot = bucket_of(parameter).slots[parameter.slot];
      if (!is_alias(tensors_[i].grad(), slot)) give_pages_back(slot);
    }
    parameter.round.stays = false;
  }
  for (Bucket& bucket : layout_.buckets) {
    bucket.result.reset();
    bucket.fresh = false;
  }
  round_.meeting.reset();
  for (const auto& port : users_.ports) port->closed();
  norm_weight_->forget();
  learnt_ |= learns;
  forwards_.armed = false;
  forwards_.close_round();
  round_.visited.clear();
  // The next round knows better; but a sharded optimizer has not had these yet.
  if (std::exchange(layout_.guessed, false) && users_.ports.empty()) {
    layout_.order.clear();
    layout_.buckets.clear();
    for (ParameterState& parameter : parameters_) parameter.bucket = ParameterPlace::kNone;
  }
}

void Reducer::Impl::sync_gradients() {
  if (in_backward_) {
    fail(ErrorKind::kInvalidArgument, "it cannot be called inside of a backward; call it after");
  }
  round_.enter("sync_gradients");
  if (!round_.open) {
    try {
      open(nullptr);
    } catch (...) {
      if (round_.open) close(Ending::kFailed);
      throw;
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {  // also what the user has set
    ParameterState& parameter = parameters_[i];
    const at::Tensor& gradient = tensors_[i].grad();
    const bool as_we_left_it = parameter.reduced && parameter.is_untouched(gradient);
    parameter.used |= parameter.active && gradient.defined() && !as_we_left_it;
  }
  const std::string owed = std::exchange(forwards_.owed, {});
  complete(owed.empty() ? Ending::kGood : Ending::kFailed, owed);
}

}  // namespace convoy
