// convoy.rpc: sessions for Python. Values are made and read with the interpreter's lock; whatever
// waits does so without it.
#include "rpc_session.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>

#include "convoy/autograd.h"
#include "convoy/distributed_optimizer.h"
#include "convoy/error.h"
#include "rpc_values.h"
#include "torch_rules.h"
#include "work_pool.h"

namespace convoy::python {
namespace {

namespace py = pybind11;
namespace dynamic = rpc::dynamic;
using Limit = std::optional<double>;

struct Sessions {
  std::mutex mutex;
  std::map<const rpc::detail::SessionImpl*, std::weak_ptr<PythonSession>> by_session;
};
// Never destroyed: handlers may run until the end of the process.
Sessions& sessions() {
  static auto* const all = new Sessions;
  return *all;
}

// Callbacks of futures: Python code, which may take its time.
std::shared_ptr<WorkPool> callbacks() {
  static auto* const mutex = new std::mutex;
  static auto* const pools = new std::vector<std::shared_ptr<WorkPool>>;
  const std::lock_guard lock(*mutex);
  // A forked child has none of the threads, and may have sessions of its own.
  if (pools->empty() || !pools->back()->is_at_home()) {
    pools->push_back(WorkPool::make(16));
    pools->back()->start();
  }
  return pools->back();
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  if (!(seconds >= 0)) {
    throw Error(ErrorKind::kInvalidArgument,
                "rpc: timeout must be >= 0 s, got " + std::to_string(seconds));
  }
  constexpr double kMost = 1e12;
  return std::chrono::milliseconds(
      static_cast<std::int64_t>(std::ceil(std::min(seconds * 1000, kMost))));
}

rpc::CallOptions options_of(Limit seconds) {
  rpc::CallOptions options;
  if (seconds) options.timeout = milliseconds_of(*seconds);
  return options;
}

std::uint32_t worker_of(const PythonSession& session, const py::object& to) {
  const auto find = [&](const auto& which) {
    rpc::detail::SessionImpl& impl = *session.session().impl();
    if (session.workers() == PythonSession::Workers::kStay) {
      return rpc::detail::find_worker(impl, which);
    }
    const py::gil_scoped_release unlocked;
    return rpc::detail::find_worker(impl, which);
  };
  if (py::isinstance<py::str>(to)) return find(to.cast<std::string>());
  return find(to.cast<std::int64_t>());
}

}  // namespace

std::shared_ptr<PythonSession> PythonSession::of(const rpc::Session& session, Workers workers) {
  const std::lock_guard lock(sessions().mutex);
  auto& kept = sessions().by_session[session.impl().get()];
  auto found = kept.lock();
  if (!found) {
    found = std::make_shared<PythonSession>(session, workers);
    kept = found;
  }
  return found;
}

PythonSession::PythonSession(rpc::Session session, Workers workers)
    : home_(::getpid()), workers_(workers), session_(std::move(session)) {}

bool PythonSession::is_at_home() const { return ::getpid() == home_; }

std::shared_ptr<const PythonSession::Table> PythonSession::ask(std::uint32_t worker) {
  Table table;
  for (auto& function : dynamic::functions_of(session_, worker)) {
    auto name = function.name;
    table.emplace(std::move(name), std::move(function));
  }
  auto made = std::make_shared<const Table>(std::move(table));
  const std::lock_guard lock(mutex_);
  tables_[worker] = made;
  return made;
}

std::vector<dynamic::Function> PythonSession::functions(std::uint32_t worker) {
  std::vector<dynamic::Function> found;
  for (const auto& [name, function] : *ask(worker)) found.push_back(function);
  return found;
}

std::vector<dynamic::Callee> PythonSession::find_known(std::uint32_t worker,
                                                       const std::string& name) {
  std::shared_ptr<const Table> table;
  {
    const std::lock_guard lock(mutex_);
    const auto known = tables_.find(worker);
    if (known == tables_.end()) return {};
    table = known->second;
  }
  std::vector<dynamic::Callee> found;
  const auto [first, last] = table->equal_range(name);
  for (auto each = first; each != last; ++each) found.emplace_back(each->second);
  return found;
}

std::vector<dynamic::Callee> PythonSession::find(std::uint32_t worker, const std::string& name) {
  const auto table = ask(worker);
  auto found = find_known(worker, name);
  if (!found.empty()) return found;
  std::string text =
      "rpc: " + session_.worker_info(worker).name + " has no function \"" + name + "\"; it has:";
  std::size_t listed = 0;
  for (const auto& [each, function] : *table) {
    if (each.starts_with("convoy::")) continue;
    if (++listed > 20) break;
    text += " " + each;
  }
  throw Error(ErrorKind::kInvalidArgument, text + (listed > 20 ? " ..." : ""));
}

namespace {

// --- Calls -------------------------------------------------------------------------------------

struct Prepared {
  dynamic::Callee callee;
  std::vector<dynamic::Value> arguments;
};

// The function of this name that takes these arguments.
Prepared prepare(const std::vector<dynamic::Callee>& callees, const py::args& arguments,
                 bool on_reference) {
  std::string why;
  for (const dynamic::Callee& callee : callees) {
    const auto& all = callee.signature().parameters;
    const std::size_t skipped = on_reference && !all.empty() ? 1 : 0;
    if (arguments.size() != all.size() - skipped) {
      why += "; it takes " + std::to_string(all.size() - skipped) + " arguments (" +
             callee.signature().text() + "), not " + std::to_string(arguments.size());
      continue;
    }
    Prepared prepared{callee, {}};
    std::size_t i = 0;
    try {
      for (; i < arguments.size(); ++i) {
        prepared.arguments.push_back(from_python(all[i + skipped], arguments[i]));
      }
      return prepared;
    } catch (const Error& error) {
      why += "; argument " + std::to_string(i + 1) + ": " + error.what();
    }
  }
  throw Error(ErrorKind::kInvalidArgument,
              "rpc: the arguments do not fit " + callees.at(0).name() + why);
}

// A call that is ready to be made.
struct Ready {
  std::shared_ptr<PythonSession> session;
  dynamic::Target target;
  Prepared what;
};

std::vector<dynamic::Callee> callees_of(PythonSession& session, std::uint32_t worker,
                                        const std::string& name) {
  auto known = session.find_known(worker, name);
  if (!known.empty()) return known;
  const py::gil_scoped_release unlocked;
  return session.find(worker, name);
}

Ready ready(const std::shared_ptr<PythonSession>& session, const py::object& to,
            const std::string& name, const py::args& arguments) {
  const std::uint32_t worker = worker_of(*session, to);
  const auto callees = callees_of(*session, worker, name);
  return {session, {worker, nullptr}, prepare(callees, arguments, /*on_reference=*/false)};
}

Ready ready_on(const PythonReference& reference, const std::string& name,
               const py::args& arguments) {
  const auto owner = static_cast<std::uint32_t>(rpc::detail::owner_of(reference.handle).rank);
  const auto callees = callees_of(*reference.session, owner, name);
  return {
      reference.session, {0, reference.handle}, prepare(callees, arguments, /*on_reference=*/true)};
}

py::object run_sync(const Ready& call, Limit seconds) {
  const auto options = options_of(seconds);
  const dynamic::Value value = [&] {
    const py::gil_scoped_release unlocked;
    return dynamic::call_sync(call.session->session(), call.target, call.what.callee,
                              call.what.arguments, options);
  }();
  return to_python(call.what.callee.signature().result, value, call.session);
}

// --- Futures -----------------------------------------------------------------------------------

struct PythonFuture {
  std::shared_ptr<PythonSession> session;
  std::shared_ptr<dynamic::Result> result;

