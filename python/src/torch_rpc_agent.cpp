// torch.distributed.rpc over Convoy's sessions.
#include "torch_rpc_agent.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "convoy/c10d_store.h"
#include "convoy/error.h"
#include "torch_operator.h"
#include "torch_rpc.h"

namespace convoy::python {
namespace {

namespace torch_rpc = torch::distributed::rpc;
using torch_rpc::MessageType;

// Those that serve a session, by it.
struct Agents {
  std::mutex mutex;
  std::map<const rpc::detail::SessionImpl*, std::weak_ptr<TorchRpcAgent>> by_session;
};
// Never destroyed: sessions may end after main.
Agents& agents() {
  static auto* const all = new Agents;
  return *all;
}

std::chrono::milliseconds to_milliseconds(double seconds) {
  // A time that is given is never "none".
  constexpr double kMost = 1e12;
  return std::chrono::milliseconds(
      static_cast<std::int64_t>(std::ceil(std::min(seconds * 1000, kMost))));
}

TorchReply reply_of(const TorchRpcAgent::Message& message) {
  return {static_cast<std::int32_t>(message.type()), message.payload(), message.tensors()};
}

}  // namespace

void clean_thread() {
  static const at::ThreadLocalState* const clean = [] {
    const at::ThreadLocalState* made = nullptr;
    std::thread([&] { made = new at::ThreadLocalState; }).join();
    return made;
  }();
  at::ThreadLocalState::setThreadLocalState(*clean);
}

std::shared_ptr<TorchRpcAgent> TorchRpcAgent::find(const rpc::Session& session) {
  const std::lock_guard lock(agents().mutex);
  const auto found = agents().by_session.find(session.impl().get());
  return found == agents().by_session.end() ? nullptr : found->second.lock();
}

// What every message is: called on the worker that it goes to. Sessions that are no agent's refuse
// it, since what torch's layers make of a message, Python objects above all, is only for peers that
// are trusted.
rpc::Future<TorchReply> torch_rpc_message(std::int32_t type, std::int64_t id,
                                          std::vector<char> payload,
                                          std::vector<at::Tensor> tensors) {
  const auto agent = TorchRpcAgent::find(rpc::current().session());
  if (!agent) {
    throw Error(ErrorKind::kInvalidArgument,
                "this worker does not serve torch.distributed.rpc: its session is another one");
  }
  auto message = c10::make_intrusive<TorchRpcAgent::Message>(std::move(payload), std::move(tensors),
                                                             static_cast<MessageType>(type), id);
  if (!message->isRequest()) {
    throw Error(ErrorKind::kInvalidArgument, "a message of torch.distributed.rpc is no request");
  }
  return agent->serve(std::move(message));
}
CONVOY_RPC(torch_rpc_message);

std::shared_ptr<TorchRpcAgent> TorchRpcAgent::make(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const Options& options) {
  // Bad names and numbers are torch's own errors.
  const WorkerInfo checked(options.name, static_cast<std::int64_t>(options.rank));
  static_cast<void>(checked);
  rpc::SessionOptions made;
  made.name = options.name;
  made.rank = options.rank;
  made.size = options.size;
  made.store = from_c10d(store);
  made.timeout = to_milliseconds(options.timeout);
  made.start_timeout = options.timeout == 0 ? Store::kDefaultTimeout
                                            : std::max<std::chrono::milliseconds>(
                                                  made.timeout, std::chrono::seconds(30));
  // They only hand over to the agent's own threads.
  made.threads = 2;
  // A forked child leaves its copy alone: torch's part of it would wait for a thread.
  std::shared_ptr<TorchRpcAgent> agent(new TorchRpcAgent(rpc::Session(made), options),
                                       [](TorchRpcAgent* ended) {
                                         if (ended->is_at_home()) delete ended;
                                       });
  {
    const std::lock_guard lock(agents().mutex);
    agents().by_session.emplace(agent->session_.impl().get(), agent);
  }
  // Nobody calls before everybody can be called.
  agent->session_.barrier({}, made.start_timeout);
  return agent;
}

TorchRpcAgent::TorchRpcAgent(rpc::Session session, const Options& options)
    : RpcAgent(WorkerInfo(options.name, static_cast<std::int64_t>(options.rank)),
               std::make_unique<torch_rpc::RequestCallbackImpl>(),
               to_milliseconds(options.timeout)),
      session_(std::move(session)),
      handlers_(WorkPool::make(options.threads)),
      // Most end in microseconds with the interpreter's lock: several at once only wait for it.
      completions_(WorkPool::make(1, std::chrono::milliseconds(2))),
      backward_(std::make_shared<TorchBackward>(session_, handlers_)) {
  for (const auto& worker : session_.workers()) {
    by_name_.emplace(worker.name, workers_.size());
    workers_.emplace_back(worker.name, static_cast<std::int64_t>(worker.rank));
  }
  completions_->start();
}

TorchRpcAgent::~TorchRpcAgent() {
  try {
    // Nobody has shut it down. Handlers may need the interpreter's lock to end.
    if (rpcAgentRunning_.load()) {
      if (PyGILState_Check()) {
        const pybind11::gil_scoped_release unlocked;
        shutdown();
      } else {
        shutdown();
      }
    }
    const std::lock_guard lock(agents().mutex);
    agents().by_session.erase(session_.impl().get());
  } catch (const std::exception& error) {
    TORCH_WARN("torch.distributed.rpc: the agent of ", workerInfo_.name_,
               " could not be shut down: ", error.what());
  }
}

void TorchRpcAgent::startImpl() { handlers_->start(); }

void TorchRpcAgent::shutdownImpl() {
  backward_->abort_all("RPC was shut down");
  session_.shutdown({.graceful = false, .ignore_leaks = true});
  // Handlers that are in the middle of something may take some time; those that wait for calls have
  // got an error.
  const auto deadline = Deadline::after(std::chrono::seconds(10));
  handlers_->stop(WorkPool::Queued::kDrop, deadline);
  completions_->stop(WorkPool::Queued::kRun, deadline);
}

const TorchRpcAgent::WorkerInfo& TorchRpcAgent::getWorkerInfo(const std::string& name) const {
  const auto found = by_name_.find(name);
  TORCH_CHECK(found != by_name_.end(), "name:", name, ",rank:", workerInfo_.id_,
              " could not find destination");
  return workers_[found->second];
}

const TorchRpcAgent::WorkerInfo& TorchRpcAgent::getWorkerInfo(torch_rpc::worker_id_t id) const {
  TORCH_CHECK(id >= 0 && static_cast<std::size_t>(id) < workers_.size(),
              "could not find destination id:", id, ", there are ", workers_.size(), " workers");
  return workers_[static_cast<std::size_t>(id)];
}

void TorchRpcAgent::change(const std::function<void()>& how) {
  {
    const std::lock_guard lock(mutex_);
    how();
  }
  changed_.notify_all();
}

// --- Calls ------------------------------------------------------------------------------------

std::chrono::milliseconds TorchRpcAgent::timeout_of(float seconds) const {
  return seconds == torch_rpc::kUnsetRpcTimeout ? getRpcTimeout()
                                                : to_milliseconds(static_cast<double>(seconds));
}

// A call of ours.
struct TorchRpcAgent::Sent {
  c10::intrusive_ptr<JitFuture> future;
  std::int64_t id = 0;
  std::chrono::milliseconds timeout{};
  WorkPool::Waiting waiting;
};

namespace {

thread_local bool next_waits_at_once = false;

}  // namespace

void TorchRpcAgent::set_waits_at_once(bool waits) { next_waits_at_once = waits; }

// Torch says that send() must not block; whoever calls it for these blocks next. A thread that has
// the interpreter's lock never waits here.
bool TorchRpcAgent::waits_at_once(const Message& message) {
  const bool told = std::exchange(next_waits_at_once, false);
  const bool fetches = message.type() == MessageType::SCRIPT_RREF_FETCH_CALL ||
                       message.type() == MessageType::PYTHON_RREF_FETCH_CALL;
  return (told || fetches) && PyGILState_Check() == 0;
}

void TorchRpcAgent::require_home() const {
  if (is_at_home()) return;
  throw Error(ErrorKind::kUnsupported,
              "torch.distributed.rpc: this is a forked child of the process that called init_rpc");
}

c10::intrusive_ptr<TorchRpcAgent::JitFuture> TorchRpcAgent::send(
    const WorkerInfo& to, c10::intrusive_ptr<Message> message, float seconds,
    const torch_rpc::DeviceMap& device_map) {
  TORCH_CHECK(message->isRequest(), "an agent sends requests only");
  TORCH_CHECK(rpcAgentRunning_.load(), "Node ", workerInfo_.id_,
              " tried to send() a message of type ", message->type(),
              " but RPC is no longer running on this node.");
  TORCH_CHECK(device_map.empty(), "Convoy's RPC carries CPU tensors: there are no device maps");
  require_home();
  const bool waits = waits_at_once(*message);
  Sent sent;
  sent.future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  sent.timeout = timeout_of(seconds);
  sent.id = message->id();
  if (faults_ && faults_->fails(*message)) {
    sent.future->setError(std::make_exception_ptr(std::runtime_error(torch_rpc::makeRPCError(
        "the message fails on purpose", torch_rpc::RPCErrorType::INTENTIONAL_FAILURE))));
    return sent.future;
  }
  change([&] {
    ++activity_.client;
    ++activity_.open;
    ++activity_.total;
  });
  if (waits) {
    send_and_wait(sent, to, *message);
  } else {
    send_later(sent, to, *message);
  }
  return sent.future;
}

// Torch's layers tell profilers of the call; the session's own event would be one more. Torch's
// rule: arguments stay as they are until the call has ended.
void TorchRpcAgent::send_and_wait(const Sent& sent, const WorkerInfo& to, const Message& message) {
  try {
    TorchReply reply = [&] {
      const at::DisableRecordFunctionGuard quiet;
      return session_
          .to(static_cast<int>(to.id_), rpc::CallOptions{.timeout = sent.timeout, .stays = true})
          .rpc_sync<torch_rpc_message>(static_cast<std::int32_t>(message.type()), message.id(),
                                       message.payload(), message.tensors());
    }();
    end(sent, std::move(reply));
  } catch (...) {
    end(sent, std::current_exception());
  }
}

void TorchRpcAgent::send_later(const Sent& sent, const WorkerInfo& to, const Message& message) {
  const auto ended = [self = shared_from_this(), sent](const rpc::Future<TorchReply>& answer) {
    if (self->completions_->submit([self, sent, answer] { self->complete(sent, answer); })) return;
    // The agent has been shut down meanwhile; somebody may wait for the future all the same.
    const at::ThreadLocalState own;
    self->complete(sent, answer);
    at::ThreadLocalState::setThreadLocalState(own);
  };
  try {
    const at::DisableRecordFunctionGuard quiet;
    static_cast<void>(
        session_
            .to(static_cast<int>(to.id_), rpc::CallOptions{.timeout = sent.timeout, .stays = true})
            .rpc_async<torch_rpc_message>(static_cast<std::int32_t>(message.type()), message.id(),
                                          message.payload(), message.tensors())
            .then(ended));
  } catch (...) {
    rpc::Promise<TorchReply> promise;
    promise.set_error(std::current_exception());
    ended(promise.future());
  }
}

namespace {

// As torch's layers expect it.
std::string describe(const std::exception_ptr& error, std::chrono::milliseconds timeout) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& found) {
    if (found.kind() != ErrorKind::kTimeout) return found.what();
    std::string text = torch_rpc::kRpcTimeoutErrorStr;
    text.replace(text.find("{}"), 2, std::to_string(timeout.count()));
    return torch_rpc::makeRPCError(text, torch_rpc::RPCErrorType::TIMEOUT);
  } catch (const std::exception& found) {
    return found.what();
  }
}

}  // namespace

