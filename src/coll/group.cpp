#include "coll/group.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/loop.h"
#include "coll/calls.h"
#include "coll/medium.h"
#include "coll/observer.h"
#include "coll/shared_memory.h"

namespace convoy::coll {

// What a Work stands for.
struct Work::Operation {
  explicit Operation(std::shared_ptr<Group::Impl> in) : group(std::move(in)) {}
  virtual ~Operation() = default;

  virtual bool is_done() = 0;
  virtual bool wait_until(const Deadline& deadline) = 0;
  virtual std::uint64_t sequence() const { return 0; }
  virtual int sender() { return -1; }

  std::shared_ptr<Group::Impl> group;
};

struct Work::Collective final : Work::Operation {
  using Operation::Operation;
  bool is_done() override;
  bool wait_until(const Deadline& deadline) override;
  std::uint64_t sequence() const override { return number; }

  Call call;
  std::uint64_t number = 0;
  Observer::Seen seen;
  Group::Callback callback;
  // Guarded by the group's mutex:
  bool done = false;
  std::exception_ptr error;
};

// One message, or a batch.
struct Work::Messages final : Work::Operation {
  using Operation::Operation;
  bool is_done() override;
  bool wait_until(const Deadline& deadline) override;
  int sender() override;

  std::vector<std::shared_ptr<Transfer>> transfers;
};

// Keeps the order. An operation gets its number when it is issued; it runs when all before it have:
// on the progress thread, or on a thread that waits for it, whichever is there first.
class Group::Impl : public std::enable_shared_from_this<Group::Impl> {
 public:
  Impl(std::shared_ptr<Medium> medium, std::chrono::nanoseconds timeout)
      : timeout_(timeout),
        medium_(std::move(medium)),
        messages_(medium_->messages()),
        observer_(*medium_),
        calls_(medium_->name(), medium_->rank(), medium_->size()) {}

  Medium& medium() { return *medium_; }
  const std::shared_ptr<Medium>& shared_medium() const { return medium_; }

  const CallMaker& calls() const { return calls_; }
  Messages& messages() { return messages_; }
  Observer& observer() { return observer_; }

  // Checked; without a deadline.
  Transfer transfer(const Message& message) const;
  Deadline deadline(std::chrono::nanoseconds timeout,
                    Deadline::Clock::time_point now = Deadline::Clock::now()) const {
    return Deadline::after(timeout.count() == 0 ? timeout_ : timeout, now);
  }

  void run(Call call, std::chrono::nanoseconds timeout);
  void run(Transfer& transfer, const Observer::Seen& seen, std::chrono::nanoseconds timeout);
  std::shared_ptr<Work::Collective> issue(Call call, std::chrono::nanoseconds timeout,
                                          Callback done);
  bool wait(Work::Collective& operation, const Deadline& deadline);
  bool is_done(const Work::Collective& operation);
  void close();
  std::string describe() const {
    return concat("group \"", medium_->name(), "\", rank ", medium_->rank(), " of ",
                  medium_->size());
  }

 private:
  void check_open() const;
  void progress();
  void finish(Work::Collective& operation, const std::exception_ptr& error);
  void run_next(std::unique_lock<std::mutex>& lock);
  void release_turn();

 public:
  std::uint64_t last_issued() {
    const std::lock_guard lock(mutex_);
    return last_number_;
  }

