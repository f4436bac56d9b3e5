#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/guarded.h"
#include "os/fork_guard.h"
#include "transport/endpoint.h"
#include "transport/shm/backlog.h"
#include "transport/shm/descriptors.h"
#include "transport/shm/fabric.h"
#include "transport/shm/lent_heap.h"
#include "transport/shm/letter_ring.h"
#include "transport/shm/lingering.h"
#include "transport/shm/own_bell.h"
#include "transport/shm/quick_mutex.h"
#include "transport/shm/servants.h"
#include "transport/shm/shm_connections.h"
#include "transport/shm/shm_delivery.h"
#include "transport/shm/shm_endpoint.h"
#include "transport/shm/shm_events.h"
#include "transport/shm/shm_remote.h"
#include "transport/shm/shm_transfer.h"
#include "transport/shm/spins.h"
#include "transport/shm/timer_queue.h"
#include "transport/shm/watched_ring.h"

namespace convoy::shm {

// The shared-memory endpoint: included by the files that implement it. Its parts have headers of
// their own, each with what holds for it.
//
// Locks, in the order in which they are taken: mutex_ (what arrives: connections, remotes, queues),
// then ShmRemote::send_mutex_ (what is sent), then those inside of heap_, timers_, events_ and
// servants_, of which nobody holds two. No call of the inbox and no `on_sent` is made under one.
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
    bell_.wake_after_fence();
  }
  // After poll_one() has delivered a reply to a thread in wait(): it has counted that, or has taken
  // the lock again, either of which is an update (fence_after_update).
  void wake_after_delivery() noexcept {
    fence_after_update();
    bell_.wake_after_fence();
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

  // What poll_one() did.
  enum class Moved {
    kNothing,
    kSomething,
    kReply,  // and threads that sleep in wait() may be concerned
    kTaken,  // requests, which are in the hand of the thread that serves
  };
  class LinkAlarm;
  class Attendance;

  void require_home() const;

  // shm_connections.cpp
  void happen(Event event) noexcept;
  void retry_soon(ShmRemote& remote);
  Peer::Notes notes();
  void attach(ShmRemote& remote, const std::shared_ptr<Peer>& peer);
  void take_events();
  void take_event(Event& event);
  void take_note(ShmRemote& remote, Event& event);

  // shm_endpoint.cpp
  bool run_timers(Lock& lock);

  // shm_threads.cpp
  void serve(std::uint64_t turn);
  bool something(Serve serve) const noexcept;
  bool for_service() const noexcept;
  // Somebody in wait() looks at rings.
  bool is_attended() const noexcept {
    return bell_->awake.load() != 0 || lingering_.has_visitors();
  }
  void leave_wait(Attendance& attendance) noexcept;
  void leave_to_others(const Watch& watched) noexcept;
  void stop_servants() noexcept;
  static void hand_over_here() noexcept;
  void nap(const Doorbell::Nap& here, const Deadline& deadline);
  void look_at_descriptors();

  // shm_arrivals.cpp
  Moved poll_one(Lock& lock, Serve serve, Handful* hand = nullptr);
  void set_watched(ShmRemote* remote);
  bool take_letters(Lock& lock, ShmRemote& remote, Serve serve, Handful& hand, bool keep,
                    Moved& moved);
  void count_letters(ShmRemote& remote, int letters);
  Moved deliver_hand(Lock& lock, Handful& hand);
  void count_delivered(ShmRemote& remote, std::uint32_t replies);
  Moved arrive(ShmRemote& remote, const PlainLetter& letter);
  void end_burst(ShmRemote& remote, bool drained);
  Moved deliver(Lock& lock, ShmRemote& remote, const ParsedLetter& letter);
  Moved arrive(ShmRemote& remote, transport::Arrival&& arrival);
  void push_task(Task task);
  Moved run_task(Lock& lock);
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
  SentList take_loans(ShmRemote& remote, const std::shared_ptr<Peer>& alive);

  // Of all threads: what stays as it is.
  transport::Inbox& inbox_;
  const ShmEndpointOptions options_;
  const HomeProcess home_;
  Fabric& fabric_;
  const transport::Address address_;
  const std::uint64_t probe_;
  OwnBell bell_;

  mutable QuickMutex mutex_;
  // Under mutex_:
  Connections connections_;
  Backlog backlog_;  // with sizes for those who look without the lock
  Pace pace_;
  WatchedRing watched_;

  // Of all threads, each with its own lock or none:
  EventList events_;
  TimerQueue timers_;
  Guarded<LentHeap> heap_;
  std::unique_ptr<Descriptors> descriptors_;  // if the thread that serves sleeps on epoll
  Lingering lingering_;
  Spins spins_;
  Servants servants_;
};

}  // namespace convoy::shm