  // Throws its error.
  py::object value() const {
    result->check();
    return to_python(result->type(), result->value(), session);
  }
  py::object wait(Limit seconds) const {
    {
      const py::gil_scoped_release unlocked;
      result->wait(seconds ? Deadline::after(milliseconds_of(*seconds)) : Deadline::never());
    }
    return value();
  }
};

// Calls function(future), on a thread of its own.
void add_callback(const py::object& future, const py::object& function) {
  const auto kept = held(py::make_tuple(function, future));
  const auto result = future.cast<const PythonFuture&>().result;
  const py::gil_scoped_release unlocked;
  rpc::detail::when_done(*result, [kept] {
    callbacks()->submit([kept] {
      const py::gil_scoped_acquire gil;
      try {
        const auto both = py::reinterpret_borrow<py::tuple>(*kept);
        both[0](both[1]);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a callback of a future of convoy.rpc");
      }
    });
  });
}

PythonFuture fetch(const PythonReference& reference, Limit seconds) {
  const auto options = options_of(seconds);
  if (reference.type.kind == dynamic::ValueType::Kind::kObject) {
    throw Error(ErrorKind::kUnsupported,
                reference.type.text() + " cannot be passed: call functions on the reference");
  }
  const py::gil_scoped_release unlocked;
  return {reference.session, dynamic::fetch(reference.handle, reference.type, options)};
}

PythonFuture run_async(const Ready& call, Limit seconds) {
  const auto options = options_of(seconds);
  const py::gil_scoped_release unlocked;
  return {call.session, dynamic::call_async(call.session->session(), call.target, call.what.callee,
                                            call.what.arguments, options)};
}

PythonReference run_remote(const Ready& call, Limit seconds) {
  const auto options = options_of(seconds);
  const py::gil_scoped_release unlocked;
  return {call.session,
          dynamic::remote(call.session->session(), call.target, call.what.callee,
                          call.what.arguments, options),
          call.what.callee.signature().result};
}

// --- Functions of Python -------------------------------------------------------------------------

// With the lock held, in each of these.
void answer(const dynamic::Served& call, const dynamic::Signature& signature, py::object made) {
  if (call.keeps_result()) {
    auto kept = hold_object(signature.result, std::move(made));
    const py::gil_scoped_release unlocked;
    call.keep(std::move(kept));
    return;
  }
  dynamic::Value value;
  try {
    value = from_python(signature.result, made);
  } catch (const Error& error) {
    throw Error(error.kind(), std::string("its result: ") + error.what());
  }
  made = py::object();
  const py::gil_scoped_release unlocked;
  call.reply(value);
}

// Answers with what `make` throws.
template <class Make>
// NOLINTNEXTLINE(bugprone-exception-escape): fail() throws for lack of memory only
void answer_or_fail(const dynamic::Served& call, Make make) noexcept {
  try {
    try {
      make();
    } catch (py::error_already_set& error) {
      const auto type = py::str(error.type().attr("__name__")).cast<std::string>();
      const std::string text = error.what();
      const py::gil_scoped_release unlocked;
      call.fail(type, text);
    }
  } catch (...) {
    const auto error = std::current_exception();
    const py::gil_scoped_release unlocked;
    call.fail(error);
  }
}

using SignaturePtr = std::shared_ptr<const dynamic::Signature>;

void run_python(const dynamic::Served& call, const SignaturePtr& signature,
                const py::object& function) {
  const auto session = PythonSession::of(rpc::current().session());
  py::list arguments;
  std::size_t first = 0;
  if (call.object()) {
    arguments.append(object_in(*call.object()));
    first = 1;
  }
  auto& values = call.arguments();
  for (std::size_t i = 0; i < values.size(); ++i) {
    arguments.append(to_python(signature->parameters[i + first], values[i], session));
  }
  values.clear();
  py::object made = function(*arguments);
  if (!PyCoro_CheckExact(made.ptr())) return answer(call, *signature, std::move(made));
  // Ends on the thread of convoy.rpc's event loop: get() gives the value, or raises.
  const py::cpp_function end([call, signature](const py::object& get) {
    answer_or_fail(call, [&] { answer(call, *signature, get()); });
  });
  py::module_::import("convoy.rpc").attr("_run_coroutine")(made, end);
}

void serve_python(const std::string& name, const std::string& signature, py::object function) {
  const auto kept = held(std::move(function));
  const auto parsed =
      std::make_shared<const dynamic::Signature>(dynamic::Signature::parse(signature));
  dynamic::serve({name, signature}, [kept, parsed](const dynamic::Served& call) {
    try {
      const PythonRun run;
      const py::gil_scoped_acquire gil;
      answer_or_fail(call, [&] { run_python(call, parsed, *kept); });
    } catch (const Error&) {
      call.fail(std::current_exception());
    }
  });
}

// --- Contexts of distributed autograd ------------------------------------------------------------

class PythonContext {
 public:
  explicit PythonContext(const std::shared_ptr<PythonSession>& session)
      : context_(std::make_unique<autograd::Context>(session->session())) {}

