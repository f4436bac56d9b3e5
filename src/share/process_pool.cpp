#include "convoy/process_pool.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/guarded.h"
#include "base/log.h"
#include "os/fork_guard.h"
#include "share/ticket.h"

namespace convoy {
namespace {

using share::Message;

constexpr std::chrono::seconds kFarewell{5};

// What a worker runs: answers requests until its pool is gone.
void serve(int index) {
  const share::Channel& pool = spawned()->parent;
  for (;;) {
    Message request;
    try {
      request = pool.receive_message(Deadline::never());  // ends with the pool, or its process
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kPeerLost) return;
      throw;
    }
    Message answer;
    try {
      const Message result = detail::run_request(detail::FunctionUse::kItem, index, request);
      answer.add(true);
      for (const auto& value : result) answer.add(value);
    } catch (const std::exception& error) {
      answer = Message{false, std::string(error.what())};
    }
    request = {};
    try {
      pool.send(answer);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kPeerLost) return;
      pool.send(Message{false, concat("the result cannot be sent: ", error.what())});
    }
  }
}

}  // namespace

struct ProcessPool::Impl {
  struct Worker {
    Processes process;
    int pid = 0;
  };

  Processes start() const {
    return spawn<serve>(ProcessOptions{.count = 1, .environment = options.environment});
  }

  // A worker that is dead, or busy with what nobody waits for any more, is replaced.
  void replace(Worker& worker) {
    worker.process.restart(0);
    ++replaced;
    const std::scoped_lock lock(pids_mutex);
    worker.pid = worker.process.pids()[0];
  }

  Answer ask(Worker& worker, std::size_t item, const Message& request, const Deadline& deadline);
  Answer ask_once(Worker& worker, std::size_t item, const Message& request,
                  const Deadline& deadline, bool& died);

  ProcessPoolOptions options;
  std::timed_mutex map_mutex;     // one map() at a time
  mutable std::mutex pids_mutex;  // the pids of workers
  std::vector<Worker> workers;    // each used by one thread of a map()
  std::atomic<std::size_t> replaced{0};
  const unsigned generation = fork_generation();
};

ProcessPool::Answer ProcessPool::Impl::ask_once(Worker& worker, std::size_t item,
                                                const Message& request, const Deadline& deadline,
                                                bool& died) {
  died = false;
  try {
    const share::Channel channel = worker.process.channel(0);
    channel.send(request, deadline);
    Message answer = channel.receive_message(deadline);
    if (share::ValueReader(answer).take<bool>()) return {std::move(answer), std::nullopt};
    return {{}, Error(ErrorKind::kRemote, concat("item ", item, ": ", answer.text(1)))};
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost && error.kind() != ErrorKind::kTimeout) {
      return {{}, Error(error.kind(), concat("item ", item, ": ", error.what()))};
    }
    died = error.kind() == ErrorKind::kPeerLost;
    std::string why = concat("item ", item, ": ", error.what());
    if (died) {
      // It closes its end a moment before it has ended.
      try {
        worker.process.join(Deadline::after(kFarewell));
        why = concat("item ", item, ": its worker (pid ", worker.pid, ") ended in it");
      } catch (const Error& failure) {
        why = concat("item ", item, ": its worker died: ", failure.what());
      }
      log_warn(why, "; it is replaced");
    }
    replace(worker);
    return {{}, Error(error.kind(), why)};
  }
}

ProcessPool::Answer ProcessPool::Impl::ask(Worker& worker, std::size_t item, const Message& request,
                                           const Deadline& deadline) {
  for (int tries = 0;; ++tries) {
    bool died = false;
    Answer answer = ask_once(worker, item, request, deadline, died);
    if (!died || tries >= options.retries || deadline.expired()) return answer;
  }
}

ProcessPool::ProcessPool(int workers, const ProcessPoolOptions& options)
    : impl_(std::make_unique<Impl>()) {
  if (workers < 1) {
    fail(ErrorKind::kInvalidArgument, "ProcessPool: workers must be >= 1, got ", workers);
  }
  impl_->options = options;
  for (int i = 0; i < workers; ++i) {
    auto process = impl_->start();
    const int pid = process.pids()[0];
    impl_->workers.push_back({std::move(process), pid});
  }
}

ProcessPool::~ProcessPool() {
  // They hear it by the end of their channel, and end of themselves.
  if (impl_->generation != fork_generation()) return;  // workers of the process that forked us
  try {
    for (auto& worker : impl_->workers) worker.process.channel(0).close();
    const auto until = Deadline::after(kFarewell);
    for (auto& worker : impl_->workers) worker.process.join(until);
  } catch (const std::exception&) {  // their destructors kill them
  }
}

std::vector<ProcessPool::Answer> ProcessPool::run(const std::vector<Message>& requests,
                                                  const Deadline& deadline) {
  if (impl_->generation != fork_generation()) {
    fail(ErrorKind::kUnsupported,
         "map: this pool belongs to the parent of this forked process; make one in the child");
  }
  std::unique_lock lock(impl_->map_mutex, std::defer_lock);
  if (deadline.is_never()) {
    lock.lock();
  } else if (!lock.try_lock_until(deadline.when())) {
    fail(ErrorKind::kTimeout, "map: the calls of other threads had the pool until the deadline");
  }
  std::vector<Answer> answers(requests.size());
  std::atomic<std::size_t> next{0};
  std::vector<std::jthread> threads;
  for (std::size_t w = 0; w < std::min(impl_->workers.size(), requests.size()); ++w) {
    threads.emplace_back([&, w] {
      for (std::size_t i = next.fetch_add(1); i < requests.size(); i = next.fetch_add(1)) {
        if (deadline.expired()) {  // a worker would be replaced for nothing
          answers[i].error =
              Error(ErrorKind::kTimeout, concat("item ", i, ": not begun by the deadline"));
          continue;
        }
        try {
          answers[i] = impl_->ask(impl_->workers[w], i, requests[i], deadline);
        } catch (const Error& error) {  // no other worker could be made
          answers[i].error = Error(error.kind(), concat("item ", i, ": ", error.what()));
        } catch (const std::exception& error) {
          answers[i].error = Error(ErrorKind::kInternal, concat("item ", i, ": ", error.what()));
        }
      }
    });
  }
  threads.clear();  // joins
  return answers;
}

Deadline ProcessPool::deadline() const { return Deadline::after(impl_->options.timeout); }

std::size_t ProcessPool::size() const { return impl_->workers.size(); }

std::vector<int> ProcessPool::pids() const {
  const std::scoped_lock lock(impl_->pids_mutex);
  std::vector<int> found;
  for (const auto& worker : impl_->workers) found.push_back(worker.pid);
  return found;
}

std::size_t ProcessPool::replaced() const { return impl_->replaced; }

}  // namespace convoy
