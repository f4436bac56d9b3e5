// Agents: calls of ours, from start() to ended().
#include <algorithm>

#include "agent/agent_impl.h"
#include "base/duration.h"
#include "base/error.h"
#include "os/quick_clock.h"

namespace convoy::agent {
namespace {

// Times of calls are looked at no more often.
constexpr std::chrono::milliseconds kLeastTick(1);

void check_outgoing(const Outgoing& outgoing) {
  if (outgoing.body.size() > Outgoing::kMostBody) {
    fail(ErrorKind::kInvalidArgument, "the body must have at most ", Outgoing::kMostBody,
         " bytes, got ", outgoing.body.size(), "; send more as a piece");
  }
  if (outgoing.pieces.size() > Outgoing::kMostPieces) {
    fail(ErrorKind::kInvalidArgument, outgoing.pieces.size(), " pieces; at most ",
         Outgoing::kMostPieces, " go with a call");
  }
}

}  // namespace

// In a simulation time is another.
Deadline::Clock::time_point Agent::quick_now() const {
  return options_.start_thread ? endpoint_->now() : QuickClock::now();
}

Failure Agent::failure_of(const Call& call, ErrorKind kind, std::string_view why) const {
  return {.kind = kind,
          .text = concat("call of ", declared_function(call.function_).name, " to ",
                         call.peer_->worker.name, ": ", why),
          .worker = call.peer_->worker.name,
          .remote_type = {}};
}

// The peer's lock is held.
std::string Agent::out_of_time(const Call& call) {
  const Peer& peer = *call.peer_;
  return concat(
      "it ran for more than ", format_duration(call.timeout_),
      peer.contact.open ? "" : concat("; ", peer.worker.name, " has not been reached yet"));
}

void Agent::start(Call& call, WorkerId to, FunctionId function, Outgoing outgoing,
                  const CallOptions& options) {
  require_home();
  Peer& callee = peer(to);
  check_outgoing(outgoing);
  const auto refuse_closed = [&] {
    // While it shuts down calls go on: handlers and what follows them may need them.
    if (!ending_.closed.load(std::memory_order_relaxed)) return;
    fail(ErrorKind::kInvalidArgument, "call of ", declared_function(function).name, " to ",
         callee.worker.name, ": RPC has not been initialized, or ", options_.name,
         " has been shut down");
  };
  refuse_closed();
  const std::chrono::nanoseconds timeout = options.timeout.value_or(call_timeout());
  if (timeout.count() < 0) {
    fail(ErrorKind::kInvalidArgument, "timeout must be >= 0, got ", format_duration(timeout));
  }
  if (!callee.remote.load(std::memory_order_acquire)) connect(callee);

  const auto now = quick_now();
  const Deadline deadline =
      timeout.count() == 0 ? Deadline::never() : Deadline::after(timeout, now);
  const std::size_t bytes = bytes_of(outgoing);
  call.peer_ = &callee;
  call.function_ = function;
  call.flags_ = options.flags;
  call.bytes_ = bytes;
  call.started_ = now;
  call.timeout_ = timeout;
  call.timeout_left_ = timeout;
  call.deadline_ = deadline;
  Failure failure;
  Lock lock(callee.mutex);
  const bool full = callee.calls.count != 0 && (callee.calls.count >= options_.most_calls ||
                                                callee.calls.bytes + bytes > options_.most_bytes);
  if (full && !wait_for_room(callee, lock, bytes, deadline)) {
    failure = failure_of(call, ErrorKind::kTimeout,
                         concat("there was no room for it within ", format_duration(timeout), ": ",
                                callee.calls.count, " calls are under way"));
  } else if (callee.contact.lost) {
    failure = failure_of(call, ErrorKind::kPeerLost,
                         concat(callee.worker.name, " is lost: ", callee.contact.why));
  } else if (callee.contact.open && callee.functions.place_of(function) < 0) {
    failure = failure_of(call, ErrorKind::kInvalidArgument,
                         callee.functions.describe_missing(function, callee.worker.name));
  } else {
    refuse_closed();
    call.over_.store(false, std::memory_order_relaxed);
    callee.calls.link(call);
    call.ticket_ = record_.sends(to, function, call.number_, now);
    counts_.started.fetch_add(1, std::memory_order_relaxed);
    const std::uint32_t slot = call.slot_;
    const std::uint64_t number = call.number_;
    if (full && !deadline.is_never()) call.timeout_left_ = deadline.when() - quick_now();
    try {
      send(callee, lock, LetterType::kCall, {}, outgoing, &call);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      if (!callee.calls.has(&call, slot, number)) return;  // it has ended otherwise
      record_.ended(call.ticket_, CallRecord::End::kFailed, quick_now());
      callee.calls.unlink(call);
      lock.unlock();
      call.over_.store(true, std::memory_order_relaxed);
      endpoint_->wake();  // there is room for others
      throw;
    }
    if (!deadline.is_never()) arm(deadline.when());
    return;
  }
  call.bytes_ = 0;  // nothing was sent
  callee.count_error(call);
  lock.unlock();
  call.over_.store(false, std::memory_order_relaxed);
  call.ended({.failure = &failure});
}

// The lock is held, and let go of meanwhile. False: time is over.
bool Agent::wait_for_room(Peer& peer, Lock& lock, std::size_t bytes, const Deadline& deadline) {
  if (options_.when_full == WhenFull::kThrow) {
    fail(ErrorKind::kResource, peer.calls.count, " calls with ", peer.calls.bytes,
         " bytes are on their way to ", peer.worker.name, "; the limits are ", options_.most_calls,
         " and ", options_.most_bytes, ": wait for some, or raise the limits");
  }
  // Handlers do not wait: those who called them may be what they would wait for, and there are no
  // more of them than callers may have calls. Nor does whoever is asked to take an answer.
  if (Request::current() || InboxScope::is_here(nullptr)) return true;
  lock.unlock();
  const bool in_time = wait(deadline, [&] {
    const std::scoped_lock look(peer.mutex);
    return peer.contact.lost || ending_.closed.load() || peer.calls.count == 0 ||
           (peer.calls.count < options_.most_calls &&
            peer.calls.bytes + bytes <= options_.most_bytes);
  });
  lock.lock();
  return in_time;
}

bool Agent::is_under_way(WorkerId worker, std::uint64_t number) const {
  const Peer& callee = peer(worker);
  const std::scoped_lock lock(callee.mutex);
  for (const Call* call = callee.calls.first; call; call = call->after_) {
    if (call->number_ >= number) return call->number_ == number;
  }
  return false;
}

// --- answers ---

void Agent::hear_reply(Peer& peer, transport::Arrival& arrival) {
  const auto head = decode_head<ReplyHead>(arrival.head, "reply");
  if (head.zero != 0) fail(ErrorKind::kInvalidArgument, "malformed reply: bytes are not zero");
  Call* call = nullptr;
  {
    const std::scoped_lock lock(peer.mutex);
    call = peer.calls.take(head.slot, head.number);
    if (!call) return;
    FunctionStats& counters = peer.counters_of(call->function_);
    ++counters.calls;
    counters.bytes_sent += call->bytes_;
    counters.bytes_received += arrival.head.size() - sizeof head;
    for (const Part& part : arrival.parts) counters.bytes_received += part.bytes.size();
    const auto now = quick_now();
    counters.latency.add(now - call->started_);
    record_.ended(call->ticket_, CallRecord::End::kWell, now);
  }
  call->ended({.body = arrival.head.subspan(sizeof head), .parts = std::move(arrival.parts)});
}

void Agent::hear_error(Peer& peer, transport::Arrival& arrival) {
  const auto head = decode_head<ReplyHead>(arrival.head, "error of a call");
  if (head.zero != 0) fail(ErrorKind::kInvalidArgument, "malformed error: bytes are not zero");
  const ErrorFields fields = decode_error(arrival.parts.empty() ? arrival.head.subspan(sizeof head)
                                                                : arrival.parts[0].bytes);
  Call* call = nullptr;
  Failure failure;
  {
    const std::scoped_lock lock(peer.mutex);
    call = peer.calls.take(head.slot, head.number);
    if (!call) return;
    FunctionStats& counters = peer.counters_of(call->function_);
    ++counters.calls;
    ++counters.errors;
    counters.bytes_sent += call->bytes_;
    const auto now = quick_now();
    counters.latency.add(now - call->started_);
    record_.ended(call->ticket_, CallRecord::End::kFailed, now);
    failure = failure_of(*call, static_cast<ErrorKind>(fields.kind), fields.text);
  }
  failure.remote_type = fields.type;
  call->ended({.failure = &failure});
}

// --- waiting, giving up ---

void Agent::wait(Call& call) {
  if (call.over()) return;
  while (!wait(call.deadline_, [&] { return call.over(); })) give_up(call, ErrorKind::kTimeout);
}

bool Agent::wait(const Deadline& deadline, FunctionRef<bool()> ready) {
  require_home();
  if (ready()) return true;
  handler_waits();
  const Executor::Waiting waiting;
  return endpoint_->wait(deadline, ready);
}

bool Agent::wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) {
  require_home();
  if (ready()) return true;
  handler_waits();
  const Executor::Waiting waiting;
  return endpoint_->wait_aside(deadline, ready);
}

