#include "convoy/rpc.h"

#include <algorithm>

#include "base/concat.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "convoy/rendezvous.h"
#include "group/open_store.h"
#include "rpc/serve.h"
#include "rpc/session_impl.h"
#include "tensor/vector_math.h"

namespace convoy::rpc {
namespace {

// Where the workers of a session meet.
struct Place {
  std::shared_ptr<Store> store;
  int rank = 0;
  int size = 1;
  bool served_here = false;
};

// Two kinds of sessions in one store would not find each other.
void check_kind(Store& store, const char* kind) {
  const std::string found = store.compare_set("convoy/rpc/members", "", kind);
  if (found == kind) return;
  fail(ErrorKind::kInvalidArgument, "rpc: this session's members are ", kind,
       ", but a session in the same store has others that are ", found,
       ": workers of one store must all say the same `members`");
}

// Where workers come and go, their ranks are given when they come.
Place find_open_place(const SessionOptions& options) {
  Place place;
  std::optional<int> rank = options.rank;
  place.store = options.store;
  if (!place.store) {
    const OpenStore open = open_store({.method = options.method,
                                       .rank = options.rank,
                                       .size = options.size,
                                       .timeout = options.start_timeout});
    place.store = open.store;
    place.served_here = open.served_here;
    rank = open.rank;
  }
  if (options.name.empty() && !rank) {
    fail(ErrorKind::kInvalidArgument, "rpc: with dynamic membership a worker needs a name");
  }
  check_kind(*place.store, "not fixed");
  place.rank = rank.value_or(0);
  place.store = with_prefix(place.store, "convoy/rpc/open");
  return place;
}

Place find_place(const SessionOptions& options, const Deadline& deadline) {
  if (options.members == Members::kComeAndGo) return find_open_place(options);
  if (!options.store) {
    const auto meeting = rendezvous({.method = options.method,
                                     .rank = options.rank,
                                     .size = options.size,
                                     .timeout = options.start_timeout});
    return {meeting.store, meeting.rank, meeting.size};
  }
  if (!options.rank || !options.size) {
    fail(ErrorKind::kInvalidArgument, "rpc: with a store, rank and size must be given");
  }
  const int rank = *options.rank;
  const int size = *options.size;
  if (size < 1 || rank < 0 || rank >= size) {
    fail(ErrorKind::kInvalidArgument, "rpc: rank must be from 0 to size - 1, got rank ", rank,
         " of ", size, " workers");
  }
  // Sessions of one store are numbered by each worker: all count alike.
  static_cast<void>(deadline);
  check_kind(*options.store, "fixed");
  const auto number = options.store->add(concat("convoy/rpc/sessions-of/", rank), 1);
  return {with_prefix(options.store, concat("convoy/rpc/session-", number)), rank, size};
}

std::chrono::milliseconds checked(const char* what, std::chrono::milliseconds timeout) {
  if (timeout.count() < 0) {
    fail(ErrorKind::kInvalidArgument, "rpc: ", what, " must be >= 0 ms, got ", timeout.count());
  }
  return timeout;
}

Deadline deadline_of(std::chrono::milliseconds timeout) {
  return timeout.count() == 0 ? Deadline::never() : Deadline::after(timeout);
}

void check_timeout(const Timeout& timeout) {
  // Rounded away from 0: no time that is over becomes 0, which is "never".
  if (timeout.is_set()) {
    checked("timeout", std::chrono::floor<std::chrono::milliseconds>(*timeout.left()));
  }
}

// `own` is the session's.
Deadline deadline_of(const Timeout& timeout, std::chrono::milliseconds own) {
  check_timeout(timeout);
  const bool is_never = !timeout.is_deadline() && timeout.left() == std::chrono::nanoseconds(0);
  return is_never ? Deadline::never() : timeout.deadline(deadline_of(own));
}

WorkerInfo to_info(const agent::Worker& worker) {
  return {worker.name, static_cast<int>(worker.id)};
}

std::vector<WorkerInfo> to_infos(const std::vector<agent::Worker>& workers) {
  std::vector<WorkerInfo> infos;
  for (const auto& worker : workers) infos.push_back(to_info(worker));
  return infos;
}

View to_view(const agent::View& view) {
  return {view.version, to_infos(view.workers), to_infos(view.joined), to_infos(view.left),
          to_infos(view.failed)};
}

void check_options(const SessionOptions& options) {
  if (options.threads < 1) {
    fail(ErrorKind::kInvalidArgument, "rpc: threads must be >= 1, got ", options.threads);
  }
  checked("start_timeout", options.start_timeout);
  checked("timeout", options.timeout);
}

agent::AgentOptions agent_options(const SessionOptions& options, int rank) {
  agent::AgentOptions made;
  made.call_timeout = detail::within_clock(options.timeout);
  made.threads = options.threads;
  made.most_calls = options.most_calls;
  made.most_bytes = options.most_bytes;
  made.when_full =
      options.when_full == WhenFull::kWait ? agent::WhenFull::kWait : agent::WhenFull::kThrow;
  made.handlers = detail::exported_handlers();
  made.enter_handler = &detail::clean_thread_state;
  made.rank = static_cast<agent::WorkerId>(rank);
  made.name = options.name.empty() ? concat("worker", rank) : options.name;
  return made;
}

}  // namespace

namespace detail {

SessionImpl::SessionImpl(const SessionOptions& options, agent::AgentOptions made)
    : operators_(options.operators.begin(), options.operators.end()) {
  warm_vector_math();  // calls are served by many threads
  made.user = this;
  agent_ = std::make_unique<agent::Agent>(made);
  recordings_ = make_recordings(*this);
  refs_ = std::make_unique<rref::Refs>(*agent_);
  agent_->on_admitted([this](agent::WorkerId worker) {
    if (worker == agent_->self().id) membership_->begin();
    refs_->met(worker);
  });
  membership_ = agent::Membership::make(*agent_);
}

SessionImpl::~SessionImpl() {
  if (!agent_) return;
  agent_->abort();
  if (refs_) refs_->close();
  agent_.reset();
}

std::shared_ptr<SessionImpl> SessionImpl::make(const SessionOptions& options) {
  check_options(options);
  const auto deadline = Deadline::after(options.start_timeout);
  const Place place = find_place(options, deadline);
  std::shared_ptr<SessionImpl> session(new SessionImpl(options, agent_options(options, place.rank)),
                                       &SessionImpl::destroy);
  // Others call as soon as they have met it: their calls must find it (weak_of), and do from here.
  if (options.members == Members::kComeAndGo) {
    session->membership_->join({place.store, place.served_here}, deadline);
  } else {
    session->agent_->meet(*place.store, place.size, deadline);
  }
  return session;
}

std::shared_ptr<SessionImpl> SessionImpl::make_apart(const SessionOptions& options,
                                                     const Choose& choose) {
  check_options(options);
  auto made = agent_options(options, options.rank.value_or(0));
  choose(made);
  return {new SessionImpl(options, std::move(made)), &SessionImpl::destroy};
}

void SessionImpl::destroy(SessionImpl* session) noexcept {
  if (!session->home_.is_here()) return;  // a forked child leaves its copy alone
  if (!session->agent_->in_own_thread()) {
    delete session;
    return;
  }
  // It waits for its threads, of which this is one.
  try {
    start_thread([session] { delete session; }).detach();
  } catch (const std::exception& error) {
    log_error("rpc: a session could not be ended: ", error.what());
    session->agent_->abort();
  }
}

std::weak_ptr<SessionImpl> SessionImpl::weak_of(const agent::Request& request) {
  return static_cast<SessionImpl*>(request.agent().user())->weak_from_this();
}

std::shared_ptr<SessionImpl> SessionImpl::of(const agent::Request& request) {
  auto session = weak_of(request).lock();
  if (!session) fail(ErrorKind::kCancelled, "rpc: the session is about to end");
  return session;
}

bool SessionImpl::allows(const std::string& op) const { return operators_.contains(op); }

std::uint32_t find_worker(SessionImpl& session, const To& to) {
  agent::Agent& agent = session.agent();
  if (session.membership().is_dynamic()) [[unlikely]] {
    agent.require_home();
    // It may have come a moment ago, or again.
    const agent::Worker* const found = to.rank() ? nullptr : agent.find_worker(to.name());
    const bool known = to.rank() ? *to.rank() < static_cast<std::int64_t>(agent.workers().size())
                                 : found && !agent.is_lost(found->id);
    if (!known) session.membership().refresh();
  }
  return to.rank() ? agent.worker(*to.rank()).id : agent.worker(to.name()).id;
}

}  // namespace detail

Session::Session(const SessionOptions& options) : impl_(detail::SessionImpl::make(options)) {}

Target Session::to(const To& worker, const CallOptions& options) const {
  check_timeout(options.timeout);
  return {*this, detail::find_worker(*impl_, worker), options};
}

WorkerInfo Session::worker_info() const { return to_info(impl_->agent().self()); }

WorkerInfo Session::worker_info(const To& worker) const {
  return to_info(
      impl_->agent().worker(static_cast<std::int64_t>(detail::find_worker(*impl_, worker))));
}

std::vector<WorkerInfo> Session::workers() const {
  if (impl_->membership().is_dynamic()) return view().workers;
  return to_infos(impl_->agent().workers());
}

int Session::size() const { return static_cast<int>(workers().size()); }

namespace {

std::vector<agent::WorkerId> find_all(detail::SessionImpl& session,
                                      const std::vector<std::string>& names) {
  std::vector<agent::WorkerId> ids;
  session.agent().require_home();
  if (names.empty()) {
    for (const auto& worker : session.membership().is_dynamic()
                                  ? session.membership().view().workers
                                  : session.agent().workers()) {
      ids.push_back(worker.id);
    }
  }
  for (const auto& name : names) ids.push_back(detail::find_worker(session, name));
  // The same set, whatever order it is named in.
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

std::map<std::string, std::string> Session::gather_bytes(const std::string& mine,
                                                         const std::vector<std::string>& names,
                                                         const Timeout& limit) const {
  const auto ids = find_all(*impl_, names);
  auto bytes = impl_->agent().all_gather(mine, ids, deadline_of(limit, timeout()));
  std::map<std::string, std::string> all;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    all.emplace(impl_->agent().worker(static_cast<std::int64_t>(ids[i])).name, std::move(bytes[i]));
  }
  return all;
}

void Session::barrier(const std::vector<std::string>& names, const Timeout& limit) const {
  impl_->agent().barrier(find_all(*impl_, names), deadline_of(limit, timeout()));
}

void Session::shutdown(const ShutdownOptions& options) const {
  impl_->agent().require_home();
  if (impl_->agent().is_shut_down()) return;
  const Deadline deadline = deadline_of(options.timeout, Store::kDefaultTimeout);
  if (options.graceful) {
    impl_->membership().check_leave();
    impl_->agent().shutdown(deadline);
    impl_->membership().wait_for_callbacks(deadline);
    impl_->membership().leave();
    return;
  }
  const auto leaks = options.ignore_leaks ? std::vector<std::string>() : impl_->refs().leaks();
  impl_->agent().abort();
  impl_->membership().wait_for_callbacks(deadline);
  impl_->membership().leave();
  if (leaks.empty()) return;
  std::string text;
  for (std::size_t i = 0; i < leaks.size() && i < 8; ++i) {
    text += concat(i == 0 ? "" : "; ", leaks[i]);
  }
  if (leaks.size() > 8) text += concat("; ", leaks.size() - 8, " more");
  fail(ErrorKind::kInvalidArgument, "Leaking RRef: the session of ", impl_->agent().self().name,
       " has ended while others refer to its values: ", text);
}

WorkerInfo Session::wait_for(const std::string& name, const Timeout& limit) const {
  impl_->agent().require_home();
  if (!impl_->membership().is_dynamic()) return worker_info(name);
  return to_info(impl_->membership().wait_for(name, deadline_of(limit, timeout())));
}

View Session::view() const {
  impl_->agent().require_home();
  return to_view(impl_->membership().view());
}

View Session::on_change(std::function<void(const View&)> callback) const {
  impl_->agent().require_home();
  return to_view(impl_->membership().on_change(
      [callback = std::move(callback)](const agent::View& view) { callback(to_view(view)); }));
}

void Session::on_lost(const To& worker,
                      std::function<void(const WorkerInfo&, const Error&)> callback) const {
  impl_->agent().require_home();
  impl_->membership().on_lost(
      detail::find_worker(*impl_, worker),
      [callback = std::move(callback)](const agent::Worker& who, const Error& error) {
        callback(to_info(who), error);
      });
}

RRefInfo Session::rref_info() const {
  const auto info = impl_->refs().debug_info();
  return {info.num_owner_rrefs, info.num_pending_users, info.num_pending_futures, info.num_forks};
}

std::chrono::milliseconds Session::timeout() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(impl_->agent().call_timeout());
}

void Session::set_timeout(std::chrono::milliseconds timeout) const {
  impl_->agent().set_call_timeout(detail::within_clock(checked("timeout", timeout)));
}

Stats Session::stats() const {
  const auto found = impl_->agent().stats();
  Stats stats;
  stats.threads = found.executor.size;
  stats.running = found.executor.running;
  stats.waiting = found.executor.waiting;
  stats.queued = found.executor.queued;
  stats.inline_runs = found.inline_runs;
  stats.takeovers = found.takeovers;
  stats.outstanding = found.outstanding;
  stats.requests = found.requests;
  for (const auto& each : found.functions) {
    stats.functions.push_back({.worker = each.worker,
                               .function = each.function,
                               .calls = each.calls,
                               .errors = each.errors,
                               .bytes_sent = each.bytes_sent,
                               .bytes_received = each.bytes_received,
                               .latency = {each.latency.counts},
                               .served = each.served,
                               .failed = each.failed,
                               .served_bytes_received = each.served_bytes_received,
                               .served_bytes_sent = each.served_bytes_sent,
                               .run_time = {each.run_time.counts}});
  }
  return stats;
}

std::chrono::nanoseconds Times::quantile(double share) const {
  agent::Histogram all;
  static_assert(std::tuple_size_v<decltype(counts)> == agent::Histogram::kBuckets);
  all.counts = counts;
  return all.quantile(share);
}

struct CurrentCall::State {
  agent::RequestRef request;
  std::weak_ptr<detail::SessionImpl> session;
  WorkerInfo caller;
  std::string function;
};

// Whoever keeps it may outlive the agent: what belongs to that is copied.
CurrentCall current() {
  agent::Request* const request = agent::Request::current();
  if (!request) {
    fail(ErrorKind::kInvalidArgument, "rpc::current(): no call's handler runs on this thread");
  }
  return CurrentCall(std::make_shared<CurrentCall::State>(
      CurrentCall::State{agent::RequestRef(request), detail::SessionImpl::weak_of(*request),
                         to_info(request->caller()), std::string(request->function_name())}));
}

Session CurrentCall::session() const {
  auto session = state_->session.lock();
  if (!session) fail(ErrorKind::kCancelled, "rpc: the session of this call has ended");
  return Session(std::move(session));
}
const WorkerInfo& CurrentCall::caller() const { return state_->caller; }
const std::string& CurrentCall::function() const { return state_->function; }
Deadline CurrentCall::deadline() const { return state_->request->deadline(); }
bool CurrentCall::cancelled() const { return state_->request->cancelled() || deadline().expired(); }

}  // namespace convoy::rpc
