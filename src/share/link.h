#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "convoy/error.h"
#include "os/frame_socket.h"
#include "share/region.h"
#include "share/ring.h"

namespace convoy::share {

// What goes over the socket of a link.
struct LinkFrame {
  enum Type : std::uint32_t {
    kHello = 1,       // with the sender's ring
    kRegion = 2,      // with memory
    kWake = 3,        // look at the rings
    kBye = 4,         // the last one: the end was closed. Without it, its process has ended
    kDescriptor = 5,  // with any descriptor, for a message that comes
  };
  static constexpr std::uint32_t kMagic = 0x324c5643;  // "CVL2"

  std::uint32_t magic = kMagic;
  std::uint32_t type = 0;
  std::uint64_t process = 0;  // kHello: ProcessWord
  std::uint64_t bytes = 0;    // kHello, kRegion: of what the descriptor is
  std::uint32_t index = 0;    // kRegion, kDescriptor: counts from 0; kHello: upper half of domain
  std::uint32_t kind = 0;     // kRegion: Region::Kind; kHello: lower half of process_domain()
};
static_assert(sizeof(LinkFrame) == 32);

// Messages and memory between two processes: a ring in each direction for bytes, and a socket for
// descriptors, for waking who sleeps, and for the news that the peer is gone. While both sides are
// busy no system call is made.
//
// One thread may send while another receives; callers serialize each direction. Blocks where a
// Deadline is given.
class Link {
 public:
  explicit Link(Socket socket);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link();

  // Sending. The number under which the peer knows the region from now on.
  std::uint32_t introduce(const std::shared_ptr<Region>& region, const Deadline& deadline);
  // The number under which the peer gets a duplicate.
  std::uint32_t pass(int descriptor, const Deadline& deadline);
  // At most Ring::kMostBytes. Returns the message's number, from 1. kTimeout: nothing was sent.
  // kPeerLost.
  std::uint64_t send(std::span<const std::byte> message, const Deadline& deadline);
  // How many messages the peer is done with.
  std::uint64_t done() const { return greeted_.load(std::memory_order_acquire) ? out_.done() : 0; }

  // Receiving. kTimeout; kPeerLost when the peer is gone and all that it sent was received.
  std::vector<std::byte> receive(const Deadline& deadline);
  // False: nothing is there. kPeerLost as above.
  bool has_message();
  // One that the peer introduced before the message that was received last. kInvalidArgument.
  std::shared_ptr<Region> region(std::uint32_t index);
  // One that the peer passed, once. kInvalidArgument.
  UniqueFd passed(std::uint32_t index);
  void finish();

  // The socket, if the link was not used yet. kInvalidArgument.
  UniqueFd release();
  void close() noexcept;
  // The peer is gone, as far as is known without asking.
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  bool look();  // asks, if the link is used; false: it is gone
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  std::string peer() const;  // for messages: "pid 123", "its peer"
  int descriptor() const { return socket_.socket().fd(); }

 private:
  // Memory and descriptors that the peer has from this end. Both ends count them alike, from 0.
  struct Given {
    std::unordered_map<std::uint64_t, std::uint32_t> regions;  // serial -> index; not of kOutside
    std::uint32_t next_region = 0;
    std::uint32_t next_descriptor = 0;
  };
  // The other way round. Memory of kOutside is introduced for each message, and taken out by it;
  // a descriptor is taken out by the one message that refers to it.
  struct Got {
    std::unordered_map<std::uint32_t, std::shared_ptr<Region>> regions;
    std::uint32_t next_region = 0;
    std::unordered_map<std::uint32_t, UniqueFd> descriptors;
    std::uint32_t next_descriptor = 0;
  };

  void greet(const Deadline& deadline);
  template <class Ready>
  bool wait(SleepFlag& sleeps, const Deadline& deadline, Ready ready);
  template <class Ready>
  bool sleep(const Deadline& deadline, Ready ready);
  void pump();  // pump_mutex_ is held
  void take(const LinkFrame& frame);
  template <class Known>
  void pump_until(std::unique_lock<std::mutex>& lock, Known known);
  void lose(const std::string& why, ErrorKind kind = ErrorKind::kPeerLost);
  void find_out_how_it_ended();
  void pump_if_idle();  // not while another thread waits on the socket: it does
  void pump_now_and_then();
  void send_frame(const LinkFrame& frame, int descriptor, const Deadline& deadline);
  void wake_peer(SleepFlag& sleeps);
  [[noreturn]] void fail_lost(const char* operation);
  void check_open(const char* operation) const;

  FrameSocket<LinkFrame> socket_;
  std::atomic<bool> lost_{false};    // written under pump_mutex_
  std::atomic<bool> closed_{false};  // by close()
  std::atomic<bool> greeted_{false};
  std::mutex greet_mutex_;

  // Of the sending side.
  Ring out_;
  std::uint64_t sent_ = 0;
  Given given_;

  // Of the receiving side; set by pump(), once.
  Ring in_;

  std::mutex socket_mutex_;  // sending on the socket

  // Reading from the socket. One thread at a time waits on it for all.
  mutable std::mutex pump_mutex_;
  std::condition_variable pumped_;
  bool polling_ = false;
  std::atomic<bool> has_ring_{false};  // in_ is set
  bool bye_ = false;
  bool drained_ = false;  // the socket has no more
  std::string why_lost_;
  ErrorKind lost_kind_ = ErrorKind::kPeerLost;
  Got got_;
  ProcessWord peer_ = 0;
  UniqueFd pidfd_;
  Deadline::Clock::time_point last_pump_;

  SpinGuess spin_;
};

}  // namespace convoy::share
