#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "convoy/error.h"
#include "transport/endpoint.h"
#include "transport/shm/letter_ring.h"
#include "transport/shm/loans.h"
#include "transport/shm/peer.h"
#include "transport/shm/quick_mutex.h"
#include "transport/shm/remote_bell.h"
#include "transport/shm/shm_transfer.h"

namespace convoy::shm {

class ShmEndpoint;

// What comes from one remote: its ring, its memory, large letters that wait, and its end. Under the
// endpoint's mutex, but for `delivered`.
struct Incoming {
  struct SegmentSlot {
    UniqueFd fd;  // until it is mapped
    std::size_t bytes = 0;
    Mapping mapping;
  };

  std::shared_ptr<RingReader> reader;  // nullptr: it is not here yet, or was broken off
  std::map<SegmentId, SegmentSlot> segments;
  // Their segments are still on their way, or their sender has stopped to fill them.
  std::vector<std::unique_ptr<Transfer>> stalled;
  bool joining = false;       // Inbox::joined() was not called yet
  bool queued = false;        // in Backlog's queue of rings
  int burst = 0;              // letters taken in its turn
  std::size_t transfers = 0;  // large letters that are being taken
  // Replies that threads in wait() have taken out of its ring, and those that they have delivered.
  std::uint64_t taken = 0;
  std::atomic<std::uint64_t> delivered{0};
  bool ending = false;       // lost, but what it sent before comes first
  bool told = false;         // after `ending`: nothing comes any more, and lost() is on its way
  std::optional<Error> why;  // since it is `ending`

  // Of one that is lost: all that came before is with the inbox.
  bool is_over() const {
    const bool settled = taken == delivered.load();
    return ending && transfers == 0 && settled;
  }
};

// Another endpoint. The object itself is the sending side, under send_mutex_; in() is the receiving
// side, under the endpoint's mutex.
class ShmRemote final : public transport::Remote {
 public:
  ShmRemote(ShmEndpoint& owner, const transport::Address& address, const ProcessInfo& info,
            std::uint32_t number);

  transport::SendResult try_send(const transport::Letter& letter, transport::Sent on_sent) override;
  bool lost() const override { return lost_.load(std::memory_order_acquire); }
  void cut() noexcept override;

  // Of it at our doorbell.
  std::uint32_t number() const noexcept { return number_; }
  Incoming& in() noexcept { return in_; }

 private:
  friend class ShmEndpoint;

  struct Plan;
  struct Link {
    std::shared_ptr<Peer> peer;
    std::shared_ptr<Alarm> alarm;
  };
  // The largest that was refused since there was room last.
  struct Refused {
    bool any = false;
    std::size_t ring_bytes = 0;
    std::size_t loan_bytes = 0;
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
  const std::uint32_t number_;
  std::atomic<bool> lost_{false};
  const std::shared_ptr<RemoteBell> bell_ = std::make_shared<RemoteBell>();

  QuickMutex send_mutex_;
  // Under send_mutex_:
  std::vector<Link> links_;  // connections; changed under both locks
  RingWriter writer_;
  Loans loans_;
  std::set<SegmentId> passed_;
  Refused refused_;
  // There is something to look at: a letter was refused, or something is lent.
  std::atomic<bool> to_look_{false};

  Incoming in_;
};

}  // namespace convoy::shm