// On a thread of completions_, while there are some: callbacks of the future may take their time.
void TorchRpcAgent::complete(const Sent& sent, const rpc::Future<TorchReply>& answer) {
  clean_thread();
  if (const auto error = answer.error()) {
    end(sent, error);
  } else {
    end(sent, TorchReply(answer.result()));
  }
}

void TorchRpcAgent::end(const Sent& sent, TorchReply&& reply) {
  sent.waiting.ended();
  change([&] { --activity_.client; });
  auto& [type, payload, tensors] = reply;
  try {
    if (static_cast<MessageType>(type) == MessageType::EXCEPTION) {
      sent.future->setError(
          std::make_exception_ptr(std::runtime_error(std::string(payload.begin(), payload.end()))));
    } else {
      auto message = c10::make_intrusive<Message>(std::move(payload), std::move(tensors),
                                                  static_cast<MessageType>(type), sent.id);
      auto storages = message->getStorages();
      sent.future->markCompleted(c10::IValue(std::move(message)), std::move(storages));
    }
  } catch (const std::exception& error) {  // of a callback
    TORCH_WARN("torch.distributed.rpc: a callback threw ", error.what());
  }
  change([&] { --activity_.open; });
}

void TorchRpcAgent::end(const Sent& sent, const std::exception_ptr& error) {
  sent.waiting.ended();
  change([&] { --activity_.client; });
  try {
    sent.future->setError(
        std::make_exception_ptr(std::runtime_error(describe(error, sent.timeout))));
  } catch (const std::exception& thrown) {  // by a callback
    TORCH_WARN("torch.distributed.rpc: a callback threw ", thrown.what());
  }
  change([&] { --activity_.open; });
}

