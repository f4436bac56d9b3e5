#include "coll/window.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "base/error.h"
#include "coll/shared_memory.h"

namespace convoy::coll {

// The control memory, which rank 0 owns: a Head for each rank, then for each rank the signals that
// came from each other.
struct alignas(kLine) Window::Head {
  // The owner sleeps here; rung by whoever signals it, and when somebody is gone.
  WaitWord bell;
  // The owner takes part no more. Release by the owner.
  std::atomic<std::uint32_t> left{0};
  // Of rank 0's head: names this window as long as the memory is its; 0 afterwards.
  std::atomic<std::uint64_t> nonce{0};
};

// The watch thread's way to wake this rank.
class Window::Bell final : public shm::Alarm {
 public:
  explicit Bell(WaitWord& word) : word_(&word) {}
  void ring() noexcept override {
    const std::lock_guard lock(mutex_);
    if (word_) convoy::ring(*word_);
  }
  void end() {
    const std::lock_guard lock(mutex_);
    word_ = nullptr;
  }

 private:
  std::mutex mutex_;
  WaitWord* word_;  // guarded by mutex_; nullptr once the window is gone
};

namespace {

constexpr std::size_t kCountBytes = sizeof(std::atomic<std::uint64_t>);

// What ranks tell each other when they make a window.
struct Introduction {
  shm::Location memory;
  std::uint64_t bytes = 0;
  shm::Location control;    // of rank 0
  std::uint64_t nonce = 0;  // of rank 0
};
constexpr std::size_t kWords = sizeof(Introduction) / sizeof(std::uint64_t);
static_assert(sizeof(Introduction) == kWords * sizeof(std::uint64_t));

// Windows whose control memory is this process's and still theirs. Ranks that are threads of it ask
// here: they have no mapping of their own that would keep that memory.
Guarded<std::set<std::uint64_t>>& live_windows() {
  static auto* const live = new Guarded<std::set<std::uint64_t>>;
  return *live;
}

}  // namespace

std::shared_ptr<Window> Window::create(Group& group, std::span<std::byte> memory,
                                       std::chrono::nanoseconds timeout) {
  group.check_process("window");
  auto mesh = mesh_of(*group.medium());
  if (!mesh) {
    fail(ErrorKind::kUnsupported, "window, group \"", group.name(),
         "\": its ranks do not share memory; a window needs backend \"convoy\"");
  }
  std::shared_ptr<Window> window(new Window(group, std::move(mesh)));
  window->join(group, memory, timeout);
  return window;
}

Window::Window(Group& group, std::shared_ptr<Mesh> mesh)
    : name_(group.name()),
      rank_(group.rank()),
      mesh_(std::move(mesh)),
      policy_(WaitPolicy::for_ranks(mesh_->size(), usable_cores(mesh_->process(rank_).cores))),
      parts_(static_cast<std::size_t>(mesh_->size())),
      taken_(static_cast<std::size_t>(mesh_->size())),
      told_(static_cast<std::size_t>(mesh_->size())) {}

void Window::join(Group& group, std::span<std::byte> memory, std::chrono::nanoseconds timeout) {
  auto& fabric = shm::Fabric::instance();
  const auto n = parts_.size();
  Introduction mine;
  mine.bytes = memory.size();
  if (!memory.empty()) mine.memory = fabric.locate(memory.data(), memory.size());
  if (rank_ == 0) {
    control_block_ = fabric.allocate(n * (sizeof(Head) + n * kCountBytes));
    std::memset(control_block_.data(), 0, control_block_.size());
    nonce_ = random_u64() | 1;
    live_windows().lock()->insert(nonce_);
    mine.control = control_block_.location();
    mine.nonce = nonce_;
    reinterpret_cast<Head*>(control_block_.data())->nonce.store(nonce_, std::memory_order_release);
  }
  std::vector<Introduction> all(n);
  const CallOptions call{.timeout = timeout};
  group.all_gather(&mine, all.data(), kWords, DataType::kU64, call);
  for (std::size_t r = 0; r < n; ++r) {
    if (all[r].bytes == 0 || all[r].memory) continue;
    fail(ErrorKind::kInvalidArgument, prefix("window"), "the memory of rank ", r,
         " is private; take it from group.allocate()");
  }
  const auto deadline =
      timeout.count() == 0 ? Deadline::after(Store::kDefaultTimeout) : Deadline::after(timeout);
  const auto peers = mesh_->peers();
  const auto map = [&](std::size_t rank, const shm::Location& location, std::size_t bytes) {
    Part part;
    part.memory = {mesh_->resolve(static_cast<int>(rank), location, bytes, deadline), bytes};
    if (peers[rank]) part.mapping = peers[rank]->keep(location.segment);
    return part;
  };
  const Part control = map(0, all[0].control, n * (sizeof(Head) + n * kCountBytes));
  control_ = control.memory.data();
  control_mapping_ = control.mapping;
  nonce_ = all[0].nonce;
  for (std::size_t r = 0; r < n; ++r) {
    if (all[r].bytes != 0) parts_[r] = map(r, all[r].memory, all[r].bytes);
  }
  bell_ = std::make_shared<Bell>(head(rank_).bell);
  mesh_->subscribe(bell_);
  group.barrier(call);  // who leaves early must find everybody's mapping made
}

// Others may still write into this rank's memory, and look at the control memory: both are used
// again when all have left or died.
Window::~Window() {
  if (!control_ || !home_.is_here()) return;  // not made; a forked child's copy
  bell_->end();
  const auto released = [peers = mesh_->peers(), mapping = control_mapping_, base = control_,
                         nonce = nonce_, owner = rank_ == 0] {
    if (!peers[0] && !live_windows().lock()->contains(nonce)) return true;  // all were gone
    auto* const heads = reinterpret_cast<Head*>(base);
    if (heads[0].nonce.load(std::memory_order_acquire) != nonce) return true;
    for (std::size_t r = 0; r < peers.size(); ++r) {
      const bool dead = peers[r] && peers[r]->lost();
      if (!dead && heads[r].left.load(std::memory_order_acquire) == 0) return false;
    }
    if (owner) {
      heads[0].nonce.store(0, std::memory_order_release);
      live_windows().lock()->erase(nonce);
    }
    return true;
  };
  auto& fabric = shm::Fabric::instance();
  const auto& own = parts_[static_cast<std::size_t>(rank_)].memory;
  if (!own.empty()) {
    if (const auto place = fabric.locate(own.data(), own.size())) {
      fabric.quarantine(place, released);
    }
  }
  if (control_block_) fabric.quarantine(control_block_.location(), released);
  head(rank_).left.store(1, std::memory_order_release);
  for (int r = 0; r < size(); ++r) ring(head(r).bell);
}

Window::Head& Window::head(int rank) const { return reinterpret_cast<Head*>(control_)[rank]; }

std::atomic<std::uint64_t>& Window::count(int from, int to) const {
  auto* const counts =
      reinterpret_cast<std::atomic<std::uint64_t>*>(control_ + parts_.size() * sizeof(Head));
  return counts[static_cast<std::size_t>(to) * parts_.size() + static_cast<std::size_t>(from)];
}

std::string Window::prefix(const char* operation) const {
  return concat(operation, ", group \"", name_, "\", rank ", rank_, " of ", size(), ": ");
}

void Window::check_call(const char* operation, int rank) const {
  if (!home_.is_here()) {
    fail(ErrorKind::kUnsupported, prefix(operation),
         "this process is a forked child of the rank, and only the process that made a window can "
         "use it; memory that at() gave before the fork can be read and written");
  }
  if (rank >= 0 && rank < size()) return;
  fail(ErrorKind::kInvalidArgument, prefix(operation), "there is no rank ", rank);
}

std::string Window::absence(int rank) const {
  if (rank == rank_) return "";
  const auto who = [&] { return concat("rank ", rank, " (pid ", mesh_->process(rank).pid, ") "); };
  if (head(rank).left.load(std::memory_order_acquire) != 0) return who() + "has left the window";
  if (const auto loss = mesh_->loss(rank)) return who() + *loss;
  return "";
}

void Window::fail_absent(const char* operation, int rank) const {
  told_[static_cast<std::size_t>(rank)].store(true, std::memory_order_relaxed);
  fail(ErrorKind::kPeerLost, prefix(operation), absence(rank));
}

std::span<std::byte> Window::at(int rank) const {
  check_call("window", rank);
  if (!absence(rank).empty()) fail_absent("window", rank);
  return parts_[static_cast<std::size_t>(rank)].memory;
}

void Window::signal(int rank) const {
  check_call("signal", rank);
  if (!absence(rank).empty()) fail_absent("signal", rank);
  count(rank_, rank).fetch_add(1, std::memory_order_acq_rel);
  ring(head(rank).bell);
}

// Deaths of which this window had not told when a wait began. All waits that are under way hear of
// one; those that begin later are among the living, and know.
class Window::News {
 public:
  explicit News(const Window& window) : window_(window) {
    for (int r = 0; r < window.size(); ++r) {
      if (window.mesh_->lost(r) && window.told_[static_cast<std::size_t>(r)].load()) {
        old_.push_back(r);
      }
    }
  }
  // A rank; -1: none.
  int look() const {
    for (int r = 0; r < window_.size(); ++r) {
      if (window_.mesh_->lost(r) && std::ranges::find(old_, r) == old_.end()) return r;
    }
    return -1;
  }

 private:
  const Window& window_;
  std::vector<int> old_;  // no memory as long as all live
};

void Window::wait_signal(int rank, const Deadline& deadline) const {
  check_call("wait_signal", rank);
  auto& taken = taken_[static_cast<std::size_t>(rank)];
  auto& sent = count(rank, rank_);
  const auto take = [&] {
    auto seen = taken.load(std::memory_order_relaxed);
    while (seen < sent.load(std::memory_order_acquire)) {
      if (taken.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  };
  if (take()) return;
  const News news(*this);
  int gone = -1;
  const auto ready = [&](std::uint32_t) {
    if (take()) return true;
    // Who waits for a rank that lives hears of other deaths too: it may wait for the dead.
    gone = absence(rank).empty() ? news.look() : rank;
    if (gone < 0) return false;
    // What it had sent before counts.
    if (take()) gone = -1;
    return true;
  };
  if (!wait_until(head(rank_).bell, policy_, deadline, ready)) {
    fail(ErrorKind::kTimeout, prefix("wait_signal"), "Timed out waiting for a signal of rank ",
         rank);
  }
  if (gone >= 0) fail_absent("wait_signal", gone);
}

}  // namespace convoy::coll
