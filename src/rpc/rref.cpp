// References: the caller's side, and what both sides have in common.
#include "convoy/rref.h"

#include "base/concat.h"
#include "base/duration.h"
#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "rpc/rref_state.h"
#include "rpc/serve.h"

namespace convoy::rpc::detail {

HeldValue::~HeldValue() = default;

std::uint64_t type_number(const std::string& description) { return hash_text(description); }

// --- What every reference has -----------------------------------------------------------------

namespace {

const RRefState& state_of(const RRefHandle& handle) {
  if (!handle) fail(ErrorKind::kInvalidArgument, "this RRef refers to nothing");
  return *handle;
}

[[noreturn]] void rethrow(const agent::Failure& failure) {
  throw RemoteError(failure.kind, failure.text, failure.worker, failure.remote_type);
}

// The session of a reference that can be used.
std::shared_ptr<SessionImpl> usable(const RRefState& state) {
  auto session = state.session.lock();
  if (!session) {
    fail(ErrorKind::kInvalidArgument, "RRef ", rref::to_string(state.ref.id()),
         " is deleted: its session has ended");
  }
  if (const auto failure = state.ref.failure()) rethrow(*failure);
  return session;
}

}  // namespace

bool same(const RRefHandle& a, const RRefHandle& b) {
  return a == b || (a && b && a->ref.id() == b->ref.id());
}

bool is_owner(const RRefHandle& handle) { return state_of(handle).ref.is_owner(); }

bool is_confirmed(const RRefHandle& handle) { return state_of(handle).ref.confirmed(); }

std::string describe(const RRefHandle& handle) {
  if (!handle) return "RRef to nothing";
  return concat("RRef ", rref::to_string(handle->ref.id()));
}

void fail_backward_of_user(const RRefHandle& handle) {
  fail(ErrorKind::kInvalidArgument, "User RRefs require a context to be specified: backward() of ",
       describe(handle), ", whose owner is ", owner_of(handle).name);
}

WorkerInfo owner_of(const RRefHandle& handle) {
  const RRefState& state = state_of(handle);
  const auto session = state.session.lock();
  if (!session) {
    fail(ErrorKind::kInvalidArgument, describe(handle), " is deleted: its session has ended");
  }
  const auto& owner = session->agent().worker(std::int64_t{state.ref.id().owner});
  return {owner.name, static_cast<int>(owner.id)};
}

std::shared_ptr<SessionImpl> session_of(const RRefHandle& handle) {
  return usable(state_of(handle));
}

RRefHandle hold(const std::shared_ptr<SessionImpl>& session, std::shared_ptr<HeldValue> value,
                std::uint64_t type) {
  return std::make_shared<RRefState>(session->refs().make({std::move(value), type}), session);
}

HeldValue& local_value(const RRefHandle& handle, const std::type_info& type) {
  const RRefState& state = state_of(handle);
  const auto session = usable(state);
  if (!state.ref.is_owner()) {
    const auto& self = session->agent().self();
    const auto owner = owner_of(handle);
    fail(ErrorKind::kInvalidArgument, "local_value: ", self.name, " (worker ", self.id,
         ") is only a user of ", describe(handle), ", fork ", state.ref.fork(), "; its owner is ",
         owner.name, " (worker ", owner.rank, "): call to_here(), or functions on it");
  }
  const auto limit = session->agent().call_timeout();
  const WaitScope waits;
  const auto value = session->refs().value(
      state.ref, limit.count() == 0 ? Deadline::never() : Deadline::after(limit));
  auto& held = *static_cast<HeldValue*>(value.object.get());
  if (held.type() != type) fail_object(&held.type(), type);
  return held;
}

void fail_object(const std::type_info* has, const std::type_info& wanted) {
  Describer text;
  text.add_name(wanted);
  if (!has) throw Refusal(concat("there is no ", text.text(), ": the pointer is empty"));
  Describer other;
  other.add_name(*has);
  throw Refusal(concat("the reference is to ", other.text(), ", which is not a ", text.text()));
}

void fail_result(const std::type_info& type) {
  Describer text;
  text.add_name(type);
  throw Refusal(concat("a value of type ", text.text(),
                       " cannot be passed; make it with remote(), and call functions on the RRef"));
}

// --- Errors -----------------------------------------------------------------------------------

agent::Failure failure_of(const std::exception_ptr& error, const std::string& worker) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError& thrown) {
    return {thrown.kind(), thrown.what(), thrown.worker(), thrown.remote_type()};
  } catch (const Error& thrown) {
    return {thrown.kind(), thrown.what(), worker, ""};
  } catch (const std::exception& thrown) {
    return {ErrorKind::kInternal, thrown.what(), worker, ""};
  } catch (...) {
    return {ErrorKind::kInternal, "an exception not derived from std::exception", worker, ""};
  }
}