// --- The other side -----------------------------------------------------------------------------

rpc::Future<TorchReply> TorchRpcAgent::serve(c10::intrusive_ptr<Message> request) {
  if (!faults_ && rpcAgentRunning_.load()) {
    if (const auto answer = answer_small_operator(*this, *request)) {
      change([&] { ++activity_.total; });
      rpc::Promise<TorchReply> answered;
      answered.set_value(reply_of(*answer));
      return answered.future();
    }
  }
  auto promise = std::make_shared<rpc::Promise<TorchReply>>();
  auto future = promise->future();
  change([&] {
    ++activity_.server;
    ++activity_.total;
  });
  static_cast<void>(future.then([self = shared_from_this()](const rpc::Future<TorchReply>&) {
    self->change([&] { --self->activity_.server; });
  }));
  handlers_->submit([self = shared_from_this(), request = std::move(request),
                     promise = std::move(promise)] { self->run(request, promise); });
  return future;
}

void TorchRpcAgent::run(const c10::intrusive_ptr<Message>& request,
                        const std::shared_ptr<rpc::Promise<TorchReply>>& promise) {
  clean_thread();
  if (faults_) std::this_thread::sleep_for(faults_->delay_of(*request));
  const std::int64_t id = request->id();
  c10::intrusive_ptr<JitFuture> made;
  try {
    made = (*cb_)(*request, {});
  } catch (const std::exception& error) {
    promise->set_value(reply_of(*torch_rpc::createExceptionResponse(error, id)));
    return;
  }
  const bool later = !made->completed();
  if (later) change([&] { ++activity_.server_async; });
  made->addCallback([self = shared_from_this(), promise, id, later](JitFuture& done) {
    if (later) self->change([&] { --self->activity_.server_async; });
    if (done.hasError()) {
      promise->set_value(
          reply_of(*torch_rpc::createExceptionResponse(done.tryRetrieveErrorMessage(), id)));
    } else {
      promise->set_value(reply_of(*done.value().toCustomClass<Message>()));
    }
  });
}

