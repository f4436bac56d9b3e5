#include "ddp/join_context.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/guarded.h"
#include "base/log.h"
#include "base/wire.h"
#include "ddp/agreement.h"
#include "ddp/bucket.h"
#include "ddp/reduce_bucket.h"

namespace convoy {
namespace {

constexpr std::size_t kRecordBytes = 16;
constexpr std::uint64_t kManySteps = 1000;

// Those alive, by backend.
Guarded<std::map<const void*, std::weak_ptr<JoinContext>>> contexts;

const char* name_of(JoinCall call) {
  switch (call) {
    case JoinCall::kStep: return "a step";
    case JoinCall::kBuffers: return "sync_buffers";
    case JoinCall::kStatistics: return "a SyncBatchNorm";
  }
  return "something unknown";
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i == 0 ? " " : ", ", ranks[i]);
  return text;
}

}  // namespace

std::vector<int> JoinContext::everybody() const {
  std::vector<int> ranks(static_cast<std::size_t>(group_.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

JoinContext::JoinContext(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)), options_(options), used_(joinables_.size()) {
  if (joinables_.empty() || joinables_[0] == nullptr) {
    fail(ErrorKind::kInvalidArgument,
         "join: the list of joinables is empty, or begins with nullptr; pass a model");
  }
  group_ = joinables_[0]->join_process_group();
  step_.live = everybody();
}

JoinContext::~JoinContext() { end(); }

void JoinContext::start() {
  std::string error;
  for (std::size_t i = 0; i < joinables_.size() && error.empty(); ++i) {
    if (joinables_[i] == nullptr) {
      error = concat("joinable ", i, " is nullptr");
    } else if (!joinables_[i]->join_.expired()) {
      error = concat("joinable ", i, " is in a Join already");
    } else if (joinables_[i]->join_process_group().backend() != group_.backend()) {
      error = concat("joinable ", i, " uses group \"", joinables_[i]->join_process_group().name(),
                     "\", joinable 0 uses group \"", group_.name(), "\"; all must use one");
    } else if (std::count(joinables_.begin(), joinables_.end(), joinables_[i]) > 1) {
      error = concat("joinable ", i, " was passed twice");
    }
  }
  const PurposeScope scope({.what = "join"});
  if (error.empty() && of(group_)) error = "there is a Join of this group already";
  agree(group_, "join",
        {concat("joinables: ", joinables_.size()),
         concat("option divide_by_initial_world_size: ", options_.divide_by_initial_world_size),
         concat("option throw_on_early_termination: ", options_.throw_on_early_termination)},
        error.empty() ? std::nullopt : std::optional(Error(ErrorKind::kInvalidArgument, error)));
  records_ =
      allocate_for(group_, static_cast<std::int64_t>(kRecordBytes) * group_.size(), at::kByte);
  (*contexts.lock())[group_.backend().get()] = weak_from_this();
  for (Joinable* const joinable : joinables_) joinable->join_ = weak_from_this();
  std::optional<Error> refused;  // by a hook, on this rank
  for (Joinable* const joinable : joinables_) {
    try {
      hooks_.push_back(joinable->join_hook(options_));
      CONVOY_CHECK(hooks_.back() != nullptr, "a join_hook() returned none");
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kInvalidArgument) throw;
      refused = e;
      break;
    }
  }
  agree(group_, "join", {}, refused);
}

void JoinContext::end() {
  if (state_ == State::kOver) return;
  state_ = State::kOver;
  hooks_.clear();
  for (Joinable* const joinable : joinables_) {
    if (joinable == nullptr) continue;
    const auto theirs = joinable->join_.lock();
    if (!theirs || theirs.get() == this) joinable->join_.reset();
  }
  auto all = contexts.lock();
  const auto found = all->find(group_.backend().get());
  if (found != all->end() && (found->second.expired() || found->second.lock().get() == this)) {
    all->erase(found);
  }
}

std::shared_ptr<JoinContext> JoinContext::of(const ProcessGroup& group) {
  auto all = contexts.lock();
  const auto found = all->find(group.backend().get());
  return found == all->end() ? nullptr : found->second.lock();
}

std::string JoinContext::head() const {
  return concat("join, step ", steps_ + 1, ", group \"", group_.name(), "\", rank ", group_.rank(),
                " of ", group_.size(), ": ");
}

std::size_t JoinContext::index_of(const Joinable& joinable) const {
  const auto found = std::find(joinables_.begin(), joinables_.end(), &joinable);
  CONVOY_CHECK(found != joinables_.end(), "a joinable has moved while it was part of a Join");
  return static_cast<std::size_t>(found - joinables_.begin());
}

// --- the message ---

std::vector<JoinContext::Record> JoinContext::exchange(const Record& mine) {
  const auto bytes = static_cast<std::int64_t>(kRecordBytes);
  const at::Tensor own = records_.narrow(0, group_.rank() * bytes, bytes);
  WireWriter out(wire_bytes(own));
  out.put(mine.state);
  out.put(mine.call);
  out.put_zeros(6);
  out.put(mine.detail);
  group_.all_gather_single(records_, own);
  std::vector<Record> all(static_cast<std::size_t>(group_.size()));
  WireReader in(wire_bytes(records_), "record of a Join");
  for (Record& record : all) {
    record.state = in.take<State>();
    record.call = in.take<JoinCall>();
    in.take_zeros(6);
    record.detail = in.take<std::uint64_t>();
  }
  return all;
}

std::string JoinContext::texts_of_failed(const std::vector<Record>& all) {
  const auto texts = gather_texts(group_, why_);
  std::string result;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].state != State::kFailed) continue;
    result += concat(result.empty() ? "" : "; ", "rank ", r,
                     " left the loop by an exception: ", texts[r]);
  }
  return result;
}