 private:
  const std::chrono::nanoseconds timeout_;
  const std::shared_ptr<Medium> medium_;
  Messages& messages_;  // the medium's
  Observer observer_;
  const CallMaker calls_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::deque<std::shared_ptr<Work::Collective>> queue_;
  std::uint64_t last_number_ = 0;
  bool busy_ = false;  // some thread runs an operation
  bool closed_ = false;
  int waiting_ = 0;               // threads in changed_.wait
  std::thread::id calling_back_;  // who runs a callback
  std::thread progress_;
};

void Group::Impl::check_open() const {
  if (closed_) fail(ErrorKind::kInvalidArgument, describe(), " was closed");
}

// The fast path: nothing is queued and nobody runs, so this thread runs its operation itself.
void Group::Impl::run(Call call, std::chrono::nanoseconds timeout) {
  const auto now = Deadline::Clock::now();
  call.deadline = deadline(timeout, now);
  std::uint64_t number = 0;
  {
    std::unique_lock lock(mutex_);
    check_open();
    if (busy_ || !queue_.empty()) {
      lock.unlock();
      const auto operation = issue(std::move(call), timeout, nullptr);
      wait(*operation, Deadline::never());  // the operation's own deadline ends it
      return;
    }
    busy_ = true;
    number = ++last_number_;
  }
  const auto seen = observer_.begin(call, number, now, Observer::Turn::kNow);
  try {
    medium_->run(call, number);
  } catch (...) {
    observer_.end(seen, std::current_exception());
    release_turn();
    throw;
  }
  observer_.end(seen);
  release_turn();
}

void Group::Impl::run(Transfer& transfer, const Observer::Seen& seen,
                      std::chrono::nanoseconds timeout) {
  transfer.deadline = deadline(timeout, seen.called);
  try {
    messages_.run({&transfer, 1});
  } catch (...) {
    observer_.end(seen, std::current_exception());
    throw;
  }
  observer_.end(seen);
}

void Group::Impl::release_turn() {
  bool someone = false;
  {
    const std::lock_guard lock(mutex_);
    busy_ = false;
    someone = waiting_ != 0;
  }
  if (someone) changed_.notify_all();
}

std::shared_ptr<Work::Collective> Group::Impl::issue(Call call, std::chrono::nanoseconds timeout,
                                                     Callback done) {
  const auto now = Deadline::Clock::now();
  call.deadline = deadline(timeout, now);
  auto operation = std::make_shared<Work::Collective>(shared_from_this());
  operation->call = std::move(call);
  operation->callback = std::move(done);
  {
    const std::lock_guard lock(mutex_);
    check_open();
    operation->number = ++last_number_;
    operation->seen =
        observer_.begin(operation->call, operation->number, now, Observer::Turn::kLater);
    queue_.push_back(operation);
    if (!progress_.joinable()) {
      progress_ = std::thread([self = shared_from_this()] { self->progress(); });
    }
  }
  changed_.notify_all();
  return operation;
}

// Takes the first operation off the queue and runs it; `lock` is released meanwhile.
void Group::Impl::run_next(std::unique_lock<std::mutex>& lock) {
  const auto operation = queue_.front();
  queue_.pop_front();
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  observer_.start(operation->seen);
  try {
    medium_->run(operation->call, operation->number);
  } catch (...) {
    error = std::current_exception();
  }
  observer_.end(operation->seen, error);
  finish(*operation, error);
  lock.lock();
}

// The turn passes on after the callback, so that callbacks come in order too.
void Group::Impl::finish(Work::Collective& operation, const std::exception_ptr& error) {
  Callback callback;
  {
    const std::lock_guard lock(mutex_);
    operation.done = true;
    operation.error = error;
    callback = std::exchange(operation.callback, nullptr);
    if (callback) calling_back_ = std::this_thread::get_id();
  }
  changed_.notify_all();
  // Also if the callback throws, which it must not: others wait for their turn.
  struct Turn {
    Impl& impl;
    ~Turn() {
      {
        const std::lock_guard lock(impl.mutex_);
        impl.calling_back_ = {};
      }
      impl.release_turn();
    }
  } const turn{*this};
  if (callback) callback(error);
}

bool Group::Impl::is_done(const Work::Collective& operation) {
  const std::lock_guard lock(mutex_);
  return operation.done;
}

bool Group::Impl::wait(Work::Collective& operation, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const auto my_turn = [&] {
    return !busy_ && !queue_.empty() && queue_.front().get() == &operation;
  };
  while (!operation.done) {
    // With a deadline of the caller's own it must not be caught inside the operation.
    if (deadline.is_never() && my_turn()) {
      run_next(lock);
      continue;
    }
    ++waiting_;
    const auto stop = [&] { return operation.done || (deadline.is_never() && my_turn()); };
    if (deadline.is_never()) {
      changed_.wait(lock, stop);
    } else {
      changed_.wait_until(lock, deadline.when(), stop);
    }
    --waiting_;
    if (!operation.done && deadline.expired()) return false;
  }
  if (operation.error) std::rethrow_exception(operation.error);
  return true;
}

void Group::Impl::progress() {
  set_thread_name("convoy-progress");
  std::unique_lock lock(mutex_);
  for (;;) {
    ++waiting_;
    changed_.wait(lock, [&] { return (!busy_ && !queue_.empty()) || (closed_ && queue_.empty()); });
    --waiting_;
    if (queue_.empty()) return;
    run_next(lock);
  }
}

void Group::Impl::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  messages_.close();
  // What runs fails now; what is queued fails when its turn comes, on the progress thread.
  medium_->close();
  changed_.notify_all();
  std::thread progress;
  bool in_callback = false;
  {
    const std::lock_guard lock(mutex_);
    std::swap(progress, progress_);
    in_callback = calling_back_ == std::this_thread::get_id();
  }
  if (!progress.joinable()) return;
  if (in_callback || progress.get_id() == std::this_thread::get_id()) {
    progress.detach();  // a callback destroys the group: the thread keeps what it needs and ends
  } else {
    progress.join();
  }
}