// --- All together -------------------------------------------------------------------------------

// Until no worker has calls under way: all of them call it. Calls may still be on their way between
// two workers that have none, so all must have been idle twice, with nothing in between.
void TorchRpcAgent::settle(const Deadline& deadline) {
  require_home();
  std::uint64_t before = UINT64_MAX;
  while (true) {
    std::uint64_t mine = 0;
    {
      std::unique_lock lock(mutex_);
      const auto idle = [&] { return activity_.open == 0 && activity_.server == 0; };
      if (deadline.is_never()) {
        changed_.wait(lock, idle);
      } else if (!changed_.wait_until(lock, deadline.when(), idle)) {
        throw Error(ErrorKind::kTimeout, "rpc.shutdown: " + std::to_string(activity_.open) +
                                             " calls of " + workerInfo_.name_ + " and " +
                                             std::to_string(activity_.server) +
                                             " that others have made to it have not ended in time");
      }
      mine = activity_.total;
    }
    const auto limit = deadline.is_never() ? std::chrono::milliseconds(std::chrono::hours(24 * 365))
                                           : std::max(std::chrono::ceil<std::chrono::milliseconds>(
                                                          deadline.when() - Deadline::Clock::now()),
                                                      std::chrono::milliseconds(1));
    std::uint64_t all = 0;
    for (const auto& [name, total] : session_.all_gather(mine, {}, limit)) all += total;
    if (all == before) return;
    before = all;
  }
}

