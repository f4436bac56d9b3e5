#include "coll/group.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/guarded.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/thread.h"
#include "coll/group_impl.h"
#include "coll/shared_memory.h"
#include "os/quick_clock.h"
#include "store/ended.h"

namespace convoy::coll {

void Group::Impl::fail_in_child(std::string_view operation) const {
  fail(ErrorKind::kUnsupported, operation, ", ", describe(), ": this process (pid ", ::getpid(),
       ") is a forked child of the rank, perhaps a worker of a DataLoader; only the process that "
       "made a group can use it: call it in the rank itself, or start the worker by exec "
       "(convoy::spawn, multiprocessing's \"spawn\") and make a group there");
}

void Group::Impl::check_open(OpKind op) const {
  if (!closed_) return;
  fail(ErrorKind::kInvalidArgument, to_string(op), ", ", describe(),
       ": the group was closed on this rank (shutdown()); make a new one");
}

// The fast path: nothing is queued and nobody runs, so this thread runs its operation itself.
void Group::Impl::run(Call call) {
  check_process(to_string(call.signature.op));
  const auto now = QuickClock::now();
  call.deadline = deadline(call.timeout, now);
  std::uint64_t number = 0;
  {
    std::unique_lock lock(mutex_);
    check_open(call.signature.op);
    if (busy_ || !queue_.empty()) {
      lock.unlock();
      const auto operation = issue(std::move(call), nullptr);
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

std::shared_ptr<Work::Collective> Group::Impl::issue(Call call, Callback done) {
  check_process(to_string(call.signature.op));
  const auto now = QuickClock::now();
  call.deadline = deadline(call.timeout, now);
  auto operation = std::make_shared<Work::Collective>(shared_from_this());
  operation->call = std::move(call);
  if (Shape& shape = operation->call.shape; shape.dims != 0) {  // the caller's goes
    operation->sizes.assign(shape.sizes, shape.sizes + shape.dims);
    shape.sizes = operation->sizes.data();
  }
  operation->callback = std::move(done);
  {
    std::unique_lock lock(mutex_);
    check_open(operation->call.signature.op);
    start_progress();  // before it has a number: other ranks know nothing of it if this throws
    operation->number = ++last_number_;
    operation->seen =
        observer_.begin(operation->call, operation->number, now, Observer::Turn::kLater);
    queue_.push_back(operation);
    // A callback has the turn until it returns. It may be about to wait for this operation, by ways
    // that are not ours (a future of torch's): it runs at once, after what was issued before. Not
    // without end, for callbacks that go on and on with one more operation: then others run them.
    constexpr int kMostNested = 16;
    if (calls_back_here()) {
      if (calling_back_->depth >= kMostNested) give_turn();
      while (!operation->done && calls_back_here()) run_next(lock);
      if (operation->done) return operation;
    }
    try {
      start_progress();  // the turn was given away: another one
    } catch (const Error& error) {
      log_warn(error.what(), "; asynchronous operations run when somebody waits for them");
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

void Group::Impl::start_progress() {
  if (progress_.joinable()) return;
  progress_ = start_thread([self = shared_from_this()] { self->progress(); });
}

// The callbacks of this thread go on without the turn. Others then run what comes next, also their
// callbacks.
void Group::Impl::give_turn() {
  for (CallingBack* call = std::exchange(calling_back_, nullptr); call; call = call->outer) {
    call->gave_turn = true;
  }
  busy_ = false;
  if (progress_.get_id() == std::this_thread::get_id()) retired_.push_back(std::move(progress_));
}

// The turn passes on after the callback, so that callbacks come in order too; and where this runs
// inside another callback, it stays with that one.
void Group::Impl::finish(Work::Collective& operation, const std::exception_ptr& error) {
  Callback callback;
  CallingBack call{.thread = std::this_thread::get_id()};
  {
    const std::lock_guard lock(mutex_);
    operation.done = true;
    operation.error = error;
    callback = std::exchange(operation.callback, nullptr);
    call.outer = calling_back_;
    if (call.outer) call.depth = call.outer->depth + 1;
    if (callback) calling_back_ = &call;
  }
  changed_.notify_all();
  // Also if the callback throws, which it must not: others wait for their turn.
  struct End {
    Impl& impl;
    CallingBack& call;
    ~End() { impl.end_callback(call); }
  } const end{*this, call};
  if (callback) callback(error);
}

void Group::Impl::end_callback(CallingBack& call) {
  {
    const std::lock_guard lock(mutex_);
    if (call.gave_turn) return;
    calling_back_ = call.outer;
  }
  if (!call.outer) release_turn();
}

bool Group::Impl::is_done(const Work::Collective& operation) {
  check_process("done");
  const std::lock_guard lock(mutex_);
  return operation.done;
}

bool Group::Impl::wait(Work::Collective& operation, const Deadline& deadline) {
  check_process("wait");
  std::unique_lock lock(mutex_);
  const auto my_turn = [&] {
    return !busy_ && !queue_.empty() && queue_.front().get() == &operation;
  };
  while (!operation.done) {
    // In a callback nobody else can run what it waits for.
    if (calls_back_here() && !queue_.empty()) {
      run_next(lock);
      continue;
    }
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
    // A callback has given the turn away, and another thread runs in the place of this one. Nobody
    // else joins it before the group ends: it must not be kept until then.
    const auto mine = std::ranges::find(retired_, std::this_thread::get_id(), &std::thread::get_id);
    if (mine == retired_.end()) continue;
    mine->detach();
    retired_.erase(mine);
    return;
  }
}

void Group::Impl::close() {
  if (!is_here()) return;  // the rank is the parent's; what this copy has is left alone
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  messages_.close();
  // What runs fails now; what is queued fails when its turn comes, on the progress thread.
  medium_->close();
  changed_.notify_all();
  std::vector<std::thread> threads;
  bool in_callback = false;
  {
    const std::lock_guard lock(mutex_);
    threads.swap(retired_);
    if (progress_.joinable()) threads.push_back(std::move(progress_));
    in_callback = calls_back_here();
  }
  for (std::thread& thread : threads) {
    if (in_callback || thread.get_id() == std::this_thread::get_id()) {
      thread.detach();  // a callback destroys the group: the thread keeps what it needs and ends
    } else {
      thread.join();
    }
  }
}

bool Group::Impl::settle(const Deadline& deadline) {
  messages_.settle();
  std::unique_lock lock(mutex_);
  // A callback has the turn, but its operation is over.
  const auto idle = [&] { return !busy_ || calling_back_ != nullptr; };
  ++waiting_;
  bool settled = true;
  if (deadline.is_never()) {
    changed_.wait(lock, idle);
  } else {
    settled = changed_.wait_until(lock, deadline.when(), idle);
  }
  --waiting_;
  return settled;
}

namespace {

using std::chrono::milliseconds;

// For ranks to notice that a group is broken: what they do meanwhile is a copy, or a sum.
constexpr milliseconds kNoticing(3000);

// The ranks of this process, of all groups that share memory. A thread cannot be fenced: who goes
// on without a rank of the same process waits until that rank is out of its operation.
Guarded<std::vector<std::weak_ptr<Group::Impl>>>& ranks_here() {
  static auto* const ranks = new Guarded<std::vector<std::weak_ptr<Group::Impl>>>;
  return *ranks;
}

}  // namespace

void Group::settle(const Deadline& deadline) {
  impl_->check_process("settle");
  const auto mesh = mesh_of(impl_->medium());
  if (!mesh) return;
  std::vector<std::shared_ptr<Impl>> ranks;
  {
    auto all = ranks_here().lock();
    for (const auto& weak : *all) {
      auto rank = weak.lock();
      const auto theirs = rank ? mesh_of(rank->medium()) : nullptr;
      if (theirs && theirs->control().data() == mesh->control().data()) {
        ranks.push_back(std::move(rank));
      }
    }
  }
  for (const auto& rank : ranks) {
    if (rank->settle(deadline)) continue;
    fail(ErrorKind::kTimeout, impl_->describe(), ": an operation of rank ", rank->medium().rank(),
         " is still under way at the deadline");
  }
}

void Group::fence(std::span<const Id> members, const Deadline& deadline, Spare spare) {
  impl_->check_process("fence");
  const auto mesh = mesh_of(impl_->medium());
  if (!mesh) return;
  const auto patience =
      std::min(deadline, Deadline::after(spare == Spare::kQuiet ? kNoticing : milliseconds(0)));
  std::vector<std::shared_ptr<shm::Peer>> outsiders;
  std::string ranks;
  for (int r = 0; r < size(); ++r) {
    auto peer = mesh->peers()[static_cast<std::size_t>(r)];
    if (!peer || std::ranges::find(members, peer->info().id) != members.end()) continue;
    while (!peer->lost() && !has_given_up(impl_->medium(), r) && !patience.expired()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (spare == Spare::kQuiet && has_given_up(impl_->medium(), r)) continue;
    ranks += concat(ranks.empty() ? "" : ", ", r);
    outsiders.push_back(std::move(peer));
  }
  if (outsiders.empty()) return;
  try {
    shm::Fabric::instance().fence(
        outsiders,
        concat("the other ranks of group \"", name(), "\" go on without rank ", ranks,
               ", and nobody else may write into their memory"),
        deadline);
  } catch (const Error& error) {
    throw Error(error.kind(), concat("going on without rank ", ranks, ", ", impl_->describe(), ": ",
                                     error.what()));
  }
}

std::vector<Id> Group::processes() const {
  impl_->check_process("processes");
  std::vector<Id> found;
  if (const auto mesh = mesh_of(impl_->medium())) {
    for (int r = 0; r < size(); ++r) found.push_back(mesh->process(r).id);
  }
  return found;
}

namespace {

std::map<int, std::string> losses_of(Group::Impl& group) {
  std::map<int, std::string> losses;
  const auto mesh = mesh_of(group.medium());
  for (int r = 0; mesh && r < mesh->size(); ++r) {
    const auto& who = mesh->process(r);
    if (const auto loss = mesh->loss(r)) {
      losses.emplace(r, concat("(pid ", who.pid, ", host ", who.host, ") ", *loss));
    }
  }
  return losses;
}

// Of a group that is being made.
std::map<int, std::string> known_ends(int rank, int size, const GroupOptions& options) {
  std::map<int, std::string> ended;
  if (options.ended) ended = options.ended();
  const auto& ranks = options.job_ranks;
  if (ranks.empty()) {
    ended.merge(ended_ranks(rank, size));
    return ended;
  }
  std::vector<std::shared_ptr<Group::Impl>> groups;
  {
    auto all = ranks_here().lock();
    for (const auto& weak : *all) {
      if (auto group = weak.lock()) groups.push_back(std::move(group));
    }
  }
  for (const auto& group : groups) {
    const auto& theirs = group->job_ranks();
    // Ranks may be threads of one process.
    const auto self = static_cast<std::size_t>(group->medium().rank());
    if (self >= theirs.size() || theirs[self] != ranks[static_cast<std::size_t>(rank)]) continue;
    for (const auto& [lost, how] : losses_of(*group)) {
      const auto found = std::ranges::find(ranks, theirs[static_cast<std::size_t>(lost)]);
      if (found != ranks.end()) ended.emplace(static_cast<int>(found - ranks.begin()), how);
    }
  }
  ended.merge(ended_ranks(rank, ranks));
  return ended;
}

}  // namespace

std::map<int, std::string> Group::losses() const {
  impl_->check_process("losses");
  return losses_of(*impl_);
}

std::shared_ptr<Group> Group::create(const std::shared_ptr<Store>& store, int rank, int size,
                                     const GroupOptions& options) {
  if (!store) fail(ErrorKind::kInvalidArgument, "group \"", options.name, "\": no store");
  if (options.threads < 1 || options.threads > 64) {
    fail(ErrorKind::kInvalidArgument, "group \"", options.name, "\": ", options.threads,
         " threads; 1 to 64 are possible");
  }
  if (!options.job_ranks.empty() && options.job_ranks.size() != static_cast<std::size_t>(size)) {
    fail(ErrorKind::kInvalidArgument, "group \"", options.name, "\": ", options.job_ranks.size(),
         " numbers in the job for ", size, " ranks");
  }
  return over(
      make_shared_memory(*store, rank, size,
                         {.name = options.name,
                          .threads = options.threads,
                          .read_private = options.read_private,
                          .ended = [&, rank, size] { return known_ends(rank, size, options); },
                          .deadline = Deadline::after(options.timeout)}),
      options.timeout, options.job_ranks);
}

std::shared_ptr<Group> Group::over(std::shared_ptr<Medium> medium, std::chrono::nanoseconds timeout,
                                   std::vector<int> job_ranks) {
  const bool shares = mesh_of(*medium) != nullptr;
  std::shared_ptr<Impl> impl(new Impl(std::move(medium), timeout, std::move(job_ranks)),
                             DeleteAtHome());
  if (shares) {
    auto ranks = ranks_here().lock();
    std::erase_if(*ranks, [](const auto& weak) { return weak.expired(); });
    ranks->push_back(impl);
  }
  return std::shared_ptr<Group>(new Group(std::move(impl)));
}

Group::~Group() { impl_->close(); }

int Group::rank() const { return impl_->medium().rank(); }
int Group::size() const { return impl_->medium().size(); }
const std::string& Group::name() const { return impl_->medium().name(); }

const CallMaker& Group::calls() const { return impl_->calls(); }
void Group::run(Call call) { impl_->run(std::move(call)); }
Work Group::start(Call call, Callback done) {
  return Work(impl_->issue(std::move(call), std::move(done)));
}

void Group::check_process(std::string_view operation) const { impl_->check_process(operation); }
shm::Block Group::allocate(std::size_t bytes) {
  impl_->check_process("allocate");
  return shm::Fabric::instance().allocate(bytes);
}
void Group::abort(const std::string& why) { impl_->checked_medium("abort").abort(why); }
void Group::close() { impl_->close(); }
EventHandle Group::on_event(EventCallback callback) {
  impl_->check_process("on_event");
  return impl_->observer().on_event(std::move(callback));
}
const std::shared_ptr<Medium>& Group::medium() const { return impl_->shared_medium(); }
bool Group::broken() const { return impl_->checked_medium("broken").broken(); }

std::optional<ErrorKind> Group::failure() const {
  return impl_->checked_medium("failure").failure();
}

std::uint64_t Group::last_issued() const { return impl_->last_issued(); }

std::vector<int> Group::lost_ranks() const {
  return impl_->checked_medium("lost_ranks").lost_ranks();
}

std::vector<int> Group::late_ranks() const {
  return impl_->checked_medium("late_ranks").late_ranks();
}
std::uint64_t Group::last_completed() const {
  return impl_->checked_medium("last_completed").last_completed();
}

bool Work::Collective::is_done() { return group->is_done(*this); }
bool Work::Collective::wait_until(const Deadline& deadline) { return group->wait(*this, deadline); }

std::uint64_t Work::number() const { return operation_->sequence(); }
bool Work::done() const { return operation_->is_done(); }
bool Work::wait(std::chrono::nanoseconds timeout) {
  return operation_->wait_until(Deadline::after(timeout));
}
void Work::wait() { operation_->wait_until(Deadline::never()); }
int Work::source() const { return operation_->sender(); }

}  // namespace convoy::coll
