// References: the callee's side.
#include <atomic>
#include <mutex>

#include "base/concat.h"
#include "base/error.h"
#include "base/log.h"
#include "rpc/message.h"
#include "rpc/rref_state.h"
#include "rpc/serve.h"

namespace convoy::rpc::detail {
namespace {

agent::RequestRef& request_ref_of(void* call) { return *static_cast<agent::RequestRef*>(call); }

SessionImpl& session_of(const agent::Request& request) {
  return *static_cast<SessionImpl*>(request.agent().user());
}

}  // namespace

// What a call waits for before its function may run.
struct ServedCall::Needs {
  std::mutex mutex;
  // Guarded by it:
  int left = 1;  // 1 for the one who asks
  std::optional<agent::Failure> failure;
  std::shared_ptr<HeldValue> object;
  std::function<void()> go_on;

  void done(const agent::Failure* why) {
    std::function<void()> next;
    {
      const std::scoped_lock lock(mutex);
      if (why && !failure) failure = *why;
      if (--left == 0) next = std::move(go_on);
    }
    if (next) next();
  }
};

void ServedCall::take_object() {
  const auto id = as_bytes_of<rref::RRefId>(arguments_.take<std::array<std::uint64_t, 3>>());
  rref::Refs& refs = session_of(*request_ref_of(call_)).refs();
  if (rref::Value value = refs.ready_value(id); value.object) [[likely]] {
    object_ = std::static_pointer_cast<HeldValue>(std::move(value.object));
    return;
  }
  needs_ = std::make_shared<Needs>();
  needs_->left = 2;
  refs.when_value(peer_.worker, id,
                  [needs = needs_](const rref::Value* value, const agent::Failure* failure) {
                    if (value) {
                      const std::scoped_lock lock(needs->mutex);
                      needs->object = std::static_pointer_cast<HeldValue>(value->object);
                    }
                    needs->done(failure);
                  });
}

RRefHandle ServedCall::take_result() {
  const auto head =
      as_bytes_of<rref::CreationHead>(arguments_.take<std::array<std::uint64_t, 4>>());
  SessionImpl& session = session_of(*request_ref_of(call_));
  return std::make_shared<RRefState>(session.refs().begin(peer_.worker, head),
                                     session.weak_from_this());
}

bool ServedCall::ready() {
  const auto& references = arguments_.references();
  if (!needs_ && references.empty()) [[likely]]
    return true;
  if (!references.empty()) {
    std::vector<rref::Ref> unknown;
    for (const RRefHandle& handle : references) {
      if (!handle->ref.confirmed()) unknown.push_back(handle->ref);
    }
    if (!unknown.empty()) {
      if (!needs_) {
        needs_ = std::make_shared<Needs>();
        needs_->object = object_;
      }
      {
        const std::scoped_lock lock(needs_->mutex);
        ++needs_->left;
      }
      session_of(*request_ref_of(call_))
          .refs()
          .when_settled(unknown, [needs = needs_](const agent::Failure* why) { needs->done(why); });
    }
  }
  if (!needs_) return true;
  const std::scoped_lock lock(needs_->mutex);
  if (needs_->left > 1) return false;
  if (needs_->failure) throw HandlerFailure(*needs_->failure);
  return true;
}

const std::shared_ptr<HeldValue>& ServedCall::object() const {
  return needs_ ? needs_->object : object_;
}

void ServedCall::when_ready(GoOn go_on, const RRefHandle& result) {
  const agent::RequestRef request = request_ref_of(call_);
  // The agent lives: handlers run on its threads only.
  auto resume = [request, answer = later(), go_on = std::move(go_on), needs = needs_, result] {
    const agent::CurrentScope scope(request.get());
    if (!needs->failure) return go_on(answer, needs->object);
    const auto error = std::make_exception_ptr(HandlerFailure(*needs->failure));
    if (result) keep_failure(result, error);
    answer.fail(error);
  };
  agent::Agent& agent = request->agent();
  {
    const std::scoped_lock lock(needs_->mutex);
    needs_->go_on = [&agent, resume = std::move(resume)] { agent.post(resume); };
  }
  needs_->done(nullptr);
}

void keep_result(const RRefHandle& result, std::shared_ptr<HeldValue> value, std::uint64_t type) {
  if (const auto session = result->session.lock()) {
    session->refs().set_value(result->ref, {std::move(value), type});
  }
}

void keep_failure(const RRefHandle& result, const std::exception_ptr& error) noexcept {
  try {
    const auto session = result->session.lock();
    if (!session) return;
    const Thrown thrown = describe_thrown(error);
    session->refs().set_failure(
        result->ref, {thrown.kind, thrown.text, session->agent().self().name, thrown.type});
  } catch (const std::exception& failure) {
    log_error("rpc: ", failure.what());
  }
}

// --- to_here ----------------------------------------------------------------------------------

namespace {

void answer_fetch(const agent::RequestRef& request, const MessagePeer& peer, std::uint64_t type,
                  const rref::Value* value, const agent::Failure* failure) noexcept {
  try {
    if (failure) throw HandlerFailure(*failure);
    const auto& held = *static_cast<HeldValue*>(value->object.get());
    if (value->type != type) {
      throw Refusal("the value is of another type there; build both programs of the same sources");
    }
    held.pass(
        peer,
        [](void* to, const Body& body) { reply_to(**static_cast<agent::RequestRef*>(to), body); },
        const_cast<agent::RequestRef*>(&request));
  } catch (...) {
    fail_request(*request, std::current_exception());
  }
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): as handlers are
void run_fetch(void*, agent::RequestRef request) noexcept {
  try {
    SessionImpl& session = session_of(*request);
    const MessagePeer peer{&session, request->caller().id, request->number()};
    IncomingMessage message(request->body(), request->parts());
    message.source().on_trailer(&take_context, request.get());
    const auto id =
        as_bytes_of<rref::RRefId>(message.source().take<std::array<std::uint64_t, 3>>());
    const auto type = message.source().take<std::uint64_t>();
    message.source().finish();
    if (const rref::Value value = session.refs().ready_value(id); value.object) [[likely]] {
      return answer_fetch(request, peer, type, &value, nullptr);
    }
    // A value that comes later is sent by a thread of the pool.
    const auto inside = std::make_shared<std::atomic<bool>>(true);
    session.refs().when_value(peer.worker, id,
                              [inside, request, peer, type, agent = &session.agent()](
                                  const rref::Value* value, const agent::Failure* failure) {
                                if (inside->load(std::memory_order_relaxed) || failure) {
                                  return answer_fetch(request, peer, type, value, failure);
                                }
                                agent->post([request, peer, type, value = *value] {
                                  const agent::CurrentScope scope(request.get());
                                  answer_fetch(request, peer, type, &value, nullptr);
                                });
                              });
    inside->store(false, std::memory_order_relaxed);
  } catch (...) {
    fail_request(*request, std::current_exception());
  }
}

}  // namespace

agent::Handler fetch_handler() {
  return {.key = {"to_here", "convoy::RRef", 1}, .run = &run_fetch};
}

}  // namespace convoy::rpc::detail