bool Agent::cancel(Call& call) {
  return !call.over() && home_.is_here() && give_up(call, ErrorKind::kCancelled);
}

// The lock is held. What ends is told later, when it is not.
void Agent::retract(Peer& peer, Call& call, Ended& ended) {
  peer.count_error(call);
  record_.ended(call.ticket_, CallRecord::End::kFailed, quick_now());
  if (auto queued = peer.outbox.remove(call)) {
    ended.letters.emplace_back(std::move(queued->on_sent), "its call has ended");
  } else {
    ended.cancels.push_back(call.number_);
  }
  peer.calls.unlink(call);
}

// Tells the callee that nobody waits for these any more.
void Agent::say_cancelled(Peer& peer, std::span<const std::uint64_t> numbers) noexcept {
  for (const std::uint64_t number : numbers) {
    Lock lock(peer.mutex);
    if (peer.contact.lost) return;
    const CancelHead head{.number = number, .floor = peer.calls.floor()};
    Outgoing nothing;
    try {
      send(peer, lock, LetterType::kCancel, std::as_bytes(std::span(&head, 1)), nothing);
    } catch (const Error&) {
      return;  // it works in vain
    }
  }
}

bool Agent::give_up(Call& call, ErrorKind kind) {
  Peer& peer = *call.peer_;
  Ended ended;
  Lock lock(peer.mutex);
  if (call.number_ == 0) return false;
  ended.calls.emplace_back(
      &call,
      failure_of(call, kind, kind == ErrorKind::kTimeout ? out_of_time(call) : "it was cancelled"));
  retract(peer, call, ended);
  lock.unlock();
  say_cancelled(peer, ended.cancels);
  ended.tell();
  endpoint_->wake();
  return true;
}

