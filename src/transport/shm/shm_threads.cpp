// The shared-memory endpoint: who polls, who sleeps, who is woken.
#include "base/error.h"
#include "base/loop.h"
#include "os/quick_clock.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {
namespace {

// Which endpoint's serving thread this is, and its turn.
struct Serving {
  ShmEndpoint* endpoint = nullptr;
  std::uint64_t turn = 0;
};
constinit thread_local Serving serving_here;

// A sleep that was no longer than this, two wake-ups included, would have been a short spin.
constexpr auto kShortSleep = std::chrono::microseconds(200);
// How often one looks who lingers.
constexpr auto kMoment = std::chrono::microseconds(100);
// What it takes at most of what comes meanwhile.
constexpr int kInPassing = 64;

// The thread that is waited for may be on this core's queue: it was woken by this one, perhaps.
// Linux leaves two threads that yield to each other where they are, for half a second if need be:
// none of them is idle, and both have run just now. Whoever sleeps is woken on a core that is idle.
// So when yields take long, since somebody runs here meanwhile, the next wait is a sleep.
constexpr auto kLongYield = std::chrono::microseconds(2);
constexpr int kMostLongYields = 16;
thread_local int long_yields = 0;  // in a row

// Others want the core for themselves if a yield took as long as this. Linux then runs whoever has
// yielded after all of them, some milliseconds later each time; whoever sleeps runs as soon as it
// is woken. So threads of this endpoint do not spin for some time.
constexpr auto kLongestYield = std::chrono::microseconds(500);

// False: others want the core.
bool relax(int spin) noexcept {
  constexpr int kYieldEvery = 128;
  if (spin % kYieldEvery != kYieldEvery - 1) {
    cpu_relax();
    return true;
  }
  const auto start = QuickClock::now();
  yield_cpu();
  const auto took = QuickClock::now() - start;
  long_yields = took > kLongYield ? long_yields + 1 : 0;
  return took < kLongestYield;
}

// This thread has woken the one that is to answer. Linux puts that on this core's queue if the
// other cores have been idle for long: then nothing comes before this thread makes room. To sleep
// is the way to do that: who yields is behind everybody else for some milliseconds.
thread_local bool woke_somebody = false;

// This thread's, and of which endpoint.
thread_local transport::Endpoint::Attention* attention_here = nullptr;
thread_local const void* attended_here = nullptr;

bool is_crowded() noexcept {
  if (long_yields < kMostLongYields) return false;
  long_yields = 0;
  return true;
}

Deadline earlier(const Deadline& a, const Deadline& b) {
  return a.is_never() || (!b.is_never() && b.when() < a.when()) ? b : a;
}

}  // namespace

bool ShmEndpoint::something(Serve serve) const noexcept {
  return bell_->any() || events_.any() || backlog_.any(serve);
}

// Rings are looked at by whoever waits; the thread that serves does so when nobody does.
bool ShmEndpoint::for_service() const noexcept {
  if (backlog_.any_for_service()) return true;
  if (descriptors_ && descriptors_->any()) return true;
  return !is_attended() && something(Serve::kReplies);
}

// --- those who serve ---

void ShmEndpoint::stop_servants() noexcept {
  servants_.stop();
  bell_.ring_service();
  servants_.join();
}

void ShmEndpoint::hand_over() noexcept {
  if (!home_.is_here() || !options_.service_thread) return;
  {
    const Lock lock(mutex_);  // whoever takes letters has looked whose turn it is
    if (!servants_.offer_turn()) return;
  }
  servants_.announce_turn();
  // If it was idle after all.
  bell_.ring_service();
}

// Before this thread sleeps, here or at another endpoint.
void ShmEndpoint::hand_over_here() noexcept {
  const auto [endpoint, turn] = serving_here;
  if (endpoint && endpoint->servants_.has_turn(turn)) endpoint->hand_over();
}

void ShmEndpoint::nap(const Doorbell::Nap& here, const Deadline& deadline) {
  if (descriptors_) {
    descriptors_->wait(deadline);
  } else {
    here.sleep(deadline);
  }
}

