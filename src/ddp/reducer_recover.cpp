// Reducer: ranks that do not do the same. One whose forward threw, or that leaves out a backward,
// comes to its next forward while the others are in that backward. Ranks find out in the first
// operation that they then have in common: their fingerprints differ, all of them are told, and the
// operation is over. After that all go to the end of the round that some have begun, from its
// second operation on, where they hear why; it fails on those that were in it.
#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/guarded.h"
#include "base/log.h"
#include "ddp/reducer_impl.h"

namespace convoy {
namespace {

// Those alive, by backend and serial number.
Guarded<std::map<std::pair<const void*, std::uint64_t>, std::weak_ptr<Reducer::Impl>>>
    reducers_here;

// Makes the operation of a rank that has something to tell another one.
constexpr std::uint64_t kTells = 0x5c1e6a0b;

bool is_round(const coll::Called& called) {
  return called.what != "forward" && called.what != "sync_buffers";
}

// Whose round ranks end together that called these things; 0: they cannot.
std::uint64_t round_after(const coll::Disagreement& disagreement) {
  std::uint64_t round = 0, other = 0;
  for (const coll::Called& called : disagreement.calls()) {
    if (called.owner == 0) return 0;
    std::uint64_t& known = is_round(called) ? round : other;
    if (known == 0) known = called.owner;
    if (is_round(called) && called.owner != round) return 0;
  }
  return round != 0 ? round : other;
}

}  // namespace

void Reducer::Impl::enlist() {
  auto all = reducers_here.lock();
  std::erase_if(*all, [](const auto& one) { return one.second.expired(); });
  (*all)[{group_.backend().get(), serial_}] = weak_from_this();
}

void Reducer::Impl::owe(const std::string& why) {
  if (!compares_ || in_backward_ || !forwards_.owed.empty()) return;
  forwards_.owed = concat("forward ", forwards_.next(), " threw: ", why);
}

// An exception has left the loss, or anything else between a forward and its backward.
void Reducer::Impl::note_unwound() {
  const auto number = forwards_.unwound(round_.visited);
  if (!number || !forwards_.owed.empty()) return;
  forwards_.owed = concat("an exception was thrown between forward ", *number, " and its backward");
  // It may be that of another model.
  auto all = reducers_here.lock();
  for (const auto& [key, weak] : *all) {
    const auto other = weak.lock();
    if (key.first == group_.backend().get() && other && other.get() != this &&
        !other->forwards_.owed.empty()) {
      forwards_.owed += concat(" (another model's ", other->forwards_.owed, ")");
    }
  }
}

void Reducer::Impl::meet_in_forward(const char* what, const std::function<void()>& sync) {
  if (!compares_ || in_backward_) {
    if (sync) sync();
    return;
  }
  for (;;) {
    note_unwound();
    const bool tells = !forwards_.owed.empty();
    if (!sync && !tells) return;
    if (tells) end_hook_group();  // others may wait inside of a hook
    try {
      const PurposeScope scope(
          {.what = what, .number = forwards_.next(), .owner = serial_, .tag = tells ? kTells : 0});
      if (sync) {
        sync();
      } else {
        group_.barrier();
      }
    } catch (const coll::Disagreement& e) {
      take_part_late(e);
      continue;
    }
    if (tells) {  // and so did all others
      forwards_.owed.clear();
      forwards_.close_round();
    }
    return;
  }
}

// In a handler.
void Reducer::Impl::take_part_late(const coll::Disagreement& disagreement) {
  const std::uint64_t round = round_after(disagreement);
  std::shared_ptr<Impl> reducer;
  if (round != 0) {
    auto all = reducers_here.lock();
    const auto found = all->find({group_.backend().get(), round});
    if (found != all->end()) reducer = found->second.lock();
  }
  if (!reducer) throw;
  const auto& calls = disagreement.calls();
  const auto backward = std::find_if(calls.begin(), calls.end(), is_round);
  const bool in_forward = backward == calls.end();
  std::string text = reducer->forwards_.owed.empty() ? forwards_.owed : reducer->forwards_.owed;
  const bool tells = !text.empty();
  if (!tells) {
    text = concat("is in forward ", forwards_.next());
    if (!in_forward) {
      text += concat(", while others are in ", backward->what, " ", backward->number,
                     forwards_.count() == 0 ? " and it has none to run"
                                            : " and it has left out that of the forward before",
                     ": all ranks run the same forwards and backwards; did it leave out a batch, "
                     "or catch an exception of the loss?");
    }
  }
  const Error error =
      reducer->late_round(tells || !in_forward ? Ending::kFailed : Ending::kDisturbed, text);
  forwards_.close_round();
  reducer->forwards_.owed.clear();
  if (tells) return;  // this rank has thrown
  if (in_forward) throw error;
  log_warn(error.what(), "; the others have thrown this, and this rank goes on with its forward");
}

// The end of a round that others have begun. Gradients are then what they were before.
Error Reducer::Impl::late_round(Ending outcome, const std::string& text) {
  const at::NoGradGuard no_grad;
  struct Saved {
    at::Tensor gradient, summed;
    bool used, computed, reduced, untouched;
  };
  std::vector<Saved> before;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterState& parameter = parameters_[i];
    const at::Tensor& gradient = tensors_[i].grad();
    // One with a history is not in a bucket.
    const bool is_apart = !gradient.defined() || gradient.requires_grad();
    before.push_back({.gradient = is_apart ? gradient : gradient.clone(),
                      .summed = parameter.summed,
                      .used = parameter.used,
                      .computed = parameter.computed,
                      .reduced = parameter.reduced && parameter.is_seen(gradient),
                      .untouched = parameter.is_untouched(gradient)});
  }
  std::optional<Error> error;
  round_.late = round_.began_elsewhere = true;
  round_.enter("backward");
  try {
    hook_up();
    open(nullptr);
    complete(outcome, text);
  } catch (const Error& e) {
    if (round_.open) close(Ending::kFailed);
    error = e;
  }
  round_.late = round_.began_elsewhere = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ParameterState& parameter = parameters_[i];
    tensors_[i].mutable_grad() = before[i].gradient;
    parameter.summed = before[i].summed;
    parameter.used = before[i].used;
    parameter.computed = before[i].computed;
    parameter.reduced = before[i].reduced;
    if (!before[i].gradient.defined()) continue;
    parameter.note(before[i].gradient);
    if (!before[i].untouched) parameter.seen_version = -1;
  }
  if (!error) return {ErrorKind::kInternal, "a backward about which ranks disagree went well"};
  if (error->kind() != ErrorKind::kRemote && error->kind() != ErrorKind::kInvalidArgument) {
    throw Error(*error);
  }
  return *error;
}

bool Reducer::Impl::absorb(const coll::Disagreement& disagreement) {
  if (!can_go_on(disagreement)) return false;
  trouble(Ending::kDisturbed, disagreement.what());
  return true;
}

bool Reducer::Impl::can_go_on(const coll::Disagreement& disagreement) const {
  return round_after(disagreement) == serial_;
}

}  // namespace convoy
