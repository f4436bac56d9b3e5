#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "convoy/rpc.h"
#include "torch_backward.h"
#include "torch_rpc_faults.h"
#include "work_pool.h"

namespace c10d {
class Store;
}

namespace convoy::python {

// What a task before has left on this thread, such as a profiler's state, goes: as on a new one.
void clean_thread();

// What travels of a message of torch's: its type, payload and tensors.
using TorchReply = std::tuple<std::int32_t, std::vector<char>, std::vector<at::Tensor>>;

// The agent of torch.distributed.rpc over a session of ours: torch's layers make and read the
// messages, the session carries them. Each message is one call of a function that only such
// sessions serve.
//
// Threads: handlers of requests run on one pool, completions of futures on another, so that neither
// waits for the other; both grow while their tasks wait for calls (WorkPool). The session's own
// threads only hand over, and run small operators. A call that is waited for at once is ended by
// the thread that makes it. A forked child takes no part: calls there are errors.
class TorchRpcAgent final : public torch::distributed::rpc::RpcAgent,
                            public std::enable_shared_from_this<TorchRpcAgent> {
 public:
  struct Options {
    std::string name;
    int rank = 0;
    int size = 1;
    double timeout = 0;  // seconds; 0: never
    int threads = 16;
  };
  // Meets the others, all of which make theirs.
  static std::shared_ptr<TorchRpcAgent> make(const c10::intrusive_ptr<c10d::Store>& store,
                                             const Options& options);
  TorchRpcAgent(const TorchRpcAgent&) = delete;
  TorchRpcAgent& operator=(const TorchRpcAgent&) = delete;
  ~TorchRpcAgent() override;

  using WorkerInfo = torch::distributed::rpc::WorkerInfo;
  using Message = torch::distributed::rpc::Message;
  using JitFuture = c10::ivalue::Future;

  c10::intrusive_ptr<JitFuture> send(const WorkerInfo& to, c10::intrusive_ptr<Message> message,
                                     float seconds,
                                     const torch::distributed::rpc::DeviceMap& device_map) override;
  // NOLINTBEGIN(readability-identifier-naming): torch's names
  const WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const WorkerInfo& getWorkerInfo(torch::distributed::rpc::worker_id_t id) const override;
  using RpcAgent::getWorkerInfo;
  std::vector<WorkerInfo> getWorkerInfos() const override { return workers_; }
  void join(bool shutdown, float timeout) override;
  void sync() override;
  void startImpl() override;
  void shutdownImpl() override;
  std::unordered_map<std::string, std::string> getMetrics() override;
  // NOLINTEND(readability-identifier-naming)

  // That which serves a session; nullptr.
  static std::shared_ptr<TorchRpcAgent> find(const rpc::Session& session);
  // A request of another worker.
  rpc::Future<TorchReply> serve(c10::intrusive_ptr<Message> request);
  TorchBackward& backward_passes() const { return *backward_; }
  // The next call of this thread is waited for at once: send() returns when it has ended.
  static void set_waits_at_once(bool waits);
  // False in a forked child of the process that made it.
  bool is_at_home() const { return handlers_->is_at_home(); }
  // Before anything goes.
  void set_faults(std::unique_ptr<TorchRpcFaults> faults) { faults_ = std::move(faults); }

 private:
  struct Sent;

  TorchRpcAgent(rpc::Session session, const Options& options);
  // NOLINTNEXTLINE(readability-identifier-naming)
  void addGilWaitTime(std::chrono::microseconds time) override;
  std::chrono::milliseconds timeout_of(float seconds) const;
  void run(const c10::intrusive_ptr<Message>& request,
           const std::shared_ptr<rpc::Promise<TorchReply>>& promise);
  static bool waits_at_once(const Message& message);
  void require_home() const;
  void send_and_wait(const Sent& sent, const WorkerInfo& to, const Message& message);
  void send_later(const Sent& sent, const WorkerInfo& to, const Message& message);
  void complete(const Sent& sent, const rpc::Future<TorchReply>& answer);
  void end(const Sent& sent, TorchReply&& reply);
  void end(const Sent& sent, const std::exception_ptr& error);
  void settle(const Deadline& deadline);
  void change(const std::function<void()>& how);

  const rpc::Session session_;
  std::vector<WorkerInfo> workers_;  // by id
  std::unordered_map<std::string, std::size_t> by_name_;
  const std::shared_ptr<WorkPool> handlers_;
  const std::shared_ptr<WorkPool> completions_;
  const std::shared_ptr<TorchBackward> backward_;
  std::unique_ptr<TorchRpcFaults> faults_;  // for tests

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by it:
  struct Activity {
    std::int64_t client = 0;        // calls of ours that have not ended
    std::int64_t open = 0;          // the same, or whose callbacks still run
    std::int64_t server = 0;        // others' that were not answered
    std::int64_t server_async = 0;  // of these, whose function has returned a future
    std::uint64_t total = 0;        // calls that were made or taken
    std::int64_t gil_waits = 0;
    std::int64_t gil_microseconds = 0;
  } activity_;
};

}  // namespace convoy::python
