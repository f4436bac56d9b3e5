// torch.distributed.autograd.backward over Convoy's sessions.
#include "torch_backward.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <optional>
#include <utility>

#include "convoy/deadline.h"
#include "convoy/error.h"
#include "torch_rpc_agent.h"

namespace convoy::python {
namespace {

using autograd::detail::TorchPass;
using autograd::detail::TorchPorts;

// How long the others are waited for that hear of the end of a pass.
constexpr std::chrono::seconds kMostAbortTime{5};

// Of the session whose call this thread serves.
TorchBackward& served_backward() {
  const auto agent = TorchRpcAgent::find(rpc::current().session());
  if (!agent) {
    throw Error(ErrorKind::kInvalidArgument,
                "this worker does not serve torch.distributed.rpc: its session is another one");
  }
  return agent->backward_passes();
}

// Waits until `ready`, at most until the deadline. A task of a pool does not count meanwhile.
template <class Ready>
bool wait_aside(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                const Deadline& deadline, Ready ready) {
  if (ready()) return true;
  struct Aside {
    WorkPool::Waiting waiting;
    ~Aside() { waiting.ended(); }
  };
  const Aside aside;
  if (deadline.is_never()) {
    changed.wait(lock, ready);
    return true;
  }
  return changed.wait_until(lock, deadline.when(), ready);
}

TorchPassResult describe_failure(const std::exception_ptr& error) {
  const auto make = [](ErrorKind kind, std::string type, std::string text) {
    return TorchPassResult{static_cast<std::int32_t>(kind), std::move(type), std::move(text), true};
  };
  try {
    std::rethrow_exception(error);
  } catch (const rpc::RemoteError& thrown) {
    return make(thrown.kind(), thrown.remote_type(), thrown.what());
  } catch (const Error& thrown) {
    return make(thrown.kind(), "", thrown.what());
  } catch (const python_error& thrown) {
    std::string type;
    {
      const pybind11::gil_scoped_acquire locked;
      // The engine has told the interpreter of it, too.
      PyErr_Clear();
      if (thrown.type != nullptr) {
        type = reinterpret_cast<const PyTypeObject*>(thrown.type)->tp_name;
      }
    }
    return make(ErrorKind::kRemote, type, thrown.what());
  } catch (const c10::Error& thrown) {
    return make(ErrorKind::kRemote, "c10::Error", thrown.what_without_backtrace());
  } catch (const std::exception& thrown) {
    return make(ErrorKind::kRemote, "std::exception", thrown.what());
  } catch (...) {
    return make(ErrorKind::kRemote, "", "an exception not derived from std::exception");
  }
}

}  // namespace

// --- What workers call of each other ------------------------------------------------------------

std::vector<TorchPorts> torch_pass_expand(const TorchPassHead& head,
                                          const std::vector<TorchPorts>& sent) {
  return served_backward().expand(head, sent);
}
CONVOY_RPC(torch_pass_expand);

// Ends when this worker's part has.
rpc::Future<TorchPassResult> torch_pass_run(const TorchPassId& pass) {
  return served_backward().run(pass);
}
CONVOY_RPC(torch_pass_run);

void torch_pass_gradient(const TorchPassId& pass, std::int64_t message,
                         std::vector<at::Tensor> gradients) {
  served_backward().take(pass, message, std::move(gradients));
}
CONVOY_RPC(torch_pass_gradient);

void torch_pass_abort(const TorchPassId& pass, const std::string& why) {
  served_backward().abort(pass, why);
}
CONVOY_RPC(torch_pass_abort);

// --- One worker's part --------------------------------------------------------------------------

class TorchBackward::Part final : public TorchPass::Carrier,
                                  public std::enable_shared_from_this<Part> {
 public:
  Part(const rpc::Session& session, int self, const TorchPassHead& head)
      : session_(session),
        self_(self),
        id_(head.pass),
        retain_graph_(head.retain_graph),
        deadline_(head.remaining == 0 ? Deadline::never()
                                      : Deadline::after(std::chrono::milliseconds(
                                            static_cast<std::int64_t>(head.remaining)))),
        pass_(head.context) {}

  const Deadline& deadline() const { return deadline_; }

  // Before run().
  template <class What>
  std::vector<TorchPorts> follow(const std::vector<What>& what) {
    const std::lock_guard lock(mutex_);
    if (begun_) throw Error(ErrorKind::kInvalidArgument, "autograd: this pass has begun to run");
    return pass_.follow(what);
  }

  TorchPassResult run(const std::vector<at::Tensor>& roots) noexcept {
    try {
      {
        const std::lock_guard lock(mutex_);
        check();
        if (std::exchange(begun_, true)) {
          throw Error(ErrorKind::kInvalidArgument, "autograd: this pass runs already");
        }
      }
      pass_.run(roots, retain_graph_, *this);
      std::unique_lock lock(mutex_);
      wait(lock, [&] { return on_their_way_ == 0; });
      return {};
    } catch (...) {
      return describe_failure(std::current_exception());
    }
  }

  void take(std::int64_t message, std::vector<at::Tensor>&& gradients) {
    change([&] { arrived_.push_back({message, std::move(gradients)}); });
  }
  // The first reason counts.
  void abort(const TorchPassResult& why) {
    change([&] {
      if (!ended_) ended_ = why;
    });
  }
  void abort(const std::string& why) {
    abort({static_cast<std::int32_t>(ErrorKind::kCancelled), "", why, true});
  }
  bool has_begun() const {
    const std::lock_guard lock(mutex_);
    return begun_;
  }

  // --- Carrier ---

  Arrived next() override {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return !arrived_.empty(); });
    Arrived next = std::move(arrived_.front());
    arrived_.pop_front();
    return next;
  }

  void send_back(std::int64_t message, std::vector<at::Tensor>&& gradients) override {
    const int to = autograd::detail::torch_sender(message);
    if (to == self_) return take(message, std::move(gradients));
    change([&] { ++on_their_way_; });
    const auto end = [self = shared_from_this()](const rpc::Future<void>& answer) {
      if (answer.error()) self->abort(describe_failure(answer.error()));
      self->change([&] { --self->on_their_way_; });
    };
    try {
      const at::DisableRecordFunctionGuard quiet;
      static_cast<void>(session_.to(to, {.timeout = deadline_, .stays = true})
                            .rpc_async<torch_pass_gradient>(id_, message, gradients)
                            .then(end));
    } catch (...) {
      change([&] { --on_their_way_; });
      throw;
    }
  }

  bool goes_on() override {
    const std::lock_guard lock(mutex_);
    return !ended_;
  }

 private:
  // Under the lock.
  void check() const {
    if (ended_) throw Error(static_cast<ErrorKind>(ended_->kind), ended_->text);
  }
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    const bool in_time =
        wait_aside(lock, changed_, deadline_, [&] { return ended_.has_value() || ready(); });
    check();
    if (!in_time) {
      throw Error(
          ErrorKind::kTimeout,
          "the backward pass has not ended in time: gradients of other workers are missing");
    }
  }
  template <class How>
  void change(How how) {
    {
      const std::lock_guard lock(mutex_);
      how();
    }
    changed_.notify_all();
  }

  const rpc::Session session_;
  const int self_;
  const TorchPassId id_;
  const bool retain_graph_;
  const Deadline deadline_;
  TorchPass pass_;  // until it runs, guarded by mutex_

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  bool begun_ = false;
  std::deque<Arrived> arrived_;
  int on_their_way_ = 0;
  std::optional<TorchPassResult> ended_;
};

