#pragma once

#include <atomic>
#include <chrono>
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

// Numbers that have come and gone: all below `floor`, and these.
struct EndedNumbers {
  std::uint64_t floor = 0;
  std::set<std::uint64_t> numbers = {};

  bool contains(std::uint64_t number) const { return number < floor || numbers.contains(number); }
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
  // The session ends.
  void close();

  // kCancelled if it has ended.
  std::shared_ptr<rpc::detail::SessionImpl> session() const;
  const void* session_address() const { return address_; }
  static Registry& of(const rpc::Session& session);
  // Of the session whose handler this thread runs.
  static Registry& here();

  WorkerId self() const;
  std::string name_of(WorkerId worker) const;

  // --- contexts ---

  std::shared_ptr<ContextState> make_context();
  // nullptr: it is not here.
  std::shared_ptr<ContextState> find(ContextId id) const;
  // nullptr: it was released.
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
  // Made if it is not here; nullptr if it has ended. kInvalidArgument if its context is not here.
  std::shared_ptr<Pass> find_or_make_pass(const PassHead& head);
  std::shared_ptr<Pass> find_pass(const PassId& id) const;  // nullptr
  void add(const std::shared_ptr<Pass>& pass);
  bool has_ended(const PassId& id) const;
  // Whatever still comes of it is late.
  std::shared_ptr<Pass> end_pass(const PassId& id);
  std::size_t passes() const;
  std::vector<std::shared_ptr<Pass>> passes_of(ContextId id) const;

  void lost(WorkerId worker, const std::string& why);

  // Calls `Function` there until it is answered; then(Future<Result>), on any thread. Time-outs are
  // tried again until the deadline.
  template <auto Function, class Then, class... Arguments>
  void ask(WorkerId worker, const Deadline& deadline, Then then, Arguments... arguments);

 private:
  template <auto Function, class Then, class... Arguments>
  struct Attempt;

  const void* const address_;
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

  std::atomic<std::uint64_t> last_message_{0};
  static constexpr std::uint64_t kUnknown = UINT64_MAX;
  mutable std::atomic<std::uint64_t> self_{kUnknown};  // known when the workers have met
};

template <auto Function, class Then, class... Arguments>
struct Registry::Attempt : std::enable_shared_from_this<Attempt<Function, Then, Arguments...>> {
  using Result = typename rpc::detail::RpcFunction<Function>::Result;

  Attempt(std::shared_ptr<Registry> where, WorkerId to, const Deadline& until, Then after,
          Arguments... values)
      : registry(std::move(where)),
        worker(to),
        deadline(until),
        then(std::move(after)),
        arguments(std::move(values)...) {}

  void go() {
    try {
      const rpc::detail::RecorderScope not_recorded(nullptr);
      const rpc::Session session(registry->session());
      rpc::CallOptions options{.stays = true};
      options.timeout = limit;
      const auto left = time_left();
      if (left && *left < limit) {
        options.timeout = std::max(std::chrono::ceil<std::chrono::milliseconds>(*left),
                                   std::chrono::milliseconds(1));
      }
      const auto target = session.to(worker, options);
      auto future = std::apply(
          [&](const auto&... each) { return target.template rpc_async<Function>(each...); },
          arguments);
      static_cast<void>(future.then([self = this->shared_from_this()](
                                        const rpc::Future<Result>& ended) { self->ended(ended); }));
    } catch (...) {
      rpc::Promise<Result> failed;
      failed.set_error(std::current_exception());
      then(failed.future());
    }
  }

 private:
  std::optional<std::chrono::nanoseconds> time_left() const {
    if (deadline.is_never()) return std::nullopt;
    return deadline.when() - registry->session()->agent().now();
  }
  void ended(const rpc::Future<Result>& future) {
    bool again = false;
    try {
      if (future.error()) std::rethrow_exception(future.error());
    } catch (const Error& error) {
      try {
        const auto left = time_left();
        again = error.kind() == ErrorKind::kTimeout && (!left || left->count() > 0);
      } catch (const Error&) {  // the session ends
      }
    } catch (...) {
    }
    if (!again) return then(future);
    limit = std::min(2 * limit, std::chrono::milliseconds(30'000));
    go();
  }

  const std::shared_ptr<Registry> registry;
  const WorkerId worker;
  const Deadline deadline;
  Then then;
  const std::tuple<Arguments...> arguments;
  std::chrono::milliseconds limit{1000};
};

template <auto Function, class Then, class... Arguments>
void Registry::ask(WorkerId worker, const Deadline& deadline, Then then, Arguments... arguments) {
  std::make_shared<Attempt<Function, Then, Arguments...>>(shared_from_this(), worker, deadline,
                                                          std::move(then), std::move(arguments)...)
      ->go();
}

}  // namespace convoy::autograd::detail