std::shared_ptr<Group> Group::create(const std::shared_ptr<Store>& store, int rank, int size,
                                     const GroupOptions& options) {
  if (!store) fail(ErrorKind::kInvalidArgument, "group \"", options.name, "\": no store");
  if (options.threads < 1 || options.threads > 64) {
    fail(ErrorKind::kInvalidArgument, "group \"", options.name, "\": ", options.threads,
         " threads; 1 to 64 are possible");
  }
  return over(make_shared_memory(*store, rank, size,
                                 {.name = options.name,
                                  .threads = options.threads,
                                  .read_private = options.read_private,
                                  .deadline = Deadline::after(options.timeout)}),
              options.timeout);
}

std::shared_ptr<Group> Group::over(std::shared_ptr<Medium> medium,
                                   std::chrono::nanoseconds timeout) {
  return std::shared_ptr<Group>(new Group(std::make_shared<Impl>(std::move(medium), timeout)));
}

Group::~Group() { impl_->close(); }

int Group::rank() const { return impl_->medium().rank(); }
int Group::size() const { return impl_->medium().size(); }
const std::string& Group::name() const { return impl_->medium().name(); }

void Group::all_reduce(const void* input, void* output, std::size_t count, DataType type,
                       const ReduceOptions& options) {
  impl_->run(impl_->calls().all_reduce(input, output, count, type, options), options.timeout);
}

void Group::reduce(const void* input, void* output, std::size_t count, DataType type, int root,
                   const ReduceOptions& options) {
  impl_->run(impl_->calls().reduce(input, output, count, type, root, options), options.timeout);
}

void Group::reduce_scatter(const void* input, void* output, std::size_t count, DataType type,
                           const ReduceOptions& options) {
  impl_->run(impl_->calls().reduce_scatter(input, output, count, type, options), options.timeout);
}

void Group::broadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                      const CallOptions& options) {
  impl_->run(impl_->calls().broadcast(input, output, count, type, root, options), options.timeout);
}

void Group::all_gather(const void* input, void* output, std::size_t count, DataType type,
                       const CallOptions& options) {
  impl_->run(impl_->calls().all_gather(input, output, count, type, options), options.timeout);
}

void Group::gather(const void* input, void* output, std::size_t count, DataType type, int root,
                   const CallOptions& options) {
  impl_->run(impl_->calls().gather(input, output, count, type, root, options), options.timeout);
}

void Group::scatter(const void* input, void* output, std::size_t count, DataType type, int root,
                    const CallOptions& options) {
  impl_->run(impl_->calls().scatter(input, output, count, type, root, options), options.timeout);
}

void Group::all_to_all(const void* input, void* output, std::size_t count, DataType type,
                       const CallOptions& options) {
  impl_->run(impl_->calls().all_to_all(input, output, count, type, options), options.timeout);
}

void Group::reduce_scatter_v(std::span<const Piece> inputs, Piece output, DataType type,
                             const ReduceOptions& options) {
  impl_->run(impl_->calls().reduce_scatter_v(inputs, output, type, options), options.timeout);
}

void Group::all_gather_v(Piece input, std::span<const Piece> outputs, DataType type,
                         const CallOptions& options) {
  impl_->run(impl_->calls().all_gather_v(input, outputs, type, options), options.timeout);
}

void Group::gather_v(Piece input, std::span<const Piece> outputs, DataType type, int root,
                     const CallOptions& options) {
  impl_->run(impl_->calls().gather_v(input, outputs, type, root, options), options.timeout);
}