// --- At the root --------------------------------------------------------------------------------

// Who takes part, and how it went there.
class TorchBackward::Root final : public std::enable_shared_from_this<Root> {
 public:
  Root(const rpc::Session& session, int self, const TorchPassHead& head, std::shared_ptr<Part> part)
      : session_(session), self_(self), head_(head), part_(std::move(part)) {}

  void run(const std::vector<at::Tensor>& roots) {
    try {
      discover(part_->follow(roots));
      for (const int worker : others_) start(worker);
      const TorchPassResult here = part_->run(roots);
      if (here.failed) failed(self_, here);
      wait_for_others();
    } catch (...) {
      failed(self_, describe_failure(std::current_exception()));
    }
    std::unique_lock lock(mutex_);
    if (!error_) return;
    // So that nobody adds to gradients any more once this has ended.
    wait_aside(lock, changed_, Deadline::after(kMostAbortTime), [&] { return running_ == 0; });
    const std::string name = session_.worker_info(error_worker_).name;
    throw rpc::RemoteError(static_cast<ErrorKind>(error_->kind),
                           "torch.distributed.autograd.backward failed on " + name +
                               ": Error on Node " + std::to_string(error_worker_) + ": " +
                               error_->text,
                           name, error_->type);
  }

 private:
  // Asks those who sent something where it leads to, until nothing is new.
  void discover(std::vector<TorchPorts> next) {
    while (!next.empty()) {
      std::map<int, std::vector<TorchPorts>> by_sender;
      for (TorchPorts& each : next) {
        by_sender[autograd::detail::torch_sender(each.message)].push_back(std::move(each));
      }
      next.clear();
      std::map<int, rpc::Future<std::vector<TorchPorts>>> asked;
      const auto add = [&](const std::vector<TorchPorts>& more) {
        next.insert(next.end(), more.begin(), more.end());
      };
      for (const auto& [worker, ports] : by_sender) {
        if (worker == self_) {
          add(part_->follow(ports));
          continue;
        }
        others_.insert(worker);
        const at::DisableRecordFunctionGuard quiet;
        asked.emplace(worker, session_.to(worker, {.timeout = part_->deadline()})
                                  .rpc_async<torch_pass_expand>(head_, ports));
      }
      std::optional<std::pair<int, TorchPassResult>> bad;
      for (const auto& [worker, answer] : asked) {
        try {
          // After a failure, too: whoever is asked hears of the end of the pass afterwards.
          add(answer.wait(bad ? Deadline::after(kMostAbortTime) : Deadline::never()));
        } catch (...) {
          if (!bad) bad.emplace(worker, describe_failure(std::current_exception()));
        }
      }
      if (!bad) continue;
      failed(bad->first, bad->second);
      throw Error(ErrorKind::kCancelled, "autograd: the backward pass has failed");
    }
  }

