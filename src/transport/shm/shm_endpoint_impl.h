#pragma once

#include <algorithm>
#include <bitset>
#include <climits>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "base/guarded.h"
#include "os/fork_guard.h"
#include "os/wait.h"
#include "transport/shm/arena.h"
#include "transport/shm/descriptors.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/fabric.h"
#include "transport/shm/letter_ring.h"
#include "transport/shm/quick_mutex.h"
#include "transport/shm/shm_endpoint.h"

// The parts of the shared-memory endpoint: included by the files that implement it.
//
// Locks, in the order in which they are taken: ShmEndpoint::mutex_ (what arrives: rings, remotes,
// queues), then ShmRemote::send_mutex_ (what is sent), then heap_, timers_, events_. No call of the
// inbox and no `on_sent` is made under one.
namespace convoy::shm {

class ShmEndpoint;
class ShmRemote;

// What goes over the socket of a connection, as Frame::segment of a note; `bytes` is the size of
// the memory whose descriptor comes with it.
enum class NoteType : std::uint64_t {
  kBell = 1,     // the sender's doorbell; the receiver's slot there is in Frame::process
  kRing = 2,     // the ring of letters from the sender
  kSegment = 3,  // memory that letters will refer to; its number is in Frame::process
  kDrop = 4,     // no more
  kWaker = 5,    // the sender's thread that serves sleeps on epoll: its eventfd; before kBell
};

// A number in the place of an Id, which notes have room for.
Id note_id(std::uint64_t number);
std::uint64_t note_number(const Id& id);

// This thread has woken one of another endpoint: see wait().
void note_wake_up() noexcept;

// The doorbell of another endpoint. Set once; kept by loans, which outlive remotes.
struct RemoteBell {
  std::atomic<Doorbell*> bell{nullptr};
  std::uint32_t number = 0;  // ours there
  Mapping mapping;
  UniqueFd waker;
  Doorbell::Rung rung;

  // Before it is known nothing is lost: whoever learns of it knocks. The letter was written under a
  // QuickMutex, which is free again.
  void announce_letter(bool reply) noexcept {
    fence_after_update();
    Doorbell* const known = bell.load(std::memory_order_acquire);
    if (known && known->announce_letter(number, reply, rung)) note_wake_up();
  }
  void knock(bool reply) noexcept {
    full_fence();
    if (Doorbell* const known = bell.load(std::memory_order_acquire))
      known->knock(number, reply, rung);
  }
};

// What a letter lent, at the receiver. Given back when the last part of it is gone; by a forked
// child never.
struct Borrowed {
  std::shared_ptr<RingReader> ring;
  std::shared_ptr<RemoteBell> bell;
  std::uint16_t loan;
  bool knock;
  HomeProcess home;
  std::vector<Mapping> memory;

  Borrowed(std::shared_ptr<RingReader> from, std::shared_ptr<RemoteBell> lender,
           std::uint16_t number, bool knocks)
      : ring(std::move(from)), bell(std::move(lender)), loan(number), knock(knocks) {}
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    if (!home.is_here()) return;
    memory.clear();
    if (ring->release(loan) || knock) bell->knock(false);
  }
};

class ShmRemote final : public transport::Remote {
 public:
  ShmRemote(ShmEndpoint& owner, const transport::Address& address, const ProcessInfo& info,
            std::uint32_t number);

  transport::SendResult try_send(const transport::Letter& letter, transport::Sent on_sent) override;
  bool lost() const override { return lost_.load(std::memory_order_acquire); }
  void cut() noexcept override;

 private:
  friend class ShmEndpoint;

  struct Plan;
  struct Link {
    std::shared_ptr<Peer> peer;
    std::shared_ptr<Alarm> alarm;
  };
  struct Loan {
    // kStreaming: it is being filled, too, and the reader knows of it.
    enum class State { kFree, kFilling, kStreaming, kLent } state = State::kFree;
    bool given_back = false;  // of one that streams: the sender frees it when it has filled it
    std::size_t bytes = 0;
    Location block;
    transport::Sent on_sent;
  };

