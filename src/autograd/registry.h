#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "autograd/context.h"
#include "autograd/wire.h"
#include "rpc/session_impl.h"

namespace convoy::autograd::detail {

class Coordinator;
class Pass;

// A number of its own that a worker gives to a context or a message: no two workers give the same.
// kUnsupported for a worker with a number over 65535.
std::uint64_t numbered_by(WorkerId worker, std::uint64_t number);

// Contexts, and passes, that others may have here at once. More is kResource.
inline constexpr std::size_t kMostAtOnce = std::size_t{1} << 16;

// Numbers that have come and gone: all below `floor`, and these, of which the oldest are forgotten
// if there are too many.
struct EndedNumbers {
  static constexpr std::size_t kMost = std::size_t{1} << 16;
  std::uint64_t floor = 0;
  std::set<std::uint64_t> numbers = {};

  bool contains(std::uint64_t number) const { return number < floor || numbers.contains(number); }
  void add(std::uint64_t number) {
    if (number >= floor && numbers.insert(number).second && numbers.size() > kMost) {
      numbers.erase(numbers.begin());
    }
  }
  void raise(std::uint64_t to) {
    if (to <= floor) return;
    floor = to;
    numbers.erase(numbers.begin(), numbers.lower_bound(floor));
  }
};

// The contexts and passes of one session. Contexts refer to it; it refers to the session as long as
// that lives. Thread-safe; nothing is called under its lock.
class Registry : public std::enable_shared_from_this<Registry> {
 public:
  explicit Registry(rpc::detail::SessionImpl& session);
  // Nothing goes any more: passes end. kCancelled.
  void shut_down() noexcept;
  // The session ends.
  void close();

  // kCancelled if it has ended.
  std::shared_ptr<rpc::detail::SessionImpl> session() const;
  const void* session_address() const { return address_; }
  // No other session of this process ever has it.
  std::uint64_t serial() const { return serial_; }
  bool is_shut_down() const noexcept;
  // Whoever waits looks again.
  void wake() const noexcept;
  static Registry& of(const rpc::Session& session);
  // Of the session whose handler this thread runs.
  static Registry& here();

  WorkerId self() const;
  std::string name_of(WorkerId worker) const;
  bool is_worker(WorkerId worker) const;
  // kInvalidArgument; it may have joined a moment ago.
  void require_worker(WorkerId worker) const;

  // --- contexts ---

  std::shared_ptr<ContextState> make_context();
  // nullptr: it is not here.
  std::shared_ptr<ContextState> find(ContextId id) const;
  // It is over, as far as this worker was told. false: it lives, or never came here.
  bool was_released(ContextId id) const;
  // nullptr: it was released. kResource.
  std::shared_ptr<ContextState> find_or_make(ContextId id);
  std::uint64_t next_message();
  // Forgets it here and tells those whom this worker sent something in it; older ones of the same
  // creator, too, below the floor. `from`: who told, if somebody has.
  void release(ContextId id, std::uint64_t floor, std::optional<WorkerId> from);
  void release_own(ContextId id);
  std::size_t contexts() const;

  // --- passes ---

  PassHead new_pass(ContextState& context, bool fast, bool retain);
  void add(const std::shared_ptr<Coordinator>& coordinator);
  std::shared_ptr<Coordinator> coordinator(const PassId& id) const;  // nullptr
  // Made if it is not here; nullptr if it has ended. kInvalidArgument if its context is not here;
  // kResource.
  std::shared_ptr<Pass> find_or_make_pass(const PassHead& head);
  std::shared_ptr<Pass> find_pass(const PassId& id) const;  // nullptr
  void add(const std::shared_ptr<Pass>& pass);
  bool has_ended(const PassId& id) const;
  // Whatever still comes of it is late.
  std::shared_ptr<Pass> end_pass(const PassId& id);
  // Who asks again what became of a pass that was aborted here gets the same answer, for a while.
  void keep_abort_reply(const PassId& id, const AbortReply& reply);
  AbortReply abort_reply(const PassId& id) const;
  std::size_t passes() const;
  std::vector<std::shared_ptr<Pass>> passes_of(ContextId id) const;

  // How long runs of the engine took here, lately: short ones need no thread of their own.
  bool runs_are_short() const;
  void ran(std::chrono::nanoseconds time);

  // It is lost, or has left.
  void lost(WorkerId worker, const std::string& why) noexcept;