void Group::scatter_v(std::span<const Piece> inputs, Piece output, DataType type, int root,
                      const CallOptions& options) {
  impl_->run(impl_->calls().scatter_v(inputs, output, type, root, options), options.timeout);
}

void Group::all_to_all_v(std::span<const Piece> inputs, std::span<const Piece> outputs,
                         DataType type, const CallOptions& options) {
  impl_->run(impl_->calls().all_to_all_v(inputs, outputs, type, options), options.timeout);
}

void Group::all_reduce_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                                 DataType type, const ReduceOptions& options) {
  impl_->run(impl_->calls().all_reduce_coalesced(inputs, outputs, type, options), options.timeout);
}

void Group::reduce_scatter_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                                     DataType type, const ReduceOptions& options) {
  impl_->run(impl_->calls().reduce_scatter_coalesced(inputs, outputs, type, options),
             options.timeout);
}

void Group::broadcast_coalesced(std::span<const Piece> pieces, DataType type, int root,
                                const CallOptions& options) {
  impl_->run(impl_->calls().broadcast_coalesced(pieces, type, root, options), options.timeout);
}

void Group::all_gather_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                                 DataType type, const CallOptions& options) {
  impl_->run(impl_->calls().all_gather_coalesced(inputs, outputs, type, options), options.timeout);
}

void Group::barrier(const CallOptions& options) {
  impl_->run(impl_->calls().barrier(OpKind::kBarrier, options), options.timeout);
}

void Group::monitored_barrier(const CallOptions& options) {
  impl_->run(impl_->calls().barrier(OpKind::kMonitoredBarrier, options), options.timeout);
}

Work Group::all_reduce_async(const void* input, void* output, std::size_t count, DataType type,
                             const ReduceOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().all_reduce(input, output, count, type, options),
                           options.timeout, std::move(done)));
}

Work Group::reduce_async(const void* input, void* output, std::size_t count, DataType type,
                         int root, const ReduceOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().reduce(input, output, count, type, root, options),
                           options.timeout, std::move(done)));
}

Work Group::reduce_scatter_async(const void* input, void* output, std::size_t count, DataType type,
                                 const ReduceOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().reduce_scatter(input, output, count, type, options),
                           options.timeout, std::move(done)));
}

Work Group::broadcast_async(const void* input, void* output, std::size_t count, DataType type,
                            int root, const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().broadcast(input, output, count, type, root, options),
                           options.timeout, std::move(done)));
}

Work Group::all_gather_async(const void* input, void* output, std::size_t count, DataType type,
                             const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().all_gather(input, output, count, type, options),
                           options.timeout, std::move(done)));
}

Work Group::gather_async(const void* input, void* output, std::size_t count, DataType type,
                         int root, const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().gather(input, output, count, type, root, options),
                           options.timeout, std::move(done)));
}

Work Group::scatter_async(const void* input, void* output, std::size_t count, DataType type,
                          int root, const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().scatter(input, output, count, type, root, options),
                           options.timeout, std::move(done)));
}

Work Group::all_to_all_async(const void* input, void* output, std::size_t count, DataType type,
                             const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().all_to_all(input, output, count, type, options),
                           options.timeout, std::move(done)));
}

Work Group::reduce_scatter_v_async(std::span<const Piece> inputs, Piece output, DataType type,
                                   const ReduceOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().reduce_scatter_v(inputs, output, type, options),
                           options.timeout, std::move(done)));
}

Work Group::all_gather_v_async(Piece input, std::span<const Piece> outputs, DataType type,
                               const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().all_gather_v(input, outputs, type, options),
                           options.timeout, std::move(done)));
}

Work Group::gather_v_async(Piece input, std::span<const Piece> outputs, DataType type, int root,
                           const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().gather_v(input, outputs, type, root, options),
                           options.timeout, std::move(done)));
}

Work Group::scatter_v_async(std::span<const Piece> inputs, Piece output, DataType type, int root,
                            const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().scatter_v(inputs, output, type, root, options),
                           options.timeout, std::move(done)));
}

Work Group::all_to_all_v_async(std::span<const Piece> inputs, std::span<const Piece> outputs,
                               DataType type, const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().all_to_all_v(inputs, outputs, type, options),
                           options.timeout, std::move(done)));
}