  void probe();
  bool make_ring();
  transport::SendResult send_small(const transport::Letter& letter, const Plan& plan);
  transport::SendResult send_plain(const transport::Letter& letter);
  std::span<std::byte> begin_small(std::size_t entry_bytes);
  transport::SendResult send_large(const transport::Letter& letter, const Plan& plan,
                                   transport::Sent& on_sent);
  void stream(const transport::Letter& letter, const Plan& plan, std::byte* block);
  void end_stream(const Plan& plan, const Mapping& ring, const std::shared_ptr<Peer>& peer);
  bool reserve_loans(Plan& plan);
  void drop_loans(Plan& plan);
  bool can_be_read();
  bool pass_segment(SegmentId id);
  void refuse(std::size_t ring_bytes, std::size_t loan_bytes);
  bool has_room();
  void collect();       // what the receiver has given back
  bool look_at_sent();  // true: there is room for what was refused
  void write_entry(std::span<std::byte> to, const transport::Letter& letter, const Plan& plan);

  ShmEndpoint& owner_;
  const ProcessInfo info_;
  const std::uint32_t number_;  // of it at our doorbell
  std::atomic<bool> lost_{false};
  const std::shared_ptr<RemoteBell> bell_ = std::make_shared<RemoteBell>();

  // Of the sending side, under send_mutex_.
  QuickMutex send_mutex_;
  std::vector<Link> links_;  // connections; changed under both locks
  RingWriter writer_;
  std::vector<Loan> loans_;
  std::size_t lent_bytes_ = 0;
  std::set<SegmentId> passed_;
  std::size_t refused_ring_ = 0;  // the largest that was refused
  std::size_t refused_loan_ = 0;
  bool refused_ = false;
  // There is something to look at: a letter was refused, or something is lent.
  std::atomic<bool> to_look_{false};

  // Of the receiving side, under the endpoint's mutex.
  struct SegmentSlot {
    UniqueFd fd;
    std::size_t bytes = 0;
    Mapping mapping;
  };
  std::shared_ptr<RingReader> reader_;
  std::map<SegmentId, SegmentSlot> segments_;
  // Their segments are still on their way, or their sender has stopped to fill them.
  std::vector<std::unique_ptr<struct Transfer>> stalled_;
  bool joining_ = false;       // Inbox::joined() was not called yet
  bool queued_ = false;        // in the endpoint's ready_
  int burst_ = 0;              // letters taken in its turn
  std::size_t transfers_ = 0;  // large letters that are being taken
  // Replies that threads in wait() have taken out of its ring, and those that they have delivered.
  std::uint64_t taken_ = 0;
  std::atomic<std::uint64_t> delivered_{0};
  bool ending_ = false;  // lost, but what it sent before comes first
  bool told_ = false;
  std::optional<Error> why_;
};

// A large letter that is being taken.
struct Transfer {
  struct Source {
    const std::byte* data = nullptr;  // in memory that is mapped here
    std::uint64_t address = 0;        // in the sender's
    std::size_t bytes = 0;
    std::byte* to = nullptr;
  };

  ShmRemote* remote;
  std::shared_ptr<Peer> peer;  // whose memory it is
  std::vector<std::byte> entry;
  ParsedLetter letter;               // refers to `entry`
  std::shared_ptr<Borrowed> hold;    // of what was lent
  std::shared_ptr<Borrowed> direct;  // of what is read in the sender's memory
  std::vector<Source> sources;
  // Of one that streams: how much is there, and from where that counts.
  const std::atomic<std::uint64_t>* ready = nullptr;
  const std::byte* stream = nullptr;
  int polls_in_vain = 0;
  std::vector<transport::Part> parts;
  bool placed = false;
  // All was copied; delivered when the ring was read up to there.
  std::optional<std::uint64_t> settles = std::nullopt;
  std::size_t piece = 0;  // where copying is
  std::size_t done = 0;

  // How much of the piece is there. Sequentially consistent: looked at after the sender's bit was
  // cleared, it is what the sender had stored before it found the bit set.
  std::size_t there() const noexcept {
    const Source& source = sources[piece];
    if (!stream || letter.pieces[piece].entry.how != PieceEntry::kLent) return source.bytes;
    const auto begin = static_cast<std::uint64_t>(source.data - stream);
    const std::uint64_t end = ready->load();
    return static_cast<std::size_t>(std::clamp(end, begin, begin + source.bytes) - begin);
  }
  // There is something to copy, or the piece is complete. One whose sender says nonsense goes on,
  // too: copying finds out.
  bool can_go_on() const noexcept {
    if (!stream || piece == sources.size()) return true;
    return sources[piece].to ? there() != done : there() == sources[piece].bytes;
  }
};

