#include "convoy/future.h"

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#include "agent/agent.h"
#include "agent/executor.h"
#include "base/error.h"
#include "convoy/share.h"
#include "rpc/message.h"
#include "rpc/recording.h"
#include "rpc/rref_state.h"
#include "rpc/session_impl.h"
#include "rpc/tensor_head.h"

namespace convoy::rpc {

namespace detail {

// The engine's part of a call, in the state of its future.
struct CallSlot final : agent::Call {
  CallSlot(FutureCore& future, const CallStart& start)
      : core(future),
        session(*start.session),
        worker(start.worker),
        function(start.key.entry->call_name) {}

  void ended(agent::Outcome&& outcome) noexcept override;

  FutureCore& core;
  SessionImpl& session;
  const std::uint32_t worker;
  const std::string_view function;
  std::unique_ptr<at::RecordFunction> record;
  std::vector<std::string> lent;              // tensors that are turned by the callee, or never
  std::vector<ReferencesOut::Passed> passed;  // references that went with it
  RRefHandle on;                              // what it is called on; not its share, if on a stack
};

namespace {

struct Closed final : Callback {
  void run() noexcept override {}
};

CallSlot& slot_of(std::byte* call) { return *std::launder(reinterpret_cast<CallSlot*>(call)); }

// Callbacks end futures, whose callbacks end others. From some depth on they do so one after the
// other, however long the chain is.
struct CallbackNest {
  static constexpr int kMost = 64;

