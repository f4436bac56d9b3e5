#include "agent/request.h"

#include "agent/agent_impl.h"
#include "agent/peer.h"
#include "base/concat.h"

namespace convoy::agent {
namespace {

thread_local Request* request_here = nullptr;

}  // namespace

Request::Request(std::shared_ptr<AgentLife> life) : life_(std::move(life)) {}

Agent& Request::agent() const { return life_->agent; }
const Worker& Request::caller() const { return peer_->worker; }
std::uint32_t Request::function() const { return function_->id; }
std::string_view Request::function_name() const { return function_->handler.key.name; }

Request* Request::current() noexcept { return request_here; }

CurrentScope::CurrentScope(Request* request) noexcept
    : before_(std::exchange(request_here, request)) {}
CurrentScope::~CurrentScope() { request_here = before_; }

bool Request::reply(Outgoing outgoing) noexcept {
  if (answered_.exchange(true)) return false;
  if (!life_->enter()) return false;
  const bool goes = life_->agent.answer(*this, LetterType::kReply, outgoing);
  life_->leave();
  return goes;
}

bool Request::fail(ErrorKind kind, std::string_view type, std::string_view text) noexcept {
  if (answered_.exchange(true)) return false;
  if (!life_->enter()) return true;
  life_->agent.answer_error(*this, kind, type, text);
  life_->leave();
  return true;
}

// Nobody refers to it any more.
void Request::drop() noexcept {
  parts_.clear();
  attached_.reset();
  AgentLife& life = *life_;  // the agent has it, too, and stays until leave()
  if (!life.enter()) {
    delete this;
    return;
  }
  if (!answered_.load()) {
    fail(ErrorKind::kRemote, "", concat(function_name(), " has ended without an answer"));
  }
  life.agent.spare_requests_.give(this);  // deletes this, perhaps
  life.leave();
}

void Request::run_task() noexcept { life_->agent.run(*this); }

// The agent ends: it was told so.
void Request::discard() noexcept { const RequestRef last(this, RequestRef::Adopt()); }

void Request::refuse(const Error& error) noexcept {
  const RequestRef last(this, RequestRef::Adopt());
  fail(error.kind(), "", concat("no thread for it: ", error.what()));
}

}  // namespace convoy::agent
