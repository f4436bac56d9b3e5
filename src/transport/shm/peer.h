#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/guarded.h"
#include "base/id.h"
#include "base/loop.h"
#include "os/frame_socket.h"
#include "os/machine.h"
#include "os/process.h"
#include "transport/shm/arena.h"

namespace convoy::shm {

// What a process tells others about itself, through the store.
struct ProcessInfo {
  Id id;  // random, new in every process
  pid_t pid = 0;
  std::uint64_t start_time = 0;
  std::uint64_t domain = 0;  // process_domain()
  std::string boot;          // boot_id(): names the running host
  std::string host;          // for messages
  std::string socket;        // where it accepts connections
  CoreSet cores;             // that it may run on

  std::string encode() const;
  static ProcessInfo decode(const std::string& text);  // throws kInvalidArgument
};

// How a process ended, for an error: "was killed by signal 9 (SIGKILL)".
std::string describe_end(pid_t pid, int pidfd);

// Is told by the watch thread that a peer is gone. ring() must not block.
class Alarm {
 public:
  virtual ~Alarm() = default;
  virtual void ring() noexcept = 0;
};

// What processes send each other over their connection: see os/frame_socket.h.
struct Frame {
  enum Type : std::uint32_t {
    kHello = 1,
    kSegment = 2,
    kDrop = 3,
    kDial = 4,  // greets instead of kHello: for the door `process`, with `bytes` of text behind it
    kNote = 5,  // over a dialed connection, with one descriptor or none
    kBye = 6,   // the last one: the door is closed, or this connection to it
  };
  static constexpr std::uint32_t kMagic = 0x31465643;  // "CVF1"

  std::uint32_t magic = kMagic;
  std::uint32_t type = 0;
  Id process{};               // kHello: who connects
  std::uint64_t segment = 0;  // kSegment (with one descriptor), kDrop; kNote: what it likes
  std::uint64_t bytes = 0;    // kSegment, kDial; kNote: what it likes
};
static_assert(sizeof(Frame) == 40);

// Another process of this host: its shared memory as mapped here, and whether it lives. Made by the
// Fabric, one per process, and kept by it until that process is gone. All methods may be called
// from any thread.
class Peer : public std::enable_shared_from_this<Peer> {
 public:
  Peer(ProcessInfo info, Socket socket, UniqueFd pidfd);

  const ProcessInfo& info() const { return info_; }

  // Why it is gone; nullopt while it lives.
  std::optional<std::string> loss();
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  // True if it is lost, or its connection has just ended and it will be in a moment.
  bool ends(const Deadline& deadline);

  // The peer's memory here. Waits for the segment's descriptor if it is still on its way; throws
  // kTimeout, kPeerLost, or kInvalidArgument if the range does not lie in the segment.
  std::byte* resolve(const Location& location, std::size_t bytes, const Deadline& deadline);

  // Keeps a segment mapped although the peer drops it. nullptr if it is not here.
  std::shared_ptr<const Segment> keep(SegmentId id);

  // Rings until the Alarm is destroyed; at once if the peer is lost already.
  void subscribe(const std::shared_ptr<Alarm>& alarm);

  void send_segment(SegmentId id, const Segment& segment);
  void send_drop(SegmentId id);

  // Of a dialed connection: what the other side noted, on the watch thread. Must not block, and may
  // throw: then the peer is lost. Set before start_on_loop().
  using Notes = std::function<void(Peer&, const Frame&, UniqueFd)>;
  void on_note(Notes notes) { notes_ = std::move(notes); }
  // Does not wait. False: not now. A peer that is gone takes anything.
  bool try_note(std::uint64_t number, std::uint64_t bytes, int descriptor, const Id& id = {});
  void send_bye() noexcept;

  // The watch thread's side. After stop_on_loop() it takes no note and rings no alarm.
  void stop_on_loop();
  void start_on_loop(Loop& loop);
  // Ends what start_on_loop() began. For a peer that nobody has been given.
  void abandon_on_loop(const std::string& why) { lose_on_loop(why); }
  int descriptor() const { return socket_.socket().fd(); }
  int pidfd() const { return pidfd_.get(); }

 private:
  struct State {
    std::map<SegmentId, std::shared_ptr<const Segment>> segments;
    std::vector<std::weak_ptr<Alarm>> alarms;
    std::optional<std::string> loss;
  };

  void receive_on_loop();
  void take_frame_on_loop(const Frame& frame);
  void warm_on_loop(const std::weak_ptr<const Segment>& segment, std::size_t begin);
  void exited_on_loop();
  void closed_on_loop();
  void lose_on_loop(const std::string& why);
  void send(const Frame& frame, std::span<const int> descriptors);

  const ProcessInfo info_;
  FrameSocket<Frame> socket_;
  UniqueFd pidfd_;
  std::mutex send_mutex_;
  Guarded<State> state_;
  // Written once by the watch thread (release, after state_.loss is set), read by everyone.
  std::atomic<bool> lost_{false};
  // The same when the connection has ended, which is a moment before.
  std::atomic<bool> closed_{false};
  // Of the watch thread.
  Loop* loop_ = nullptr;
  Loop::WatchId socket_watch_ = 0;
  Loop::WatchId pid_watch_ = 0;
  Loop::TimerId grace_ = 0;  // after the connection has ended
  Notes notes_;
};

}  // namespace convoy::shm