// Letters without pieces that were taken out of one ring at once, to be delivered without the lock.
struct Handful {
  static constexpr std::size_t kMost = 16;
  // Of one letter; larger ones are taken alone.
  static constexpr std::size_t kMostBytes = 1024;
  static constexpr std::size_t kBytes = 4096;
  static constexpr std::uint32_t kClosed = 1U << 30;

  ShmRemote* remote = nullptr;
  std::size_t used = 0;
  std::uint32_t count = 0;
  // Of the next one to be delivered: whoever counts it up has it.
  std::atomic<std::uint32_t> next{0};
  std::array<PlainLetter, kMost> letters;
  std::array<std::byte, kBytes> memory;

  void begin(ShmRemote& from) {
    remote = &from;
    used = 0;
    count = 0;
    next.store(0, std::memory_order_relaxed);
  }
  bool has_room() const { return count < kMost && used + kMostBytes <= kBytes; }
  std::span<std::byte> room() { return std::span(memory).subspan(used, kMostBytes); }
  // What was parsed into letters[count].
  void add(std::span<const std::byte> entry) {
    used += entry.size();
    ++count;
  }
  // Of the letter that is the caller's now; nullptr: there is none left.
  const PlainLetter* claim() noexcept {
    const std::uint32_t mine = next.fetch_add(1);
    return mine < count ? &letters[mine] : nullptr;
  }
  // The same where only one thread has the hand.
  const PlainLetter* take_next() noexcept {
    const std::uint32_t mine = next.load(std::memory_order_relaxed);
    if (mine >= count) return nullptr;
    next.store(mine + 1, std::memory_order_relaxed);
    return &letters[mine];
  }
};

// Replies that a thread has taken, and hands to the inbox: to be counted when they are delivered.
// If the inbox waits in that call, the thread delivers the others first: they may be what somebody
// waits for. And the loss of their sender does not wait for that call.
class Delivery {
 public:
  Delivery(ShmEndpoint& endpoint, ShmRemote& remote, Handful* hand, std::uint32_t replies) noexcept
      : endpoint_(endpoint), remote_(remote), hand_(hand), replies_(replies), outer_(innermost) {
    innermost = this;
  }
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;
  ~Delivery() {
    innermost = outer_;
    settle();
  }

  // Those of this thread, before it waits.
  static void finish_all() {
    if (innermost) [[unlikely]]
      finish_from(innermost);
  }

 private:
  static void finish_from(Delivery* delivery);
  void settle();

  static constinit thread_local Delivery* innermost;

  ShmEndpoint& endpoint_;
  ShmRemote& remote_;
  Handful* const hand_;    // nullptr: one reply, which is being delivered
  std::uint32_t replies_;  // to be counted
  Delivery* const outer_;  // in whose call the inbox waits
};

class ShmEndpoint final : public transport::Endpoint {
 public:
  ShmEndpoint(transport::Inbox& inbox, const ShmEndpointOptions& options);
  ~ShmEndpoint() override;