// Without the lock, by the thread that serves.
void ShmEndpoint::look_at_descriptors() {
  if (!descriptors_) return;
  descriptors_->wait(Deadline::at({}));
  descriptors_->run_one();
}

void ShmEndpoint::serve(std::uint64_t turn) {
  set_thread_name("convoy-letters");
  serving_here = {this, turn};
  constexpr int kTimersEvery = 64;
  constexpr unsigned kDescriptorsEvery = 16;
  unsigned polls = 0;
  Watch watched;
  const auto sees = [&] {
    return watched.sees() || bell_->watched.load(std::memory_order_relaxed) != watched.number;
  };
  Handful hand;
  {
    const Lock lock(mutex_);
    if (servants_.has_turn(turn)) backlog_.take_over_hand();
  }
  while (servants_.has_turn(turn)) {
    bool worked = false;
    look_at_descriptors();
    // Who lingers while others come by takes some of what they have left, or they would not come.
    int left = lingering_.is_visited() ? kInPassing : INT_MAX;
    while (((!is_attended() && sees()) || for_service() || timers_.is_due()) && left-- > 0 &&
           servants_.has_turn(turn)) {
      if (descriptors_ && (descriptors_->any() || ++polls % kDescriptorsEvery == 0)) {
        look_at_descriptors();
      }
      Lock lock(mutex_);
      if (!servants_.has_turn(turn)) break;
      if (watched.number != bell_->watched.load()) {
        watched = watched_.watch();
      }
      const Moved moved = poll_one(lock, Serve::kAll, &hand);
      worked |= moved != Moved::kNothing;
      if (moved == Moved::kReply) wake();
      if (moved != Moved::kTaken) continue;
      lock.unlock();
      while (servants_.has_turn(turn)) {
        const PlainLetter* const letter = hand.claim();
        if (!letter) break;
        arrive(*hand.remote, *letter);
      }
    }
    lingering_.begin(*bell_);
    const bool lingers = lingering_.is_on();
    const bool may_spin =
        worked && !lingers && !is_attended() && !is_crowded() && !spins_.core_is_wanted();
    const int spins = may_spin ? spins_.serves().spins() : 0;
    bool came = false;
    bool wanted = false;
    for (int i = 0; i < spins && !came && !wanted; ++i) {
      wanted = !relax(i);
      came = sees() || something(Serve::kAll) || (i % kTimersEvery == 0 && timers_.is_due()) ||
             !servants_.has_turn(turn);
    }
    if (wanted) spins_.leave_core();
    if (came) {
      if (!wanted) spins_.serves().paid();
      continue;
    }
    if (spins != 0) spins_.serves().in_vain();
    watched = {};
    const Doorbell::Nap here(bell_->service);
    bool idle = false;
    {
      const Lock lock(mutex_);  // nobody has a letter in his hand
      idle = servants_.has_turn(turn) &&
             (left < 0 || (!for_service() && (is_attended() || !watched_.sees())));
    }
    if (!idle) continue;
    const auto start = Clock::now();
    if (lingers) {
      nap(here, earlier(timers_.next(), Deadline::at(start + kMoment)));
      lingering_.end_moment(*bell_);
    } else {
      nap(here, timers_.next());
      if (Clock::now() - start < kShortSleep) spins_.serves().paid();
    }
  }
  serving_here = {};
  {
    const Lock lock(mutex_);
    if (backlog_.is_kept(hand)) backlog_.take_over_hand();
  }
  // What woke this thread may have been meant for the next.
  if (descriptors_) write_waker(descriptors_->waker());
}

bool ShmEndpoint::poll(Serve serve) {
  require_home();
  constexpr int kMostAtOnce = 64;
  bool moved = false;
  const auto look = [&] {
    return something(serve) || bell_->watched.load() != 0 ||
           (serve == Serve::kAll && timers_.is_due());
  };
  if (serve == Serve::kAll) look_at_descriptors();
  for (int i = 0; i < kMostAtOnce && look(); ++i) {
    Lock lock(mutex_);
    const Moved what = poll_one(lock, serve);
    if (what == Moved::kNothing) break;
    if (what == Moved::kReply) wake();
    moved = true;
  }
  if (something(Serve::kReplies)) bell_.rouse(true);
  return moved;
}