// --- Creation ---------------------------------------------------------------------------------

namespace {

// The call that creates a value. Its answer says nothing.
class CreationCall final : public FutureCore {
 public:
  explicit CreationCall(std::shared_ptr<SessionImpl> session) : FutureCore(std::move(session)) {}

 private:
  void decode(ValueSource& source) override { source.take<std::monostate>(); }
};

void end_creation(SessionImpl& session, const rref::Ref& ref, const std::exception_ptr& error) {
  if (!error) return session.refs().creation_ended(ref, nullptr);
  auto failure = failure_of(error, session.agent().worker(std::int64_t{ref.id().owner}).name);
  failure.text = concat("RRef creation: ", failure.text);
  session.refs().creation_ended(ref, &failure);
}

}  // namespace

Creation::Creation(const std::shared_ptr<SessionImpl>& session, std::uint32_t worker) {
  auto made = session->refs().create(worker);
  head = as_bytes_of<std::array<std::uint64_t, 4>>(made.head);
  reference = std::make_shared<RRefState>(std::move(made.ref), session);
  call = std::make_shared<CreationCall>(session);
  when_done(*call, [core = call.get(), state = reference] {
    if (const auto here = state->session.lock()) end_creation(*here, state->ref, core->error());
  });
}

void Creation::fail(const std::exception_ptr& error) const noexcept {
  try {
    end_creation(*call->session(), reference->ref, error);
  } catch (const std::exception& failure) {
    log_error("rpc: ", failure.what());
  }
}

Future<void> when_created(const RRefHandle& handle) {
  const RRefState& state = state_of(handle);
  const auto session = state.session.lock();
  auto future = std::make_shared<FutureState<void>>(session);
  // It stays until then.
  const auto end = [future, handle](const agent::Failure* failure) {
    if (!future->claim()) return;
    failure ? future->end(error_of(*failure)) : future->end_with();
  };
  if (session && state.ref.is_owner()) {
    session->refs().when_value(
        state.ref, [end](const rref::Value*, const agent::Failure* failure) { end(failure); });
  } else {
    state.ref.when_confirmed(end);
  }
  return Future<void>(std::move(future));
}

namespace {

// What it throws ends nothing.
void tell_lost(const std::function<void(const Error&)>& callback, const Error& error) noexcept {
  try {
    callback(error);
  } catch (const std::exception& thrown) {
    log_error("rpc: a callback of RRef::on_lost threw: ", thrown.what());
  } catch (...) {
    log_error("rpc: a callback of RRef::on_lost threw something that is not a std::exception");
  }
}

}  // namespace

void on_owner_lost(const RRefHandle& handle, std::function<void(const Error&)> callback) {
  const RRefState& state = state_of(handle);
  state.ref.when_lost(
      [callback = std::move(callback), weak = state.session](const agent::Failure* failure) {
        const Error error(failure ? failure->kind : ErrorKind::kPeerLost,
                          failure ? failure->text : "the owner is gone");
        const auto session = weak.lock();
        if (!session || session->agent().is_shut_down()) return tell_lost(callback, error);
        session->agent().post([callback, error] { tell_lost(callback, error); });
      });
}

// --- The value --------------------------------------------------------------------------------