  const transport::Address& address() const override { return address_; }
  transport::Remote& remote(const transport::Address& address) override;
  bool poll(Serve serve) override;
  bool wait(const Deadline& deadline, FunctionRef<bool()> ready) override;
  bool wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) override;
  void begin_attention(Attention& attention) noexcept override;
  void end_attention(Attention& attention) noexcept override;
  void wake() noexcept override {
    full_fence();
    wake_after_fence();
  }
  // After poll_one() has delivered a reply to a thread in wait(): it has counted that, or has taken
  // the lock again, either of which is an update (fence_after_update).
  void wake_after_delivery() noexcept {
    fence_after_update();
    wake_after_fence();
  }
  void wake_after_fence() noexcept {
    Doorbell::ring_once(bell().waiters, rung_.all_waiters, INT_MAX);
    if (aside_.sleepers.load(std::memory_order_relaxed) != 0) ring_anyway(aside_, INT_MAX);
  }
  void hand_over() noexcept override;
  Clock::time_point now() const override { return Clock::now(); }
  TimerId call_at(Clock::time_point when, std::function<void()> function) override;
  bool cancel(TimerId id) override;

  ShmEndpointStats stats();
  std::size_t trim();
  // Throws kInvalidArgument if the endpoint was not made for descriptors.
  Descriptors& descriptors();

 private:
  friend class ShmRemote;
  friend class Delivery;
  using Lock = std::unique_lock<QuickMutex>;

  // Something that happened on the watch thread, or while sending.
  struct Event {
    enum class Type { kDialed, kNote, kLost, kCut, kSent } type;
    std::shared_ptr<Peer> peer = nullptr;
    std::string text = {};  // kDialed: the other's address; kCut: what it did, if it did anything
    Frame frame = {};
    UniqueFd fd = {};
    ShmRemote* remote = nullptr;  // kCut, kSent
    std::vector<std::pair<transport::Sent, bool>> sent = {};
  };
  // Something that the serving thread has to do.
  struct Task {
    enum class Type { kLetter, kJoined, kLost, kRoom, kSent } type;
    ShmRemote* remote;
    std::vector<std::byte> entry = {};
    std::vector<std::pair<transport::Sent, bool>> sent = {};  // and whether it was received
  };
  struct Timers {
    std::map<std::pair<Clock::time_point, TimerId>, std::function<void()>> queue;
    std::map<TimerId, Clock::time_point> times;
    TimerId next = 1;
  };
  // Loans of a remote that was lost while its process lives: it may still read them.
  struct Limbo {
    Mapping ring;
    std::shared_ptr<Peer> peer;
    std::map<std::uint16_t, Location> blocks;
  };
  struct Heap {
    std::optional<Arena> arena;
    std::vector<Limbo> limbo;
  };
  // What poll_one() did.
  enum class Moved {
    kNothing,
    kSomething,
    kReply,  // and threads that sleep in wait() may be concerned
    kTaken,  // requests, which are in the hand of the thread that serves
  };
  // The ring that a thread looks at besides the doorbell.
  struct Watch {
    std::shared_ptr<RingReader> ring;
    std::uint32_t number = 0;  // as in Doorbell::watched

    bool sees() const noexcept { return ring && ring->has_letter(); }
  };
  // Threads that serve: one has the turn; others stand in calls that have handed over, or are idle.
  struct Servants {
    std::vector<std::thread> threads;
    std::uint64_t turn = 1;  // of the thread that serves
    bool taken = true;       // somebody has this turn
    int idle = 0;
    bool stop = false;
  };
  class LinkAlarm;
  class Attendance;

  Doorbell& bell() const { return *reinterpret_cast<Doorbell*>(control_->data()); }
  void require_home() const;

  // shm_connections.cpp
  void happen(Event event) noexcept;
  void retry_soon(ShmRemote& remote);
  Peer::Notes notes();
  ShmRemote& make_remote(const transport::Address& address, const ProcessInfo& info);
  void attach(ShmRemote& remote, const std::shared_ptr<Peer>& peer);
  void take_events();
  void take_event(Event& event);
  void take_note(ShmRemote& remote, Event& event);

  // shm_endpoint.cpp
  bool run_timers(Lock& lock);
  Deadline next_timer();

  // shm_threads.cpp
  void serve(std::uint64_t turn);
  bool something(Serve serve) const noexcept;
  bool for_service() const noexcept;
  bool timer_is_due() const noexcept;
  bool core_is_wanted() noexcept;
  void leave_core() noexcept;
  bool sees_watched() const noexcept { return watched_ring_ && watched_ring_->has_letter(); }
  // Somebody in wait() looks at rings.
  bool is_attended() const noexcept { return bell().awake.load() != 0 || inside_.load() != 0; }
  void leave_wait(Attendance& attendance) noexcept;
  void leave_to_others(const Watch& watched) noexcept;
  void count_wait(bool quick) noexcept;
  void begin_to_linger() noexcept;
  void end_lingering() noexcept;
  void start_servants();
  void stop_servants() noexcept;
  void be_servant();
  bool has_turn(std::uint64_t turn) const noexcept;
  static void hand_over_here() noexcept;
  void ring_service() noexcept {
    full_fence();
    Doorbell::ring_once(bell().service, rung_.service, 1, rung_.waker);
  }
  void nap(const Doorbell::Nap& here, const Deadline& deadline);
  void look_at_descriptors();

  // shm_arrivals.cpp
  Moved poll_one(Lock& lock, Serve serve, Handful* hand = nullptr);
  void enqueue(ShmRemote& remote);
  void dequeue(ShmRemote& remote);
  void set_watched(ShmRemote* remote);
  bool take_letters(Lock& lock, ShmRemote& remote, Serve serve, Handful& hand, bool keep,
                    Moved& moved);
  void count_letters(ShmRemote& remote, int letters);
  Moved deliver_hand(Lock& lock, Handful& hand);
  void count_delivered(ShmRemote& remote, std::uint32_t replies);
  Moved arrive(ShmRemote& remote, const PlainLetter& letter);
  void take_over_hand();
  void end_burst(ShmRemote& remote, bool drained);
  Moved deliver(Lock& lock, ShmRemote& remote, const ParsedLetter& letter);
  Moved arrive(ShmRemote& remote, transport::Arrival&& arrival);
  void push_task(Task task);
  Moved run_task(Lock& lock);
  bool has_transfer(Serve serve) const;
  bool letter_comes(Lock& lock);

  // shm_transfers.cpp
  void start_transfer(ShmRemote& remote, std::span<const std::byte> entry,
                      const ParsedLetter& letter);
  void retry_stalled(ShmRemote& remote);
  Moved work_on_transfer(Lock& lock, Serve serve, std::size_t slice);
  bool resolve(Transfer& transfer);
  void place(Transfer& transfer);
  bool copy_slice(Transfer& transfer, std::size_t budget);
  void go_on(std::unique_ptr<Transfer> transfer);
  void stall(std::unique_ptr<Transfer> transfer);
  void end_transfer(ShmRemote& remote);

  // shm_losses.cpp
  void lose(ShmRemote& remote, const Error& why);
  void drop_reader(ShmRemote& remote);
  void break_off(ShmRemote& remote, const std::string& what);
  void finish_loss(ShmRemote& remote);
  std::vector<std::pair<transport::Sent, bool>> take_loans(ShmRemote& remote,
                                                           const std::shared_ptr<Peer>& alive);
  void sweep_limbo(Heap& heap);

  transport::Inbox& inbox_;
  const ShmEndpointOptions options_;
  const HomeProcess home_;
  Fabric& fabric_;
  transport::Address address_;
  const std::uint64_t probe_;
  Mapping control_;
  UniqueFd control_fd_;

  mutable QuickMutex mutex_;
  // Under mutex_:
  std::map<Id, std::unique_ptr<ShmRemote>> remotes_;
  std::map<const Peer*, ShmRemote*> owners_;  // of connections
  int dialing_ = 0;                           // threads in remote()
  std::vector<Event> early_;                  // of connections that they are about to make
  std::vector<std::vector<ShmRemote*>> slots_{Doorbell::kSlots};
  std::uint32_t next_number_ = 0;
  std::deque<ShmRemote*> ready_;
  std::deque<Task> tasks_;
  Handful* in_hand_ = nullptr;                          // of the thread that serves
  std::deque<std::unique_ptr<Transfer>> transfers_[2];  // by ParsedLetter::reply
  // The same numbers, for those who look without the lock.
  std::atomic<std::size_t> ready_count_{0};
  std::atomic<std::size_t> task_count_{0};
  std::atomic<std::size_t> transfer_count_[2] = {};

  unsigned since_slice_ = 0;   // letters
  unsigned since_timers_ = 0;  // polls
  // The ring that is looked at besides the doorbell, since the last letters came there.
  ShmRemote* watched_ = nullptr;
  std::shared_ptr<RingReader> watched_ring_;
  const ShmRemote* last_ = nullptr;  // whose letter was the last
  int in_a_row_ = 0;                 // letters of it

  std::atomic<bool> has_events_{false};
  Guarded<std::vector<Event>> events_;
  Guarded<Timers> timers_;
  std::atomic<std::int64_t> next_timer_{INT64_MAX};  // of steady_clock
  Guarded<Heap> heap_;

  std::unique_ptr<Descriptors> descriptors_;  // if the thread that serves sleeps on epoll
  Doorbell::Rung rung_;                       // of our own threads
  // See begin_to_linger().
  std::atomic<bool> linger_asked_{false};
  std::atomic<bool> lingering_{false};
  std::atomic<std::uint32_t> inside_{0};       // threads in wait() that count on it
  std::atomic<std::uint64_t> visits_{0};       // of wait(); about
  std::atomic<unsigned> quick_waits_{0};       // in a row
  std::atomic<Clock::rep> quick_since_{0};     // the first of them
  std::atomic<std::uint64_t> visits_seen_{0};  // of the thread that serves
  std::atomic<int> quiet_{0};                  // moments in which nobody came

  // See leave_core(); 0: threads may spin.
  std::atomic<Clock::rep> no_spins_until_{0};
  WaitWord aside_;  // those in wait_aside()
  SpinGuess wait_spins_;
  SpinGuess serve_spins_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> turn_{1};  // Servants::turn
  Guarded<Servants> servants_;
};

}  // namespace convoy::shm