  autograd::ContextId id() const { return get().id(); }
  void backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                bool retain_graph, bool fast, Limit seconds) const {
    autograd::BackwardOptions options;
    options.mode = fast ? autograd::Mode::kFast : autograd::Mode::kSmart;
    options.retain_graph = retain_graph;
    options.gradients = gradients;
    if (seconds) options.timeout = milliseconds_of(*seconds);
    get().backward(roots, options);
  }
  std::vector<autograd::Gradients::Item> gradients() const {
    const auto all = get().gradients();
    return {all.begin(), all.end()};
  }
  std::string dump() const { return get().dump(); }
  void close() { context_.reset(); }
  const autograd::Context& get() const {
    if (!context_) throw Error(ErrorKind::kInvalidArgument, "the context has ended");
    return *context_;
  }

 private:
  std::unique_ptr<autograd::Context> context_;
};

// --- Optimizers ----------------------------------------------------------------------------------

class PythonOptimizer {
 public:
  PythonOptimizer(const std::shared_ptr<PythonSession>& session,
                  const std::vector<PythonReference>& parameters, const std::string& kind,
                  const py::dict& group)
      : optimizer_(make(session, parameters, rule_of(kind, group))) {}

  void step(const PythonContext& context) const { optimizer_.step(context.get()); }
  void set_lr(double lr) const { optimizer_.set_lr(lr); }