  void start(int worker) {
    {
      const std::lock_guard lock(mutex_);
      ++running_;
    }
    const auto end = [self = shared_from_this(),
                      worker](const rpc::Future<TorchPassResult>& answer) {
      if (answer.error()) {
        self->failed(worker, describe_failure(answer.error()));
      } else if (answer.result().failed) {
        self->failed(worker, answer.result());
      }
      {
        const std::lock_guard lock(self->mutex_);
        --self->running_;
      }
      self->changed_.notify_all();
    };
    const at::DisableRecordFunctionGuard quiet;
    rpc::Future<TorchPassResult> answer;
    try {
      answer =
          session_.to(worker, {.timeout = part_->deadline()}).rpc_async<torch_pass_run>(head_.pass);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      --running_;
      throw;
    }
    static_cast<void>(answer.then(end));
  }

  // The first failure counts; everybody hears of it.
  void failed(int worker, const TorchPassResult& result) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) return;
      error_ = result;
      error_worker_ = worker;
    }
    const std::string why =
        "it has failed on worker " + std::to_string(worker) + ": " + result.text;
    part_->abort(why);
    const at::DisableRecordFunctionGuard quiet;
    for (const int other : others_) {
      try {
        static_cast<void>(session_.to(other, {.timeout = Deadline::after(kMostAbortTime)})
                              .rpc_async<torch_pass_abort>(head_.pass, why));
      } catch (const Error&) {
        // It is gone, too.
      }
    }
    changed_.notify_all();
  }

  void wait_for_others() {
    std::unique_lock lock(mutex_);
    if (!wait_aside(lock, changed_, part_->deadline(),
                    [&] { return error_.has_value() || running_ == 0; })) {
      throw Error(ErrorKind::kTimeout, "the backward pass has not ended in time on all workers");
    }
  }

  const rpc::Session session_;
  const int self_;
  const TorchPassHead head_;
  const std::shared_ptr<Part> part_;
  std::set<int> others_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  int running_ = 0;
  std::optional<TorchPassResult> error_;
  int error_worker_ = 0;
};

// --- All passes of an agent ---------------------------------------------------------------------

TorchBackward::TorchBackward(rpc::Session session, std::shared_ptr<WorkPool> threads)
    : session_(std::move(session)),
      self_(session_.worker_info().rank),
      threads_(std::move(threads)) {}

TorchBackward::~TorchBackward() = default;

namespace {

// With PyTorch's texts.
void check_roots(const std::vector<at::Tensor>& roots) {
  TORCH_CHECK(!roots.empty(), "No tensors provided for gradient computation.");
  for (const at::Tensor& root : roots) {
    TORCH_CHECK(root.requires_grad(), "requires_grad not set on root");
    TORCH_CHECK(root.numel() == 1, root.name(), " is not a scalar, all roots need to be scalar");
    TORCH_CHECK(root.grad_fn(), root.name(), " does not have a valid gradient function.");
  }
}

}  // namespace