namespace {

// At the owner there is no call whose time would be over.
void end_in_time(const std::shared_ptr<SessionImpl>& session, const RRefHandle& handle,
                 const std::shared_ptr<FutureCore>& future, std::chrono::nanoseconds timeout) {
  agent::Agent& agent = session->agent();
  const auto end = [weak = std::weak_ptr(future), name = agent.self().name,
                    text = concat("to_here: the value of ", describe(handle),
                                  " was not there within ", format_duration(timeout))] {
    const auto here = weak.lock();
    if (!here || !here->claim()) return;
    here->end(std::make_exception_ptr(RemoteError(ErrorKind::kTimeout, text, name, "")));
  };
  const auto timer = agent.call_at(agent.now() + timeout, [&agent, end] { agent.post(end); });
  when_done(*future, [timer, weak = std::weak_ptr(session)] {
    if (const auto here = weak.lock()) here->agent().cancel_timer(timer);
  });
}

}  // namespace

void when_local(const RRefHandle& handle, const std::shared_ptr<FutureCore>& future,
                const CallOptions& options, void (*end)(void* future, HeldValue& held)) {
  const RRefState& state = state_of(handle);
  const auto session = usable(state);
  const auto timeout = timeout_of(options).value_or(session->agent().call_timeout());
  if (timeout.count() < 0) {
    fail(ErrorKind::kInvalidArgument, "timeout must be >= 0, got ", format_duration(timeout));
  }
  session->refs().when_value(
      state.ref, [future, end](const rref::Value* value, const agent::Failure* failure) {
        if (!future->claim()) return;
        if (failure) return future->end(error_of(*failure));
        end(future.get(), *static_cast<HeldValue*>(value->object.get()));
      });
  if (timeout.count() != 0 && !future->done()) end_in_time(session, handle, future, timeout);
}

namespace {

const CallKey& fetch_key() {
  static const CallKey key = [] {
    static convoy::detail::FunctionEntry entry;
    const agent::Handler handler = fetch_handler();
    entry.call_name = handler.key.name;
    return CallKey{&entry, agent::declare_function(handler.key)};
  }();
  return key;
}

}  // namespace

void fetch(const std::shared_ptr<SessionImpl>& session, const RRefHandle& handle,
           FutureCore& future, std::shared_ptr<FutureCore> keep, std::uint64_t type,
           const CallOptions& options) {
  const rref::RRefId& id = handle->ref.id();
  const CallStart start{session, future, std::move(keep), id.owner, fetch_key(),
                        options, 0,      &handle};
  with_body(
      nullptr, TensorMode::kStay, false, [&](const Body& body) { start_call(start, body); },
      as_bytes_of<std::array<std::uint64_t, 3>>(id), type);
}

OnReference::OnReference(const RRefHandle& handle)
    : session(usable(state_of(handle))),
      worker(handle->ref.id().owner),
      id(as_bytes_of<std::array<std::uint64_t, 3>>(handle->ref.id())),
      reference(handle) {}

// --- In messages ------------------------------------------------------------------------------

std::size_t ReferencesOut::add(const RRefHandle& reference) {
  const RRefState& state = state_of(reference);
  if (!to_) {
    fail(ErrorKind::kUnsupported, describe(reference),
         ": references travel in arguments and results of calls only");
  }
  auto session = usable(state);
  if (session.get() != to_->session) {
    fail(ErrorKind::kInvalidArgument, describe(reference), " is of another session");
  }
  static_assert(sizeof(rref::Passed) == kBytes);
  passed_.push_back(as_bytes_of<Passed>(session->refs().pass(
      state.ref, to_->worker,
      to_->answer_to == 0 ? std::nullopt : std::optional<std::uint64_t>(to_->answer_to))));
  session_ = std::move(session);
  return kBytes;
}

void ReferencesOut::give_back() noexcept {
  static_assert(sizeof(Passed) == sizeof(rref::Passed) && alignof(Passed) >= alignof(rref::Passed));
  std::vector<rref::Passed> list;
  for (const Passed& each : passed_) list.push_back(as_bytes_of<rref::Passed>(each));
  session_->refs().passed(to_->worker, list, rref::Passage::kNotSent);
}

RRefHandle ValueSource::take_reference() {
  ReferencesOut::Passed bytes;
  copy(bytes.data(), sizeof bytes);
  if (!from_) wrong_kind();
  auto& session = *const_cast<SessionImpl*>(from_->session);
  references_.push_back(std::make_shared<RRefState>(
      session.refs().take(from_->worker, as_bytes_of<rref::Passed>(bytes)),
      session.weak_from_this()));
  return references_.back();
}

}  // namespace convoy::rpc::detail