  // Calls `Function` there until it is answered; then(Future<Result>), on any thread. Time-outs are
  // tried again until the deadline.
  template <auto Function, class Then, class... Arguments>
  void ask(WorkerId worker, const Deadline& deadline, Then then, Arguments... arguments);

 private:
  template <auto Function, class Then, class... Arguments>
  class Attempt;

  void record_locked(Pass& pass) noexcept;

  const void* const address_;
  const std::uint64_t serial_;
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  rpc::detail::SessionImpl* session_;
  std::map<ContextId, std::shared_ptr<ContextState>> contexts_;
  std::map<WorkerId, EndedNumbers> released_;  // contexts by creator
  std::map<PassId, std::shared_ptr<Pass>> passes_;
  std::map<WorkerId, EndedNumbers> ended_;  // passes by root
  std::map<PassId, std::weak_ptr<Coordinator>> coordinators_;
  std::uint64_t last_context_ = 0;
  std::uint64_t last_pass_ = 0;
  std::set<std::uint64_t> live_passes_;                      // numbers of those whose root is here
  std::deque<std::pair<PassId, AbortReply>> abort_replies_;  // the last ones

  std::atomic<std::uint64_t> last_message_{0};
  std::atomic<std::int64_t> average_run_{0};  // nanoseconds
  static constexpr std::uint64_t kUnknown = UINT64_MAX;
  mutable std::atomic<std::uint64_t> self_{kUnknown};  // known when the workers have met
};

template <auto Function, class Then, class... Arguments>
class Registry::Attempt
    : public std::enable_shared_from_this<Attempt<Function, Then, Arguments...>> {
 public:
  using Result = typename rpc::detail::RpcFunction<Function>::Result;

  Attempt(std::shared_ptr<Registry> registry, WorkerId worker, const Deadline& deadline, Then then,
          Arguments... arguments)
      : registry_(std::move(registry)),
        worker_(worker),
        deadline_(deadline),
        then_(std::move(then)),
        arguments_(std::move(arguments)...) {}

  void go() {
    try {
      const rpc::detail::RecorderScope not_recorded(nullptr);
      const rpc::Session session(registry_->session());
      rpc::CallOptions options{.stays = true};
      options.timeout = limit_;
      const auto left = time_left();
      if (left && *left < limit_) {
        options.timeout = std::max(std::chrono::ceil<std::chrono::milliseconds>(*left),
                                   std::chrono::milliseconds(1));
      }
      const auto target = session.to(worker_, options);
      auto future = std::apply(
          [&](const auto&... each) { return target.template rpc_async<Function>(each...); },
          arguments_);
      static_cast<void>(future.then([self = this->shared_from_this()](
                                        const rpc::Future<Result>& ended) { self->ended(ended); }));
    } catch (...) {
      rpc::Promise<Result> failed;
      failed.set_error(std::current_exception());
      then_(failed.future());
    }
  }

 private:
  std::optional<std::chrono::nanoseconds> time_left() const {
    if (deadline_.is_never()) return std::nullopt;
    return deadline_.when() - registry_->session()->agent().now();
  }
  // Whether it is tried again.
  bool tries_again(const std::exception_ptr& error) const noexcept {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error& thrown) {
      if (thrown.kind() != ErrorKind::kTimeout) return false;
      try {
        const auto left = time_left();
        return !left || left->count() > 0;
      } catch (const Error&) {  // the session ends
        return false;
      }
    } catch (...) {
      return false;
    }
    return false;
  }
  void ended(const rpc::Future<Result>& future) {
    if (!tries_again(future.error())) return then_(future);
    limit_ = std::min(2 * limit_, std::chrono::milliseconds(30'000));
    go();
  }

  const std::shared_ptr<Registry> registry_;
  const WorkerId worker_;
  const Deadline deadline_;
  Then then_;
  const std::tuple<Arguments...> arguments_;
  std::chrono::milliseconds limit_{1000};
};

template <auto Function, class Then, class... Arguments>
void Registry::ask(WorkerId worker, const Deadline& deadline, Then then, Arguments... arguments) {
  std::make_shared<Attempt<Function, Then, Arguments...>>(shared_from_this(), worker, deadline,
                                                          std::move(then), std::move(arguments)...)
      ->go();
}

}  // namespace convoy::autograd::detail