void TorchBackward::backward(std::int64_t context, const std::vector<at::Tensor>& roots,
                             bool retain_graph, std::chrono::milliseconds timeout) {
  RECORD_FUNCTION("torch::distributed::autograd::backward", {});
  check_roots(roots);
  TorchPassHead head{
      {self_, 0}, context, retain_graph, static_cast<std::uint64_t>(timeout.count())};
  {
    const std::lock_guard lock(mutex_);
    head.pass.number = ++last_;
  }
  const auto part = std::make_shared<Part>(session_, self_, head);
  {
    const std::lock_guard lock(mutex_);
    parts_.emplace(head.pass, part);
  }
  struct End {
    TorchBackward& all;
    const TorchPassId& pass;
    ~End() { all.drop(pass); }
  };
  const End end{*this, head.pass};
  std::make_shared<Root>(session_, self_, head, part)->run(roots);
}

std::size_t TorchBackward::under_way() const {
  const std::lock_guard lock(mutex_);
  return parts_.size();
}

void TorchBackward::abort_all(const std::string& why) {
  std::vector<std::shared_ptr<Part>> parts;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, part] : parts_) parts.push_back(part);
  }
  for (const auto& part : parts) part->abort(why);
}

std::shared_ptr<TorchBackward::Part> TorchBackward::find(const TorchPassId& pass) const {
  const std::lock_guard lock(mutex_);
  const auto found = parts_.find(pass);
  return found == parts_.end() ? nullptr : found->second;
}

void TorchBackward::drop(const TorchPassId& pass) {
  decltype(parts_)::node_type dropped;  // goes without the lock
  const std::lock_guard lock(mutex_);
  dropped = parts_.extract(pass);
}

// Passes of a root that dies end.
void TorchBackward::watch(int root) {
  {
    const std::lock_guard lock(mutex_);
    if (!watched_.insert(root).second) return;
  }
  session_.on_lost(root, [self = weak_from_this(), root](const rpc::WorkerInfo&, const Error& why) {
    const auto all = self.lock();
    if (!all) return;
    std::vector<std::shared_ptr<Part>> parts;
    {
      const std::lock_guard lock(all->mutex_);
      for (auto each = all->parts_.begin(); each != all->parts_.end();) {
        if (each->first.root != root) {
          ++each;
          continue;
        }
        parts.push_back(std::move(each->second));
        each = all->parts_.erase(each);
      }
    }
    for (const auto& part : parts) part->abort(why.what());
  });
}

std::vector<TorchPorts> TorchBackward::expand(const TorchPassHead& head,
                                              const std::vector<Ports>& sent) {
  if (head.pass.root != rpc::current().caller().rank) {
    throw Error(ErrorKind::kInvalidArgument, "autograd: only the root of a pass may begin it");
  }
  auto part = find(head.pass);
  if (!part) {
    watch(head.pass.root);
    auto made = std::make_shared<Part>(session_, self_, head);
    const std::lock_guard lock(mutex_);
    part = parts_.emplace(head.pass, std::move(made)).first->second;
  }
  return part->follow(sent);
}

rpc::Future<TorchPassResult> TorchBackward::run(const TorchPassId& pass) {
  auto part = find(pass);
  if (!part) throw Error(ErrorKind::kCancelled, "autograd: the backward pass has ended here");
  auto promise = std::make_shared<rpc::Promise<TorchPassResult>>();
  auto result = promise->future();
  threads_->submit([self = shared_from_this(), pass, part = std::move(part),
                    promise = std::move(promise)]() mutable {
    clean_thread();
    TorchPassResult ended = part->run({});
    part.reset();
    self->drop(pass);
    promise->set_value(std::move(ended));
  });
  return result;
}

// Of one that has ended here it is late.
void TorchBackward::take(const TorchPassId& pass, std::int64_t message,
                         std::vector<at::Tensor> gradients) {
  if (const auto part = find(pass)) part->take(message, std::move(gradients));
}

void TorchBackward::abort(const TorchPassId& pass, const std::string& why) {
  const auto part = find(pass);
  if (!part) return;
  part->abort(why);
  if (!part->has_begun()) drop(pass);
}

}  // namespace convoy::python