Work Group::all_reduce_coalesced_async(std::span<const Piece> inputs,
                                       std::span<const Piece> outputs, DataType type,
                                       const ReduceOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().all_reduce_coalesced(inputs, outputs, type, options),
                           options.timeout, std::move(done)));
}

Work Group::reduce_scatter_coalesced_async(std::span<const Piece> inputs,
                                           std::span<const Piece> outputs, DataType type,
                                           const ReduceOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().reduce_scatter_coalesced(inputs, outputs, type, options),
                           options.timeout, std::move(done)));
}

Work Group::broadcast_coalesced_async(std::span<const Piece> pieces, DataType type, int root,
                                      const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().broadcast_coalesced(pieces, type, root, options),
                           options.timeout, std::move(done)));
}

Work Group::all_gather_coalesced_async(std::span<const Piece> inputs,
                                       std::span<const Piece> outputs, DataType type,
                                       const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().all_gather_coalesced(inputs, outputs, type, options),
                           options.timeout, std::move(done)));
}

Work Group::barrier_async(const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().barrier(OpKind::kBarrier, options), options.timeout,
                           std::move(done)));
}

Work Group::monitored_barrier_async(const CallOptions& options, Callback done) {
  return Work(impl_->issue(impl_->calls().barrier(OpKind::kMonitoredBarrier, options),
                           options.timeout, std::move(done)));
}

shm::Block Group::allocate(std::size_t bytes) { return shm::Fabric::instance().allocate(bytes); }
void Group::abort(const std::string& why) { impl_->medium().abort(why); }
void Group::close() { impl_->close(); }
EventHandle Group::on_event(EventCallback callback) {
  return impl_->observer().on_event(std::move(callback));
}
const std::shared_ptr<Medium>& Group::medium() const { return impl_->shared_medium(); }
bool Group::broken() const { return impl_->medium().broken(); }

std::optional<ErrorKind> Group::failure() const { return impl_->medium().failure(); }

std::uint64_t Group::last_issued() const { return impl_->last_issued(); }

std::vector<int> Group::lost_ranks() const { return impl_->medium().lost_ranks(); }

std::vector<int> Group::late_ranks() const { return impl_->medium().late_ranks(); }
std::uint64_t Group::last_completed() const { return impl_->medium().last_completed(); }

Transfer Group::Impl::transfer(const Message& message) const {
  const bool sends = message.kind == Message::Kind::kSend;
  const auto refuse = [&](const auto&... why) {
    fail(ErrorKind::kInvalidArgument, sends ? "send, " : "recv, ", describe(), ": ", why...);
  };
  if (static_cast<int>(message.type) >= kDataTypes) refuse("unknown element type");
  if (message.count > SIZE_MAX / 2 / size_of(message.type)) refuse("the count is too large");
  if (message.count != 0 && !message.data) refuse("the buffer is null");
  const bool any = !sends && message.peer == kAnyRank;
  if (!any && (message.peer < 0 || message.peer >= medium_->size())) {
    refuse("there is no rank ", message.peer);
  }
  Transfer transfer;
  transfer.sends = sends;
  transfer.data = static_cast<std::byte*>(message.data);
  transfer.bytes = message.count * size_of(message.type);
  transfer.type = message.type;
  transfer.peer = message.peer;
  transfer.tag = message.tag;
  return transfer;
}

namespace {

Message send_of(const void* data, std::size_t count, DataType type, int target,
                const MessageOptions& options) {
  return {Message::Kind::kSend, const_cast<void*>(data), count, type, target, options.tag};
}

Message receive_of(void* data, std::size_t count, DataType type, int source,
                   const MessageOptions& options) {
  return {Message::Kind::kReceive, data, count, type, source, options.tag};
}

// Called back once, when the last of several transfers is done, with the first error.
Group::Callback last_of(std::size_t count, Group::Callback done) {
  struct State {
    std::mutex mutex;
    std::size_t left;
    std::exception_ptr error;
    Group::Callback done;
  };
  auto state = std::make_shared<State>();
  state->left = count;
  state->done = std::move(done);
  return [state](const std::exception_ptr& error) {
    {
      const std::lock_guard lock(state->mutex);
      if (error && !state->error) state->error = error;
      if (--state->left != 0) return;
    }
    state->done(state->error);
  };
}

}  // namespace