void TorchRpcAgent::join(bool shutdown, float timeout) {
  const auto deadline =
      timeout == 0 ? Deadline::never() : Deadline::after(std::chrono::duration<double>(timeout));
  settle(deadline);
  if (!shutdown) return;
  // What is left of the time, and enough of it to say goodbye.
  session_.shutdown({.timeout = std::max(deadline, Deadline::after(std::chrono::seconds(1)))});
}

void TorchRpcAgent::sync() { settle(Deadline::never()); }

std::unordered_map<std::string, std::string> TorchRpcAgent::getMetrics() {
  const auto stats = handlers_->stats();
  const std::lock_guard lock(mutex_);
  std::unordered_map<std::string, std::string> metrics = {
      {"agent.thread_pool_size", std::to_string(stats.size)},
      {"agent.num_idle_threads", std::to_string(stats.idle)},
      {"agent.client_active_calls", std::to_string(activity_.client)},
      {"agent.server_active_calls", std::to_string(activity_.server)},
      {"agent.server_active_async_calls", std::to_string(activity_.server_async)}};
  if (isGILProfilingEnabled()) {
    metrics["agent.gil_average_wait_time_us"] =
        std::to_string(activity_.gil_waits == 0 ? 0.0
                                                : static_cast<double>(activity_.gil_microseconds) /
                                                      static_cast<double>(activity_.gil_waits));
  }
  return metrics;
}

void TorchRpcAgent::addGilWaitTime(std::chrono::microseconds time) {
  const std::lock_guard lock(mutex_);
  ++activity_.gil_waits;
  activity_.gil_microseconds += time.count();
}

namespace {

// Calls end with an error.
void end_torch_rpc() noexcept {
  std::vector<std::shared_ptr<TorchRpcAgent>> alive;
  {
    const std::lock_guard lock(agents().mutex);
    for (const auto& [session, agent] : agents().by_session) {
      if (auto found = agent.lock()) alive.push_back(std::move(found));
    }
  }
  for (const auto& agent : alive) {
    if (!agent->is_at_home()) continue;
    try {
      agent->shutdown();
    } catch (const std::exception& error) {
      TORCH_WARN("torch.distributed.rpc could not be ended: ", error.what());
    }
  }
}

}  // namespace

void bind_torch_rpc(pybind11::module_& module) {
  namespace py = pybind11;
  using Agent = TorchRpcAgent;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Agent, torch_rpc::RpcAgent, std::shared_ptr<Agent>>(module, "TorchRpcAgent")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, std::string name, int rank,
                       int size, double timeout, int threads) {
             return Agent::make(store, {std::move(name), rank, size, timeout, threads});
           }),
           py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("threads"), unlocked)
      .def("join", &Agent::join, py::arg("shutdown") = false, py::arg("timeout") = 0, unlocked)
      .def("sync", &Agent::sync, unlocked)
      .def(
          "shutdown",
          [](Agent& self) {
            if (self.is_at_home()) self.shutdown();
          },
          unlocked)
      .def("get_worker_info",
           [](const Agent& self) {
             return static_cast<const torch_rpc::RpcAgent&>(self).getWorkerInfo();
           })
      .def("get_worker_info",
           [](const Agent& self, const std::string& name) { return self.getWorkerInfo(name); })
      .def("get_worker_info",
           [](const Agent& self, torch_rpc::worker_id_t id) { return self.getWorkerInfo(id); })
      .def("get_worker_infos", &Agent::getWorkerInfos)
      .def(
          "backward",
          [](const Agent& self, std::int64_t context, const std::vector<at::Tensor>& roots,
             bool retain_graph, double timeout) {
            self.backward_passes().backward(context, roots, retain_graph, to_milliseconds(timeout));
          },
          py::arg("context_id"), py::arg("roots"), py::arg("retain_graph"), py::arg("timeout"),
          unlocked)
      .def("backward_passes", [](const Agent& self) { return self.backward_passes().under_way(); })
      .def(
          "set_faults",
          [](Agent& self, const std::vector<std::string>& failing, int times,
             const std::map<std::string, double>& late) {
            self.set_faults(std::make_unique<TorchRpcFaults>(failing, times, late));
          },
          py::arg("failing"), py::arg("times"), py::arg("late"));
  module.def("torch_rpc_waits", &Agent::set_waits_at_once, py::arg("waits"));
  module.def("end_torch_rpc", &end_torch_rpc, unlocked);
}

}  // namespace convoy::python