  int depth = 0;
  Callback* first = nullptr;  // that wait for those of the last level
  Callback** end = &first;
};
thread_local CallbackNest callback_nest;

void run_callback(Callback* owned) noexcept {
  const std::unique_ptr<Callback> callback(owned);
  bool told = false;
  {
    // Whatever handler this thread is in the middle of, it is not that one's.
    const auto* const request = static_cast<agent::RequestRef*>(callback->request.get());
    const agent::CurrentScope scope(request ? request->get() : nullptr);
    const auto& recorder = callback->recorder;
    const RecorderScope recorded(
        RecorderHere{recorder != nullptr, std::static_pointer_cast<Recorder>(recorder)});
    // Whoever waits here may be within a NoGradGuard, or in a node of a backward pass.
    const c10::InferenceMode normal(false);
    told = tell_resumed();
    callback->run();
  }
  if (told) tell_resumed();
}

// Those that wait for the last level; in order.
Callback* take_waiting(CallbackNest& nest) noexcept {
  nest.end = &nest.first;
  return std::exchange(nest.first, nullptr);
}

// In the order in which they came.
void run_callbacks(Callback* newest) noexcept {
  if (!newest) return;
  Callback* const last = newest;
  Callback* first = nullptr;
  while (newest) {
    Callback* const next = std::exchange(newest->next, first);
    first = std::exchange(newest, next);
  }
  CallbackNest& nest = callback_nest;
  if (nest.depth == CallbackNest::kMost) {
    *nest.end = first;
    nest.end = &last->next;
    return;
  }
  ++nest.depth;
  while (first || (nest.depth == CallbackNest::kMost && nest.first)) {
    if (!first) first = take_waiting(nest);
    run_callback(std::exchange(first, first->next));
  }
  --nest.depth;
}

// Nobody will turn these any more.
void take_back(const std::vector<std::string>& lent) noexcept {
  for (const std::string& bytes : lent) {
    try {
      static_cast<void>(share::from_bytes(bytes));
    } catch (const std::exception&) {  // the callee has
    }
  }
}

// The result came with a context, in which the call was made.
void take_result_context(void* data, const std::vector<at::Tensor>& with_grad,
                         const std::byte* bytes, std::size_t count) {
  const CallSlot& slot = *static_cast<CallSlot*>(data);
  std::span tail(bytes, count);
  const RecordTrailer trailer = decode_trailer(tail, with_grad.size());
  if (Recordings* const recordings = slot.session.recordings()) {
    recordings->came(slot.worker, trailer, tail, with_grad, slot.function, /*reply=*/true);
  }
}

// The references that went with a call that has ended.
void end_passages(const CallSlot& slot, bool answered) noexcept {
  std::vector<rref::Passed> list;
  for (const auto& each : slot.passed) list.push_back(as_bytes_of<rref::Passed>(each));
  slot.session.refs().passed(slot.worker, list,
                             answered ? rref::Passage::kDelivered : rref::Passage::kUnknown);
}

std::unique_ptr<at::RecordFunction> record_call(SessionImpl& session, const CallStart& start) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto record = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  const bool remote = (start.flags & ServedCall::kKeepsResult) != 0;
  const char* const how = remote ? "rpc_remote#" : start.keep ? "rpc_async#" : "rpc_sync#";
  record->before(concat(how, start.key.entry->call_name, "(", session.agent().self().name, " -> ",
                        session.agent().worker(std::int64_t{start.worker}).name, ")"));
  record->_setAsync();  // it may end on another thread
  return record;
}

}  // namespace

WaitScope::WaitScope() noexcept : depth_(std::exchange(callback_nest.depth, 0)) {
  if (depth_ != CallbackNest::kMost) [[likely]]
    return;
  // What this callback has ended may be what it waits for.
  ++callback_nest.depth;
  for (Callback* first = take_waiting(callback_nest); first;) {
    run_callback(std::exchange(first, first->next));
    if (!first) first = take_waiting(callback_nest);
  }
  --callback_nest.depth;
}
WaitScope::~WaitScope() { callback_nest.depth = depth_; }

std::exception_ptr error_of(const agent::Failure& failure) {
  return std::make_exception_ptr(
      RemoteError(failure.kind, failure.text, failure.worker, failure.remote_type));
}

void CallSlot::ended(agent::Outcome&& outcome) noexcept {
  const auto keep = std::move(core.self_);
  if (record) record->end();
  if (!passed.empty()) [[unlikely]]
    end_passages(*this, outcome.failure == nullptr);
  if (outcome.failure) {
    take_back(lent);
    // If the reference's creation has failed meanwhile, the owner may not know it any more.
    const bool refused = on && outcome.failure->kind == ErrorKind::kInvalidArgument;
    const auto dead = refused ? on->ref.failure() : std::nullopt;
    core.error_ = error_of(dead ? *dead : *outcome.failure);
  } else {
    try {
      IncomingMessage message(outcome.body, outcome.parts);
      message.source().on_trailer(&take_result_context, this);
      const MessagePeer peer{&session, worker};
      message.source().comes_from(&peer);
      core.decode(message.source());
      message.source().finish();
    } catch (const Error& error) {
      const std::string& name = session.agent().worker(std::int64_t{worker}).name;
      core.error_ = std::make_exception_ptr(
          RemoteError(error.kind(), concat("the result of ", name, ": ", error.what()), name, ""));
    } catch (...) {
      core.error_ = std::current_exception();
    }
  }
  Callback* const callbacks =
      core.callbacks_.exchange(FutureCore::closed(), std::memory_order_acq_rel);
  mark_over();  // one on a stack may be gone from here on
  if (keep) run_callbacks(callbacks);
}

Callback* FutureCore::closed() noexcept {
  static Closed closed;
  return &closed;
}

FutureCore::~FutureCore() {
  if (has_call_) slot_of(call_).~CallSlot();
  // A state that never ended: its callbacks hear nothing.
  Callback* callback = callbacks_.load(std::memory_order_acquire);
  if (callback == closed()) return;
  while (callback) delete std::exchange(callback, callback->next);
}

void FutureCore::on_done(std::unique_ptr<Callback> callback) noexcept {
  Callback* newest = callbacks_.load(std::memory_order_acquire);
  if (agent::Request* const request = agent::Request::current(); request && newest != closed()) {
    callback->request = std::make_shared<agent::RequestRef>(request);
  }
  if (newest != closed()) callback->recorder = recorder_state().recorder;
  while (newest != closed()) {
    callback->next = newest;
    if (callbacks_.compare_exchange_weak(newest, callback.get(), std::memory_order_acq_rel)) {
      static_cast<void>(callback.release());
      return;
    }
  }
  callback->run();
}

void FutureCore::end(std::exception_ptr error) noexcept {
  error_ = std::move(error);
  const auto session = session_;
  Callback* const callbacks = callbacks_.exchange(closed(), std::memory_order_acq_rel);
  run_callbacks(callbacks);
  if (session) session->agent().wake();
}

void FutureCore::check() const {
  if (!done()) {
    fail(ErrorKind::kInvalidArgument,
         "result() was called before the future was done; call wait() first");
  }
  if (error_) std::rethrow_exception(error_);
}

namespace {

// Without a session.
bool wait_alone(FutureCore& core, const Deadline& deadline) {
  const agent::Executor::Waiting waiting;  // if this is a thread of one
  struct Gate {
    std::mutex mutex;
    std::condition_variable opened;
    bool open = false;
  };
  const auto gate = std::make_shared<Gate>();
  when_done(core, [gate] {
    const std::lock_guard lock(gate->mutex);
    gate->open = true;
    gate->opened.notify_all();
  });
  std::unique_lock lock(gate->mutex);
  const auto ready = [&] { return gate->open; };
  if (deadline.is_never()) {
    gate->opened.wait(lock, ready);
    return true;
  }
  return gate->opened.wait_until(lock, deadline.when(), ready);
}

// A wait may be over long before the future: it keeps no session.
void wake_when_done(FutureCore& core, const std::weak_ptr<SessionImpl>& session) {
  when_done(core, [session] {
    if (const auto here = session.lock()) here->agent().wake();
  });
}

[[noreturn]] void fail_late() {
  fail(ErrorKind::kTimeout,
       "the future was not done by the deadline of wait(); its operation continues");
}

// The session that a wait of this thread belongs to: whose handler runs, or the future's.
std::shared_ptr<SessionImpl> session_here(const std::shared_ptr<SessionImpl>& own) {
  if (own) return own;
  const agent::Request* const request = agent::Request::current();
  return request ? SessionImpl::of(*request) : nullptr;
}

}  // namespace

void FutureCore::wait(const Deadline& deadline) {
  if (!done()) {
    const WaitScope waits;
    const auto session = session_here(session_);
    bool in_time = true;
    if (!session) {
      in_time = wait_alone(*this, deadline);
    } else if (has_call_ && deadline.is_never()) {
      session->agent().wait(slot_of(call_));
    } else {
      if (session != session_) wake_when_done(*this, session);
      in_time = session->agent().wait(deadline, [this] { return done(); });
    }
    if (!in_time) fail_late();
  }
  check();
}

void wait_all(const std::vector<FutureCore*>& futures, const Deadline& deadline) {
  const auto failed = [&]() -> FutureCore* {
    for (FutureCore* const future : futures) {
      if (future->error()) return future;
    }
    return nullptr;
  };
  const auto ready = [&] {
    if (failed()) return true;
    for (FutureCore* const future : futures) {
      if (!future->done()) return false;
    }
    return true;
  };
  if (!ready()) {
    const WaitScope waits;
    // One that ends when they do.
    struct Gather final : FutureCore {
      void decode(ValueSource&) override {}
      std::atomic<std::size_t> left{0};
    };
    const auto all = std::make_shared<Gather>();
    all->left = futures.size();
    for (FutureCore* const future : futures) {
      when_done(*future, [all, future] {
        const bool last = all->left.fetch_sub(1) == 1;
        if ((future->error() || last) && all->claim()) all->end();
      });
    }
    std::shared_ptr<SessionImpl> session;
    for (FutureCore* const future : futures) {
      if (!session) session = session_here(future->session());
    }
    if (session) {
      wake_when_done(*all, session);
      if (!session->agent().wait(deadline, [&] { return all->done(); })) fail_late();
    } else {
      all->wait(deadline);
    }
  }
  if (FutureCore* const first = failed()) first->check();
}

bool FutureCore::cancel() noexcept {
  if (done()) return false;
  if (has_call_) return session_->agent().cancel(slot_of(call_));
  if (!claim()) return false;
  end(std::make_exception_ptr(Error(ErrorKind::kCancelled, "the future was cancelled")));
  return true;
}

namespace {

// A coroutine that is about to go on. One that never can is destroyed.
struct Resumption {
  std::coroutine_handle<> coroutine;
  agent::RequestRef request;  // whose handler it is
  std::shared_ptr<SessionImpl> session;
  RecorderHere recorder = recorder_state();
  bool armed = false;  // the coroutine is ours to continue or to destroy