 private:
  static DistributedOptimizer make(const std::shared_ptr<PythonSession>& session,
                                   const std::vector<PythonReference>& parameters,
                                   const OptimizerRule& rule) {
    std::vector<RRef<at::Tensor>> references;
    for (const PythonReference& each : parameters) {
      if (each.type.kind != dynamic::ValueType::Kind::kTensor) {
        throw Error(
            ErrorKind::kInvalidArgument,
            "an optimizer's parameters are references to at::Tensor, not to " + each.type.text());
      }
      references.emplace_back(each.handle);
    }
    const py::gil_scoped_release unlocked;
    return {session->session(), std::move(references), rule};
  }

  const DistributedOptimizer optimizer_;
};

// --- Sessions ------------------------------------------------------------------------------------

std::shared_ptr<PythonSession> make_session(const std::string& name, const std::string& method,
                                            std::optional<int> rank, std::optional<int> size,
                                            double timeout, double start_timeout, int threads,
                                            std::vector<std::string> operators, bool come_and_go) {
  rpc::SessionOptions options;
  options.name = name;
  options.method = method;
  options.rank = rank;
  options.size = size;
  options.timeout = milliseconds_of(timeout);
  options.start_timeout = milliseconds_of(start_timeout);
  options.threads = threads;
  options.operators = std::move(operators);
  if (come_and_go) options.members = rpc::Members::kComeAndGo;
  return PythonSession::of(rpc::Session(options), come_and_go ? PythonSession::Workers::kComeAndGo
                                                              : PythonSession::Workers::kStay);
}

py::tuple info_of(const rpc::WorkerInfo& info) { return py::make_tuple(info.name, info.rank); }

void end_sessions() noexcept {
  std::vector<std::shared_ptr<PythonSession>> alive;
  {
    const std::lock_guard lock(sessions().mutex);
    for (const auto& [impl, session] : sessions().by_session) {
      auto found = session.lock();
      if (found && found->is_at_home()) alive.push_back(std::move(found));
    }
  }
  for (const auto& session : alive) {
    try {
      session->session().shutdown({.graceful = false, .ignore_leaks = true});
    } catch (const std::exception&) {
      continue;  // it has ended
    }
  }
  // Functions that run have got errors for the calls that they wait for; some may take their time.
  const auto deadline = Deadline::after(std::chrono::seconds(10));
  PythonRun::end_all(deadline);
  callbacks()->stop(WorkPool::Queued::kDrop, deadline);
}

void raise_remote_error(const rpc::RemoteError& error) {
  const py::object type = py::module_::import("convoy._error").attr("RemoteError");
  const py::object value =
      type(error.what(), std::string(to_string(error.kind())), error.worker(), error.remote_type());
  PyErr_SetObject(type.ptr(), value.ptr());
}

void bind_session(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  using Session = PythonSession;
  py::class_<Session, std::shared_ptr<Session>>(module, "RpcSession")
      .def(py::init(&make_session), py::arg("name"), py::arg("method"), py::arg("rank"),
           py::arg("size"), py::arg("timeout"), py::arg("start_timeout"), py::arg("threads"),
           py::arg("operators"), py::arg("come_and_go"), unlocked)
      .def(
          "rpc_sync",
          [](const std::shared_ptr<Session>& self, const py::object& to, const std::string& name,
             const py::args& arguments,
             Limit timeout) { return run_sync(ready(self, to, name, arguments), timeout); },
          py::arg("to"), py::arg("function"), py::arg("timeout") = py::none())
      .def(
          "rpc_async",
          [](const std::shared_ptr<Session>& self, const py::object& to, const std::string& name,
             const py::args& arguments,
             Limit timeout) { return run_async(ready(self, to, name, arguments), timeout); },
          py::arg("to"), py::arg("function"), py::arg("timeout") = py::none())
      .def(
          "remote",
          [](const std::shared_ptr<Session>& self, const py::object& to, const std::string& name,
             const py::args& arguments,
             Limit timeout) { return run_remote(ready(self, to, name, arguments), timeout); },
          py::arg("to"), py::arg("function"), py::arg("timeout") = py::none())
      .def("rref",
           [](const std::shared_ptr<Session>& self, const std::string& type, py::object value) {
             auto parsed = dynamic::ValueType::parse(type);
             // What it cannot be is said here, not when it is fetched.
             if (parsed.kind != dynamic::ValueType::Kind::kObject) from_python(parsed, value);
             auto kept = hold_object(parsed, std::move(value));
             return PythonReference{self, dynamic::hold(self->session(), std::move(kept), parsed),
                                    parsed};
           })
      .def("functions",
           [](const std::shared_ptr<Session>& self, const py::object& to) {
             const auto worker = worker_of(*self, to);
             std::vector<std::pair<std::string, std::string>> found;
             const py::gil_scoped_release released;
             for (auto& each : self->functions(worker))
               found.emplace_back(each.name, each.signature);
             return found;
           })
      .def("worker_info", [](const Session& self) { return info_of(self.session().worker_info()); })
      .def("find_worker",
           [](const Session& self, const py::object& to) {
             return info_of(self.session().worker_info(worker_of(self, to)));
           })
      .def("workers",
           [](const Session& self) {
             py::list found;
             for (const auto& worker : self.session().workers()) found.append(info_of(worker));
             return found;
           })
      .def(
          "wait_for",
          [](const Session& self, const std::string& name, double timeout) {
            self.session().wait_for(name, milliseconds_of(timeout));
          },
          py::arg("name"), py::arg("timeout") = 0.0, unlocked)
      .def(
          "barrier",
          [](const Session& self, const std::vector<std::string>& names, double timeout) {
            self.session().barrier(names, milliseconds_of(timeout));
          },
          py::arg("names") = std::vector<std::string>(), py::arg("timeout") = 0.0, unlocked)
      .def(
          "shutdown",
          [](const Session& self, bool graceful, double timeout) {
            self.session().shutdown(
                {.graceful = graceful, .ignore_leaks = true, .timeout = milliseconds_of(timeout)});
          },
          py::arg("graceful") = true, py::arg("timeout") = 300.0, unlocked)
      .def("rref_info", [](const Session& self) {
        const auto info = self.session().rref_info();
        using namespace pybind11::literals;
        return py::dict("num_owner_rrefs"_a = info.num_owner_rrefs,
                        "num_pending_users"_a = info.num_pending_users,
                        "num_pending_futures"_a = info.num_pending_futures,
                        "num_forks"_a = info.num_forks);
      });
}

void bind_results(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<PythonFuture>(module, "RpcFuture")
      .def("wait", &PythonFuture::wait, py::arg("timeout") = py::none())
      .def("done", [](const PythonFuture& self) { return self.result->done(); })
      .def("result", &PythonFuture::value)
      .def(
          "cancel", [](const PythonFuture& self) { return self.result->cancel(); }, unlocked)
      .def("add_done_callback", &add_callback, py::arg("function"));
  py::class_<PythonReference>(module, "RpcReference")
      .def(
          "to_here",
          [](const PythonReference& self, Limit timeout) {
            return fetch(self, timeout).wait(std::nullopt);
          },
          py::arg("timeout") = py::none())
      .def("to_here_async", &fetch, py::arg("timeout") = py::none())
      .def("local_value",
           [](const PythonReference& self) {
             const auto kept = [&] {
               const py::gil_scoped_release released;
               return dynamic::local(self.handle);
             }();
             return object_in(*kept);
           })
      .def("owner",
           [](const PythonReference& self) { return info_of(rpc::detail::owner_of(self.handle)); })
      .def("is_owner",
           [](const PythonReference& self) { return rpc::detail::is_owner(self.handle); })
      .def("confirmed_by_owner",
           [](const PythonReference& self) { return rpc::detail::is_confirmed(self.handle); })
      .def("type", [](const PythonReference& self) { return self.type.text(); })
      .def(
          "rpc_sync",
          [](const PythonReference& self, const std::string& name, const py::args& arguments,
             Limit timeout) { return run_sync(ready_on(self, name, arguments), timeout); },
          py::arg("function"), py::arg("timeout") = py::none())
      .def(
          "rpc_async",
          [](const PythonReference& self, const std::string& name, const py::args& arguments,
             Limit timeout) { return run_async(ready_on(self, name, arguments), timeout); },
          py::arg("function"), py::arg("timeout") = py::none())
      .def(
          "remote",
          [](const PythonReference& self, const std::string& name, const py::args& arguments,
             Limit timeout) { return run_remote(ready_on(self, name, arguments), timeout); },
          py::arg("function"), py::arg("timeout") = py::none())
      .def("__eq__",
           [](const PythonReference& self, const PythonReference& other) {
             return rpc::detail::same(self.handle, other.handle);
           })
      .def("__repr__",
           [](const PythonReference& self) { return rpc::detail::describe(self.handle); });
  py::class_<PythonContext>(module, "RpcContext")
      .def(py::init<const std::shared_ptr<PythonSession>&>(), py::arg("session"))
      .def("id", &PythonContext::id)
      .def("backward", &PythonContext::backward, py::arg("roots"), py::arg("gradients"),
           py::arg("retain_graph"), py::arg("fast"), py::arg("timeout"), unlocked)
      .def("gradients", &PythonContext::gradients)
      .def("dump", &PythonContext::dump, unlocked)
      .def("close", &PythonContext::close, unlocked);
}

void bind_optimizer(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<PythonOptimizer>(module, "RpcOptimizer")
      .def(py::init<const std::shared_ptr<PythonSession>&, const std::vector<PythonReference>&,
                    const std::string&, const py::dict&>(),
           py::arg("session"), py::arg("parameters"), py::arg("kind"), py::arg("group"))
      .def("step", &PythonOptimizer::step, py::arg("context"), unlocked)
      .def("set_lr", &PythonOptimizer::set_lr, py::arg("lr"), unlocked);
}

}  // namespace

void bind_rpc(py::module_& module) {
  // NOLINTNEXTLINE(performance-unnecessary-value-param): it wants a function of this type
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const rpc::RemoteError& error) {
      raise_remote_error(error);
    }
  });
  bind_session(module);
  bind_results(module);
  bind_optimizer(module);
  module.def("rpc_serve", &serve_python, py::arg("name"), py::arg("signature"),
             py::arg("function"));
  module.def("rpc_struct", &declare_struct, py::arg("name"), py::arg("type"));
  module.def("rpc_current_session", [] { return PythonSession::of(rpc::current().session()); });
  module.def("rpc_caller", [] { return info_of(rpc::current().caller()); });
  module.def("end_rpc", &end_sessions, py::call_guard<py::gil_scoped_release>());
}

}  // namespace convoy::python