// A thread in wait() that looks at the doorbell and the watched ring. Senders are told so, unless
// the thread that serves lingers: then they need not know.
class ShmEndpoint::Attendance {
 public:
  explicit Attendance(ShmEndpoint& endpoint) : endpoint_(endpoint), outer_(innermost) {
    if (!outer_ && attended_here == &endpoint) {
      goes_on_ = &attention_here->notes;
      take(*goes_on_);
    } else {
      enter();
    }
    if (outer_) outer_->step_aside(endpoint);
    innermost = this;
  }
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;
  ~Attendance() {
    innermost = outer_;
    if (outer_) outer_->enter();
    if (goes_on_) {
      if (completed) endpoint_.wake_after_delivery();
      goes_on_->covered = counts_on_lingering_;
      goes_on_->quick = quick;
      goes_on_->number = watched.number;
      goes_on_->ring = std::move(watched.ring);
    } else {
      endpoint_.leave_wait(*this);
    }
  }

  static void begin(ShmEndpoint& endpoint, Attention::Notes& notes) noexcept {
    Attendance here(endpoint);
    here.goes_on_ = &notes;
  }
  static void end(ShmEndpoint& endpoint, Attention::Notes& notes) noexcept {
    const Attendance here(endpoint, notes);
  }

  void enter() noexcept {
    counts_on_lingering_ = endpoint_.lingering_.enter();
    if (!counts_on_lingering_) endpoint_.bell_->awake.fetch_add(1);
  }
  // True: somebody else is sure to look at what this thread has not seen.
  bool leave() noexcept {
    if (counts_on_lingering_) {
      endpoint_.lingering_.leave();
    } else {
      endpoint_.bell_->awake.fetch_sub(1);
    }
    return counts_on_lingering_;
  }

  // While it sleeps. Also if whoever is asked whether it is ready throws.
  class Pause {
   public:
    explicit Pause(Attendance& attendance) noexcept : attendance_(attendance) {
      attendance_.leave();
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
    ~Pause() { attendance_.enter(); }

   private:
    Attendance& attendance_;
  };
  // Of this thread: what it attends to while it sleeps somewhere else is nobody's.
  class Absence {
   public:
    Absence() noexcept : away_(innermost) {
      if (away_) away_->step_aside();
      innermost = nullptr;
    }
    Absence(const Absence&) = delete;
    Absence& operator=(const Absence&) = delete;
    ~Absence() {
      innermost = away_;
      if (away_) away_->enter();
    }

   private:
    Attendance* const away_;
  };

  static bool is_here() noexcept { return innermost != nullptr; }

  Watch watched;
  bool completed = false;  // a reply, which others may wait for
  bool quick = false;      // did not sleep

 private:
  Attendance(ShmEndpoint& endpoint, Attention::Notes& notes) noexcept
      : endpoint_(endpoint), outer_(nullptr) {
    take(notes);
  }
  // The inbox waits in a call that it got from here. Others hear of the replies before this one.
  void step_aside() noexcept {
    const bool covered = leave();
    endpoint_.wake();
    if (!covered) endpoint_.leave_to_others(watched);
  }
  // Somebody else looks, if that is there.
  void step_aside(const ShmEndpoint& other) noexcept {
    if (&other != &endpoint_) return step_aside();
    leave();
    endpoint_.wake();
  }
  void take(Attention::Notes& notes) noexcept {
    counts_on_lingering_ = notes.covered;
    quick = notes.quick;
    watched = {std::static_pointer_cast<RingReader>(std::move(notes.ring)), notes.number};
  }

  static constinit thread_local Attendance* innermost;  // the others of this thread do not count