  explicit Resumption(std::coroutine_handle<> what) : coroutine(what) {}
  Resumption(const Resumption&) = delete;
  Resumption& operator=(const Resumption&) = delete;
  ~Resumption() {
    if (armed) coroutine.destroy();
  }
  void resume() {
    armed = false;
    if (session) clean_thread_state();
    bool told = false;
    {
      const agent::CurrentScope scope(request.get());
      const RecorderScope recorded(std::move(recorder));
      told = tell_resumed();
      coroutine.resume();
    }
    if (told) tell_resumed();
  }
};

}  // namespace

void FutureCore::resume(std::coroutine_handle<> coroutine) {
  // What throws here throws into the coroutine, which must still be there.
  const auto next = std::make_shared<Resumption>(coroutine);
  next->request = agent::RequestRef(agent::Request::current());
  next->session = next->request ? SessionImpl::of(*next->request) : session_;
  auto go_on = [next] {
    if (next->session) {
      next->session->agent().post([next] { next->resume(); });
    } else {
      next->resume();
    }
  };
  auto callback = std::make_unique<CallbackOf<decltype(go_on)>>(std::move(go_on));
  next->armed = true;
  on_done(std::move(callback));
}

std::optional<std::chrono::nanoseconds> timeout_of(const CallOptions& options) {
  if (!options.timeout.is_set()) [[likely]]
    return std::nullopt;
  const auto left = *options.timeout.left();
  if (left.count() == 0 && options.timeout.is_deadline()) return std::chrono::nanoseconds(1);
  // The engine refuses times below 0: rounding up must not make "never" of them.
  if (left.count() < 0) return std::chrono::floor<std::chrono::milliseconds>(left);
  return within_clock(std::chrono::ceil<std::chrono::milliseconds>(left));
}

std::chrono::nanoseconds within_clock(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kCentury = std::chrono::hours(24) * 36525;
  return timeout < kCentury ? timeout : std::chrono::milliseconds(0);
}

void start_call(const CallStart& start, const Body& body) {
  SessionImpl& session = *start.session;
  FutureCore& core = start.core;
  const Recorded recorded(session, start.worker, body, start.key.entry->call_name);
  OutgoingMessage message(body, recorded.bytes());

  static_assert(sizeof(CallSlot) <= FutureCore::kCallBytes);
  static_assert(alignof(CallSlot) <= alignof(std::max_align_t));
  auto* const slot = new (core.call_) CallSlot(core, start);
  core.has_call_ = true;
  core.self_ = start.keep;
  slot->record = record_call(session, start);
  if (start.options.lend) {
    for (const auto& plan : body.tensors->plans()) {
      if (plan.kind == static_cast<std::uint8_t>(TensorKind::kLent)) {
        slot->lent.push_back(plan.rare->header);
      }
    }
  }
  // Whoever waits for one on its stack has the reference meanwhile.
  if (start.on) slot->on = start.keep ? *start.on : RRefHandle(RRefHandle(), start.on->get());
  const bool passes = !body.references->empty();
  if (passes) [[unlikely]]
    slot->passed = body.references->release();
  try {
    session.agent().start(*slot, start.worker, start.key.id, message.outgoing(),
                          {.timeout = timeout_of(start.options), .flags = start.flags});
  } catch (...) {
    if (passes) body.references->take_back();
    slot->passed.clear();
    core.self_.reset();
    take_back(slot->lent);
    recorded.forget();
    throw;
  }
}

void wait_for_call(SessionImpl& session, FutureCore& core) {
  CallSlot& slot = slot_of(core.call_);
  const WaitScope waits;
  try {
    session.agent().wait(slot);
  } catch (...) {
    // It is on this stack: it must have ended.
    session.agent().cancel(slot);
    while (!slot.over()) std::this_thread::yield();
    throw;
  }
  core.check();
}

void fail_empty_future() {
  fail(ErrorKind::kInvalidArgument,
       "this future or promise is empty: it was default-constructed or moved from");
}

void fail_ended_twice() {
  fail(ErrorKind::kInvalidArgument, "the promise already has a value or an error");
}

std::exception_ptr broken_promise() {
  return std::make_exception_ptr(
      Error(ErrorKind::kCancelled, "the promise of this future was destroyed without a result"));
}

}  // namespace detail
}  // namespace convoy::rpc