void Group::send(const void* data, std::size_t count, DataType type, int target,
                 const MessageOptions& options) {
  Transfer transfer = impl_->transfer(send_of(data, count, type, target, options));
  if (impl_->messages().try_send(transfer)) return impl_->observer().note(transfer);
  impl_->run(transfer, impl_->observer().begin(transfer), options.timeout);
}

int Group::recv(void* data, std::size_t count, DataType type, int source,
                const MessageOptions& options) {
  Transfer transfer = impl_->transfer(receive_of(data, count, type, source, options));
  const auto seen = impl_->observer().begin(transfer);
  if (impl_->messages().try_receive(transfer)) {
    impl_->observer().end(seen);
  } else {
    impl_->run(transfer, seen, options.timeout);
  }
  return transfer.source;
}

void Group::batch(std::span<const Message> messages, std::chrono::nanoseconds timeout) {
  std::vector<Transfer> transfers;
  transfers.reserve(messages.size());
  const Deadline deadline = impl_->deadline(timeout);
  for (const Message& message : messages) {
    transfers.push_back(impl_->transfer(message));
    transfers.back().deadline = deadline;
  }
  std::vector<Observer::Seen> seen;
  for (const Transfer& transfer : transfers) seen.push_back(impl_->observer().begin(transfer));
  const auto tell = [&](const std::exception_ptr& error) {
    for (std::size_t i = 0; i < seen.size(); ++i) {
      impl_->observer().end(seen[i], transfers[i].done ? transfers[i].error : error);
    }
  };
  try {
    impl_->messages().run(transfers);
  } catch (...) {
    tell(std::current_exception());
    throw;
  }
  tell(nullptr);
}

Work Group::send_async(const void* data, std::size_t count, DataType type, int target,
                       const MessageOptions& options, Callback done) {
  const Message message = send_of(data, count, type, target, options);
  return batch_async({&message, 1}, options.timeout, std::move(done));
}

Work Group::recv_async(void* data, std::size_t count, DataType type, int source,
                       const MessageOptions& options, Callback done) {
  const Message message = receive_of(data, count, type, source, options);
  return batch_async({&message, 1}, options.timeout, std::move(done));
}

Work Group::batch_async(std::span<const Message> messages, std::chrono::nanoseconds timeout,
                        Callback done) {
  auto operation = std::make_shared<Work::Messages>(impl_);
  const Deadline deadline = impl_->deadline(timeout);
  for (const Message& message : messages) {
    operation->transfers.push_back(std::make_shared<Transfer>(impl_->transfer(message)));
    operation->transfers.back()->deadline = deadline;
  }
  if (done && messages.empty()) done(nullptr);
  const Callback each =
      done && !messages.empty() ? last_of(messages.size(), std::move(done)) : nullptr;
  Observer& observer = impl_->observer();  // outlives the messages, which closing the group ends
  for (const auto& transfer : operation->transfers) {
    transfer->callback = [&observer, seen = observer.begin(*transfer),
                          each](const std::exception_ptr& error) {
      observer.end(seen, error);
      if (each) each(error);
    };
  }
  impl_->messages().start(operation->transfers);
  return Work(operation);
}

bool Work::Collective::is_done() { return group->is_done(*this); }
bool Work::Collective::wait_until(const Deadline& deadline) { return group->wait(*this, deadline); }

bool Work::Messages::is_done() {
  for (const auto& transfer : transfers) {
    if (!group->messages().is_done(*transfer)) return false;
  }
  return true;
}

bool Work::Messages::wait_until(const Deadline& deadline) {
  // All of them, also after an error: their buffers are in use until they are done.
  std::exception_ptr first;
  for (const auto& transfer : transfers) {
    try {
      if (!group->messages().wait(*transfer, deadline)) return false;
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return true;
}

int Work::Messages::sender() {
  if (transfers.size() != 1 || !is_done()) return -1;
  return transfers.front()->source;
}

std::uint64_t Work::number() const { return operation_->sequence(); }
bool Work::done() const { return operation_->is_done(); }
bool Work::wait(std::chrono::nanoseconds timeout) {
  return operation_->wait_until(Deadline::after(timeout));
}
void Work::wait() { operation_->wait_until(Deadline::never()); }
int Work::source() const { return operation_->sender(); }

}  // namespace convoy::coll