  ShmEndpoint& endpoint_;
  Attendance* const outer_;              // in whose wait() the inbox waits here
  Attention::Notes* goes_on_ = nullptr;  // after this
  bool counts_on_lingering_ = false;
};

constinit thread_local ShmEndpoint::Attendance* ShmEndpoint::Attendance::innermost = nullptr;

void ShmEndpoint::leave_wait(Attendance& attendance) noexcept {
  const bool covered = attendance.leave();
  if (attendance.completed) wake_after_delivery();
  if (covered) return;
  leave_to_others(attendance.watched);
  const bool quick = attendance.quick && options_.service_thread;
  if (lingering_.count_wait(quick)) bell_.ring_service_once();
}

// What this thread would have looked at next is somebody else's now.
void ShmEndpoint::leave_to_others(const Watch& watched) noexcept {
  bool more = something(Serve::kReplies) || watched.sees();
  if (!more && bell_->watched.load() != watched.number) {
    const Lock lock(mutex_);
    more = watched_.sees();
  }
  if (more) bell_.rouse(true);
}

void note_wake_up() noexcept { woke_somebody = true; }

void ShmEndpoint::begin_attention(Attention& attention) noexcept {
  if (attended_here || Attendance::is_here() || !home_.is_here()) return;
  Attendance::begin(*this, attention.notes);
  attention.notes.began = true;
  attention_here = &attention;
  attended_here = this;
}

void ShmEndpoint::end_attention(Attention& attention) noexcept {
  attended_here = nullptr;
  if (home_.is_here()) Attendance::end(*this, attention.notes);
}

bool ShmEndpoint::wait(const Deadline& deadline, FunctionRef<bool()> ready) {
  require_home();
  if (ready()) return true;
  Attendance here(*this);
  Delivery::finish_all();
  constexpr int kClockEvery = 256;
  for (;;) {
    const bool makes_room =
        std::exchange(woke_somebody, false) || is_crowded() || spins_.core_is_wanted();
    const int spins = makes_room ? 0 : spins_.waits().spins();
    bool wanted = false;
    for (int i = 0;; ++i) {
      if (here.watched.sees() || something(Serve::kReplies) ||
          bell_->watched.load(std::memory_order_relaxed) != here.watched.number) {
        Lock lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) {
          if (here.watched.number != bell_->watched.load(std::memory_order_relaxed)) {
            here.watched = watched_.watch();
          }
          const Moved moved = poll_one(lock, Serve::kReplies);
          // What it finds for others is no reason to stay.
          if (moved == Moved::kReply) i = 0;
          here.completed |= moved == Moved::kReply;
        }
      }
      if (ready()) {
        here.quick = spins != 0 && !wanted;
        if (here.quick) spins_.waits().paid();
        return true;
      }
      if (std::exchange(here.completed, false)) wake_after_delivery();
      if (i >= spins) break;
      if (i % kClockEvery == kClockEvery - 1 && deadline.expired()) return ready();
      if (relax(i)) continue;
      wanted = true;
      spins_.leave_core();
      i = spins;
    }
    if (spins != 0) spins_.waits().in_vain();
    hand_over_here();
    bool in_time = true;
    {
      const Doorbell::Nap asleep(bell_->waiters);
      const Attendance::Pause pause(here);
      bool idle = false;
      {
        const Lock lock(mutex_);  // nobody has a letter in his hand
        idle = !something(Serve::kReplies) && !watched_.sees();
      }
      if (idle && !ready()) {
        const auto start = Clock::now();
        in_time = asleep.sleep(deadline);
        if (Clock::now() - start < kShortSleep) spins_.waits().paid();
      }
    }
    if (ready()) return true;
    if (!in_time || deadline.expired()) return false;
  }
}

// Senders do not know of it, and whoever serves does so as if it were not there.
bool ShmEndpoint::wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) {
  require_home();
  if (ready()) return true;
  Delivery::finish_all();
  hand_over_here();
  const Attendance::Absence away;
  for (;;) {
    Announcement here(bell_.aside());
    if (ready()) return true;
    if (!here.sleep(deadline)) return ready();
  }
}

}  // namespace convoy::shm