// --- time ---

void Agent::arm(Deadline::Clock::time_point when) {
  if (timer_.is_set_by(when)) [[likely]]
    return;
  timer_.set(*endpoint_, when, [this] { look_at_time(); });
}

// On the thread that serves.
void Agent::look_at_time() {
  const InboxScope scope(*this);
  if (ending_.closed.load(std::memory_order_acquire)) return;
  timer_.has_fired();
  const auto now = endpoint_->now();
  auto next = Deadline::Clock::time_point::max();
  Ended ended;
  for (const auto& known : roster_.peers()) {
    Peer& peer = *known;
    bool greets = false;
    ended.cancels.clear();
    {
      Lock lock(peer.mutex);
      for (Call* call = peer.calls.first; call;) {
        Call* const after = call->after_;
        if (call->deadline_.is_never()) {
          // stays
        } else if (call->deadline_.when() > now) {
          next = std::min(next, call->deadline_.when());
        } else {
          ended.calls.emplace_back(call,
                                   failure_of(*call, ErrorKind::kTimeout, out_of_time(*call)));
          retract(peer, *call, ended);
        }
        call = after;
      }
      if (peer.contact.open || peer.contact.lost)
        peer.contact.hello_again = Deadline::Clock::time_point::max();
      if (peer.contact.hello_again <= now) {
        greets = true;
        peer.contact.hello_again = now + std::chrono::milliseconds(50);
      }
      next = std::min(next, peer.contact.hello_again);
    }
    if (greets) say_hello(peer, /*asks=*/true);
    say_cancelled(peer, ended.cancels);
  }
  ended.tell();
  endpoint_->wake();
  if (next != Deadline::Clock::time_point::max()) arm(std::max(next, now + kLeastTick));
}

}  // namespace convoy::agent
