// The contexts of a session, and what the loss of a worker does to them.
#include "autograd/coordinator.h"
#include "autograd/functions.h"
#include "autograd/pass.h"
#include "autograd/registry.h"
#include "base/error.h"
#include "base/log.h"

namespace convoy::autograd::detail {
namespace {

using namespace std::chrono_literals;

constexpr int kCreatorShift = 48;
constexpr std::uint64_t kNumberMask = (std::uint64_t{1} << kCreatorShift) - 1;

WorkerId creator_of(ContextId id) { return static_cast<WorkerId>(id >> kCreatorShift); }

// How long a worker that does not answer is told that a context is over.
constexpr auto kMostReleaseTime = 60s;

}  // namespace

std::uint64_t numbered_by(WorkerId worker, std::uint64_t number) {
  if (worker >> (64 - kCreatorShift) != 0) {
    fail(ErrorKind::kUnsupported, "autograd: worker ", worker,
         " cannot take part: contexts have room for ", 1 << (64 - kCreatorShift),
         " workers that have ever joined a session");
  }
  return (std::uint64_t{worker} << kCreatorShift) | (number & kNumberMask);
}

std::shared_ptr<ContextState> Registry::make_context() {
  const WorkerId creator = self();
  const std::scoped_lock lock(mutex_);
  const ContextId id = numbered_by(creator, ++last_context_);
  auto context = std::make_shared<ContextState>(shared_from_this(), id);
  contexts_.emplace(id, context);
  return context;
}

std::shared_ptr<ContextState> Registry::find(ContextId id) const {
  const std::scoped_lock lock(mutex_);
  const auto found = contexts_.find(id);
  return found == contexts_.end() ? nullptr : found->second;
}

bool Registry::was_released(ContextId id) const {
  const std::scoped_lock lock(mutex_);
  const auto released = released_.find(creator_of(id));
  return released != released_.end() && released->second.contains(id & kNumberMask);
}

std::shared_ptr<ContextState> Registry::find_or_make(ContextId id) {
  const WorkerId creator = creator_of(id);
  const bool own = creator == self();
  const std::scoped_lock lock(mutex_);
  const auto found = contexts_.find(id);
  if (found != contexts_.end()) return found->second;
  // Our own ones are made by make_context() only.
  if (own) return nullptr;
  const auto released = released_.find(creator);
  if (released != released_.end() && released->second.contains(id & kNumberMask)) return nullptr;
  if (contexts_.size() >= kMostAtOnce) {
    fail(ErrorKind::kResource, "autograd: there are ", kMostAtOnce, " contexts here at once");
  }
  auto context = std::make_shared<ContextState>(shared_from_this(), id);
  contexts_.emplace(id, context);
  return context;
}

std::size_t Registry::contexts() const {
  const std::scoped_lock lock(mutex_);
  return contexts_.size();
}

void Registry::release_own(ContextId id) {
  const WorkerId creator = creator_of(id);
  std::uint64_t floor = 0;
  {
    const std::scoped_lock lock(mutex_);
    // The oldest of ours that stays.
    floor = last_context_ + 1;
    auto oldest = contexts_.lower_bound(numbered_by(creator, 0));
    if (oldest != contexts_.end() && oldest->first == id) ++oldest;
    if (oldest != contexts_.end() && creator_of(oldest->first) == creator) {
      floor = oldest->first & kNumberMask;
    }
  }
  release(id, floor, std::nullopt);
}

void Registry::release(ContextId id, std::uint64_t floor, std::optional<WorkerId> from) {
  const WorkerId creator = creator_of(id);
  if (!is_worker(creator) && !find(id)) return;
  std::vector<std::shared_ptr<ContextState>> gone;
  std::vector<std::shared_ptr<Pass>> passes;
  {
    const std::scoped_lock lock(mutex_);
    EndedNumbers& released = released_[creator];
    released.raise(floor);
    released.add(id & kNumberMask);
    const auto ends = [&](auto each) {
      gone.push_back(std::move(each->second));
      return contexts_.erase(each);
    };
    // None of those that were released before is here.
    auto oldest = contexts_.lower_bound(numbered_by(creator, 0));
    while (oldest != contexts_.end() && creator_of(oldest->first) == creator &&
           (oldest->first & kNumberMask) < released.floor) {
      oldest = ends(oldest);
    }
    const auto found = contexts_.find(id);
    if (found != contexts_.end()) ends(found);
    for (const auto& [pass_id, pass] : passes_) {
      for (const auto& context : gone) {
        if (&pass->context() == context.get()) passes.push_back(pass);
      }
    }
  }
  if (gone.empty()) return;
  const WorkerId here = self();
  for (const auto& pass : passes) {
    const std::string why = concat("its context was released on ", name_of(here));
    if (const auto root = coordinator(pass->id())) {
      root->failed({static_cast<std::int32_t>(ErrorKind::kCancelled), here, "", why});
    } else {
      const AbortReply reply = pass->abort(why);
      if (reply.stepped == Stepped::kIsBeing) continue;  // abort_pass() ends it, behind the step
      keep_abort_reply(pass->id(), reply);               // its root will ask
      end_pass(pass->id());
    }
  }
  for (const auto& context : gone) {
    const auto known = context->release();
    const auto deadline = Deadline::after(kMostReleaseTime, session()->agent().now());
    for (const WorkerId worker : known) {
      if (worker == here || worker == creator || worker == from) continue;
      ask<release_context>(
          worker, deadline,
          [id, worker](const rpc::Future<void>& answer) {
            if (!answer.error()) return;
            log_info("autograd: worker ", worker, " was not told that context ", id, " is over");
          },
          context->id(), floor);
    }
  }
}

// On the thread that serves.
void Registry::lost(WorkerId worker, const std::string& why) noexcept {
  std::vector<std::shared_ptr<Coordinator>> roots;
  std::vector<std::shared_ptr<Pass>> orphans;
  std::vector<std::shared_ptr<Pass>> others;
  std::vector<ContextId> without_creator;
  std::vector<std::shared_ptr<ContextState>> to_ask;
  try {
    const WorkerId here = self();
    {
      const std::scoped_lock lock(mutex_);
      for (const auto& [id, coordinator] : coordinators_) {
        if (auto root = coordinator.lock()) roots.push_back(std::move(root));
      }
      for (const auto& [id, pass] : passes_) {
        (id.root == worker ? orphans : others).push_back(pass);
      }
      for (const auto& [id, context] : contexts_) {
        if (context->creator() == worker) {
          without_creator.push_back(id);
        } else if (context->creator() != here && context->was_introduced_by(worker)) {
          to_ask.push_back(context);
        }
      }
    }
    for (const auto& root : roots) root->lost(worker, why);
    for (const auto& pass : orphans) {
      pass->abort(concat("its root is lost: ", why));
      end_pass(pass->id());
    }
    // Its root may not be connected to it.
    for (const auto& pass : others) {
      if (!pass->has_engaged(worker)) continue;
      if (const auto root = coordinator(pass->id())) {
        root->participant_lost(worker, why);
      } else {
        ask<participant_lost>(
            pass->id().root, pass->deadline(), [](const rpc::Future<void>&) {}, pass->id(), worker,
            why);
      }
    }
    for (const ContextId id : without_creator) release(id, kNumberMask, worker);
    // Whoever would have told us that these are over is gone.
    const auto deadline = Deadline::after(kMostReleaseTime, session()->agent().now());
    for (const auto& context : to_ask) {
      ask<context_lives>(
          context->creator(), deadline,
          [self = shared_from_this(), id = context->id()](const rpc::Future<bool>& lives) {
            if (lives.error() || lives.result()) return;
            self->release(id, 0, std::nullopt);
          },
          context->id(), here);
    }
  } catch (const std::exception& error) {
    log_info("autograd: after the loss of a worker: ", error.what());
  }
}

}  // namespace convoy::autograd::detail
