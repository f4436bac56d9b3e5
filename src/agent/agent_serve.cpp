// Agents: calls of others, from their letters to the answers.
#include <algorithm>

#include "agent/agent_impl.h"
#include "base/error.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/thread.h"

namespace convoy::agent {
namespace {

using namespace std::chrono_literals;

// What fits into the head of a letter; longer texts are a piece.
constexpr std::size_t kMostErrorHead = 4096;
// A text is cut there.
constexpr std::size_t kMostErrorText = std::size_t{4} << 20;
// How long a handler may keep the thread that serves.
constexpr auto kTickTime = 1ms;
constexpr int kQuietTicks = 100;

// Of the handler that runs on this thread.
thread_local bool handler_has_waited = false;
struct InlineRun {
  void* tick = nullptr;  // whose
  std::uint64_t run = 0;
};
thread_local InlineRun inline_run;
// Whose handler runs on this thread, and when it was answered: sending what is not large is no part
// of the handler's time.
struct HandlerRun {
  const Request* request = nullptr;
  Deadline::Clock::time_point answered = {};
};
thread_local HandlerRun handler_run;
// What runs after it.
thread_local std::vector<std::function<void()>>* after_handler = nullptr;
constexpr std::size_t kMostUncounted = std::size_t{1} << 20;

}  // namespace

// --- functions ---

std::vector<TableEntry> Agent::Functions::table() const {
  std::vector<TableEntry> entries;
  const std::scoped_lock lock(mutex);
  for (const Function& function : all) {
    const FunctionKey key = declared_function(function.id);
    entries.push_back({std::string(key.name), std::string(key.signature), key.hash});
  }
  return entries;
}

void Agent::add_handlers(std::span<const Handler> handlers) {
  require_home();
  {
    const std::scoped_lock lock(functions_->mutex);
    for (const Handler& handler : handlers) {
      functions_->add(handler);
    }
  }
  if (!roster_.has_begun()) return;
  for (const auto& known : roster_.peers()) {
    if (known->remote.load(std::memory_order_acquire)) say_hello(*known, /*asks=*/false);
  }
}

// --- requests ---

void Agent::hear_call(Peer& peer, transport::Arrival& arrival) {
  const auto head = decode_head<CallHead>(arrival.head, "call");
  if ((head.flags & ~kAllCallFlags) != 0 || head.number == 0 || head.behind >= head.number) {
    fail(ErrorKind::kInvalidArgument, "malformed call: its numbers are out of range");
  }
  Function* const function = functions_->find(head.function);
  Request* const request = spare_requests_.take(life_);
  const auto now = quick_now();
  {
    Lock lock(peer.mutex);
    const bool is_new =
        !peer.contact.lost && peer.requests.seen.add(head.number, head.number - head.behind);
    const bool nonsense = peer.requests.seen.ranges() > SeenNumbers::kMostRanges;
    if (nonsense) {
      lock.unlock();
      spare_requests_.give(request);
      fail(ErrorKind::kInvalidArgument, "call numbers are out of order");
    }
    if (!is_new || !function) {
      if (is_new) {
        say_error(peer, lock, head.slot, head.number, ErrorKind::kInvalidArgument, "",
                  concat("there is no function ", head.function));
      }
      lock = {};
      spare_requests_.give(request);
      return;
    }
    request->function_ = function;
    request->number_ = head.number;
    request->slot_ = head.slot;
    request->flags_ = head.flags;
    request->deadline_ =
        head.remaining == kNoLimit
            ? Deadline::never()
            : Deadline::after(
                  std::chrono::nanoseconds(std::min<std::uint64_t>(head.remaining, INT64_MAX)),
                  now);
    request->arrived_ = now;
    request->received_ = arrival.head.size() - sizeof head;
    for (const Part& part : arrival.parts) request->received_ += part.bytes.size();
    request->peer_ = &peer;
    request->ticket_ = record_.arrives(peer.worker.id, function->id, head.number, now);
    peer.requests.link(*request);
  }
  counts_.taken.fetch_add(1, std::memory_order_relaxed);
  request->parts_ = std::move(arrival.parts);
  const auto body = arrival.head.subspan(sizeof head);
  const std::uint64_t average = function->average.load(std::memory_order_relaxed);
  if (tick_ && average != 0 && average < static_cast<std::uint64_t>(options_.most_inline.count()) &&
      executor_.try_enter()) {
    request->body_ = body;
    inline_run = {tick_.get(), tick_->begin()};
    run(*request, now);
    tick_->end(std::exchange(inline_run, {}).run);
    executor_.leave();
    counts_.inline_runs.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  request->kept_.assign(body.begin(), body.end());
  request->body_ = request->kept_;
  executor_.submit(*request);
}

void Agent::run(Request& request) noexcept { run(request, quick_now()); }

void Agent::run(Request& request, Deadline::Clock::time_point began) noexcept {
  const AgentLife::Scope alive(*life_);
  RequestRef task(&request, RequestRef::Adopt());
  // Nobody waits for it any more: it is not begun.
  if (request.cancelled() || (!request.deadline_.is_never() && request.deadline_.when() <= began)) {
    request.cancelled_.store(true, std::memory_order_relaxed);
    request.fail(ErrorKind::kCancelled, "", "");
    return;
  }
  Function& function = const_cast<Function&>(*request.function_);
  std::vector<std::function<void()>> after;
  auto* const after_outer = std::exchange(after_handler, &after);
  handler_has_waited = false;
  if (options_.enter_handler) options_.enter_handler();
  record_.began(request.ticket_, began);
  const HandlerRun outer = std::exchange(handler_run, {&request});
  {
    const CurrentScope current(&request);
    function.handler.run(function.handler.data, std::move(task));
  }
  after_handler = after_outer;
  const auto answered = std::exchange(handler_run, outer).answered;
  const auto end = answered == Deadline::Clock::time_point() ? quick_now() : answered;
  auto took = static_cast<std::uint64_t>(std::max<std::int64_t>((end - began).count(), 1));
  const auto most = static_cast<std::uint64_t>(options_.most_inline.count());
  if (std::exchange(handler_has_waited, false)) took = std::max(took, 100 * most);
  const std::uint64_t average = function.average.load(std::memory_order_relaxed);
  // One that was long is long at once, and must be short for a while to be taken for short again.
  const bool at_once = average == 0 || took > 50 * most;
  function.average.store(at_once ? took : (7 * average + took) / 8 + 1, std::memory_order_relaxed);
  for (const auto& each : after) {
    if (options_.enter_handler) options_.enter_handler();
    each();
  }
  handler_has_waited = false;
}

void Agent::handler_waits() noexcept {
  handler_has_waited = true;
  // It may be another agent's handler that waits here.
  if (inline_run.tick) static_cast<Tick*>(inline_run.tick)->take_over(inline_run.run);
}

void Agent::hear_cancel(Peer& peer, const transport::Arrival& arrival) {
  const auto head = decode_head<CancelHead>(arrival.head, "cancellation");
  if (arrival.head.size() != sizeof head || !arrival.parts.empty()) {
    fail(ErrorKind::kInvalidArgument, "malformed cancellation: there is more behind it");
  }
  const std::scoped_lock lock(peer.mutex);
  if (peer.requests.seen.ranges() > SeenNumbers::kMostRanges) {
    fail(ErrorKind::kInvalidArgument, "numbers of cancellations are out of order");
  }
  // If it has not come yet, it will be too late.
  if (peer.requests.seen.add(head.number, std::min(head.floor, head.number))) return;
  for (Request* request = peer.requests.first; request; request = request->after_) {
    if (request->number_ == head.number) request->cancelled_.store(true);
  }
}

// --- answers ---

bool Agent::answer(Request& request, LetterType type, Outgoing& outgoing) noexcept {
  Peer& peer = *request.peer_;
  // Whoever waits for the end of all requests hears of this one, without the lock.
  struct Tell {
    Agent& agent;
    ~Tell() {
      if (agent.ending_.awaits_idle.load(std::memory_order_relaxed) != 0) agent.endpoint_->wake();
    }
  } const tell{*this};
  Lock lock(peer.mutex);
  peer.requests.unlink(request);
  FunctionStats& counters = peer.counters_of(request.function_->id);
  ++counters.served;
  if (type == LetterType::kError) ++counters.failed;
  counters.served_bytes_received += request.received_;
  const std::size_t bytes = bytes_of(outgoing);
  counters.served_bytes_sent += bytes;
  const auto now = quick_now();
  if (handler_run.request == &request && bytes <= kMostUncounted) handler_run.answered = now;
  counters.run_time.add(now - request.arrived_);
  record_.ended(request.ticket_,
                type == LetterType::kError ? CallRecord::End::kFailed : CallRecord::End::kWell,
                now);
  if (peer.contact.lost || ending_.closed.load(std::memory_order_relaxed) || request.cancelled()) {
    return false;
  }
  const ReplyHead head{.slot = request.slot_, .number = request.number_};
  try {
    if (outgoing.body.size() > Outgoing::kMostBody ||
        outgoing.pieces.size() > Outgoing::kMostPieces) {
      convoy::fail(ErrorKind::kInvalidArgument, "the result of ", request.function_name(),
                   " has a body of ", outgoing.body.size(), " bytes and ", outgoing.pieces.size(),
                   " pieces");
    }
    send(peer, lock, type, std::as_bytes(std::span(&head, 1)), outgoing);
    return true;
  } catch (const std::exception& error) {
    const auto* const ours = dynamic_cast<const Error*>(&error);
    if (!lock.owns_lock()) lock.lock();
    say_error(peer, lock, head.slot, head.number, ours ? ours->kind() : ErrorKind::kRemote, "",
              concat("its result cannot be sent: ", error.what()));
    return false;
  }
}

void Agent::answer_error(Request& request, ErrorKind kind, std::string_view type,
                         std::string_view text) noexcept {
  const std::string fields =
      encode_error({static_cast<std::uint32_t>(kind), std::string(type.substr(0, kMostErrorHead)),
                    std::string(text.substr(0, kMostErrorText))});
  const auto bytes = std::as_bytes(std::span(fields));
  const Piece piece{bytes};
  Outgoing outgoing;
  if (bytes.size() <= kMostErrorHead) {
    outgoing.body = bytes;
  } else {
    outgoing.pieces = {&piece, 1};
  }
  answer(request, LetterType::kError, outgoing);
}

// The lock is held, and let go of.
void Agent::say_error(Peer& peer, Lock& lock, std::uint32_t slot, std::uint64_t number,
                      ErrorKind kind, std::string_view type, std::string_view text) noexcept {
  const ReplyHead head{.slot = slot, .number = number};
  const std::string fields = encode_error({static_cast<std::uint32_t>(kind), std::string(type),
                                           std::string(text.substr(0, kMostErrorHead))});
  Outgoing outgoing{.body = std::as_bytes(std::span(fields))};
  try {
    if (!peer.contact.lost) {
      send(peer, lock, LetterType::kError, std::as_bytes(std::span(&head, 1)), outgoing);
    }
  } catch (const std::exception& error) {
    log_warn("rpc, ", options_.name, ": ", peer.worker.name, " gets no answer: ", error.what());
  }
  if (lock.owns_lock()) lock.unlock();
}

// --- other work ---

namespace {

class PostedTask final : public Task {
 public:
  PostedTask(std::function<void()> function, void (*enter)())
      : function_(std::move(function)), enter_(enter) {}

 private:
  void run_task() noexcept override {
    const std::unique_ptr<PostedTask> self(this);
    if (enter_) enter_();
    function_();
  }
  void discard() noexcept override { delete this; }
  void refuse(const Error&) noexcept override { delete this; }

  std::function<void()> function_;
  void (*enter_)();
};

}  // namespace

void Agent::post(std::function<void()> function) {
  require_home();
  executor_.submit(*new PostedTask(std::move(function), options_.enter_handler));
}

void Agent::run_after_handler(std::function<void()> function) {
  // What runs while the handler waits may be what it waits for.
  if (!after_handler || !executor_.is_here() || Executor::is_waiting()) {
    return post(std::move(function));
  }
  after_handler->push_back(std::move(function));
}

// --- the tick ---

Agent::Tick::Tick(Agent& agent) : agent_(agent), thread_(start_thread([this] { watch(); })) {}

Agent::Tick::~Tick() { stop(); }

void Agent::Tick::stop() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  wakes_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t Agent::Tick::begin() noexcept {
  // Somebody may be about to take over from the run before, and a thread after that.
  std::uint64_t before = run_.load(std::memory_order_relaxed);
  while (!run_.compare_exchange_weak(before, (before + 1) | 1)) {
  }
  const std::uint64_t run = (before + 1) | 1;
  if (asleep_.load()) {
    const std::scoped_lock lock(mutex_);
    asleep_.store(false);
    wakes_.notify_all();
  }
  return run;
}

void Agent::Tick::end(std::uint64_t run) noexcept {
  run_.compare_exchange_strong(run, run + 1, std::memory_order_release, std::memory_order_relaxed);
}

void Agent::Tick::take_over(std::uint64_t run) noexcept {
  if (!run_.compare_exchange_strong(run, run + 1)) return;
  agent_.counts_.takeovers.fetch_add(1, std::memory_order_relaxed);
  agent_.endpoint_->hand_over();
}

void Agent::Tick::watch() {
  set_thread_name("convoy-tick");
  std::unique_lock lock(mutex_);
  std::uint64_t last = 0;
  int quiet = 0;
  while (!stopping_) {
    if (asleep_.load()) {
      wakes_.wait(lock, [this] { return stopping_ || !asleep_.load(); });
    } else {
      wakes_.wait_for(lock, kTickTime, [this] { return stopping_; });
    }
    const std::uint64_t run = run_.load();
    if (run == last && run % 2 == 1) {
      lock.unlock();
      take_over(run);
      lock.lock();
    }
    quiet = run == last ? quiet + 1 : 0;
    last = run;
    if (quiet < kQuietTicks) continue;
    quiet = 0;
    asleep_.store(true);
    // Whoever begins now either sees that, or is seen.
    if (run_.load() != run) asleep_.store(false);
  }
}

}  // namespace convoy::agent