// Everybody sees the same records: what is thrown here is thrown by all, live ranks that differ
// apart: the others wait for what these do next.
std::vector<JoinContext::Record> JoinContext::meet(const Record& mine) {
  if (state_ == State::kOver) fail(ErrorKind::kInvalidArgument, head(), "this Join has ended");
  auto all = exchange(mine);
  const auto is = [](State state) {
    return [state](const Record& record) { return record.state == state; };
  };
  if (std::any_of(all.begin(), all.end(), is(State::kFailed))) {
    const std::string title = head();
    const std::string text = texts_of_failed(all);
    end();
    if (mine.state != State::kFailed) fail(ErrorKind::kRemote, title, text);
    return all;
  }
  const auto first = std::find_if(all.begin(), all.end(), is(State::kLive));
  if (first == all.end()) return all;
  if (options_.throw_on_early_termination) {
    std::vector<int> ended;
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].state == State::kJoined) ended.push_back(static_cast<int>(r));
    }
    if (!ended.empty()) {
      const std::string title = head();
      const auto steps = steps_;
      end();
      fail(ErrorKind::kInvalidArgument, title, list_of(ended), " ran out of inputs after ", steps,
           " steps and others did not: throw_on_early_termination ends the join on all ranks");
    }
  }
  for (auto other = first; other != all.end(); ++other) {
    if (other->state != State::kLive) continue;
    if (other->call == first->call && other->detail == first->detail) continue;
    // NOLINTNEXTLINE(bugprone-std-exception-baseclass): see JoinStepFailed
    if (mine.state != State::kLive) throw JoinStepFailed();
    fail(ErrorKind::kInvalidArgument, head(), "ranks are out of step: rank ", first - all.begin(),
         " begins ", name_of(first->call), ", rank ", other - all.begin(), " ",
         name_of(other->call), other->call == first->call ? " of another kind" : "");
  }
  JoinStep step;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].state == State::kLive) step.live.push_back(static_cast<int>(r));
  }
  step_ = std::move(step);
  return all;
}

// --- live ---

JoinStep JoinContext::notify(const Joinable& joinable) {
  const std::size_t index = index_of(joinable);
  if (index == 0) {
    meet({State::kLive, JoinCall::kStep, 0});
    ++steps_;
    std::fill(used_.begin(), used_.end(), false);
  } else if (!used_[0] || used_[index]) {
    fail(ErrorKind::kInvalidArgument, head(), "joinable ", index, " comes ",
         used_[0] ? "twice in a step" : "before joinable 0",
         ": pass them to Join in the order in which a step uses them, each once");
  }
  used_[index] = true;
  return step_;
}

JoinStep JoinContext::call(JoinCall call, std::uint64_t detail) {
  meet({State::kLive, call, detail});
  return step_;
}

// --- joined ---

void JoinContext::shadow(const Record& what, const JoinStep& step) {
  if (what.call == JoinCall::kStatistics) return shadow_statistics(group_, what.detail);
  if (what.call == JoinCall::kBuffers) {
    auto* const hook = dynamic_cast<JoinBuffersHook*>(hooks_.at(what.detail).get());
    CONVOY_CHECK(hook != nullptr, "buffers of a joinable that has none");
    return hook->buffers_hook(step);
  }
  if (++shadowed_ == kManySteps) {
    log_warn(head(), "for ", kManySteps, " steps this rank has had no inputs and others have");
  }
  ++steps_;
  for (const auto& hook : hooks_) hook->main_hook(step);
}

void JoinContext::finish() {
  if (state_ != State::kLive) fail(ErrorKind::kInvalidArgument, head(), "this Join has ended");
  try {
    for (const auto& hook : hooks_) hook->pre_hook();
  } catch (const std::exception& error) {
    abandon(error.what());
    throw;
  }
  state_ = State::kJoined;
  try {
    for (;;) {
      try {
        const auto all = meet({State::kJoined, JoinCall::kStep, 0});
        const auto live = std::find_if(all.begin(), all.end(), [](const Record& record) {
          return record.state == State::kLive;
        });
        if (live == all.end()) break;
        shadow(*live, step_);
      } catch (const JoinStepFailed&) {  // the live ranks have thrown, and decide what comes next
      }
    }
    const JoinEnd last{
        std::find(step_.live.begin(), step_.live.end(), group_.rank()) != step_.live.end(),
        step_.live.back()};
    for (const auto& hook : hooks_) hook->post_hook(last);
    end();
  } catch (...) {
    drop();
    throw;
  }
}

void JoinContext::abandon(const std::string& why) noexcept {
  if (state_ == State::kOver) return;  // by an exception that all ranks know
  try {
    why_ = why.substr(0, why.find('\n'));
    meet({State::kFailed, JoinCall::kStep, 0});
  } catch (...) {  // the group is broken, and the others know
  }
  drop();
}

void JoinContext::drop() noexcept {
  if (state_ == State::kOver) return;
  end();
  if (group_.size() == 1) return;
  abort_because(group_, "it left its Join without finishing it");
}

}  // namespace convoy
